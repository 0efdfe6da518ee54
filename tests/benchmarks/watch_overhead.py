"""What watching a training costs, as a share of its step.

    python -m tests.benchmarks.watch_overhead [--steps 40]

Two steps on the CPU: a linear layer, and a small native Swin (two stages, 112 pixels) at batch 2.
Pairs of steps, one watched and one not, alternate in one run, so that whatever else the machine
does meets both. Beside the ratio of their medians stands what the calls of the hook take by
themselves, in microseconds, with an interval's line (once each 30 s) apart. No test asserts on
it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import planner
from planner.watching.watch import INTERVAL_SECONDS, Watch
from tests.building import build_real

Step = Callable[[tuple[Tensor, Tensor]], Tensor]
CALLS = 20_000
SMALL: Any = {"image_size": 112, "depths": (2, 2), "num_heads": (3, 6)}


def make_step(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def interleaved(step: Step, batch: tuple[Tensor, Tensor], watch: Watch, pairs: int) -> list[float]:
    """Median seconds of a step that is not watched, and of one that is."""
    watched = iter(watch.batches(repeat(batch)))
    plain: Iterator[tuple[Tensor, Tensor]] = repeat(batch)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * pairs + 4):
        is_watched = number % 2
        began = time.perf_counter()
        if is_watched:
            watch.step(loss=step(next(watched)))
        else:
            step(next(plain))
        if number >= 4:
            seconds[is_watched].append(time.perf_counter() - began)
    return [median(each) for each in seconds]


def call_seconds(watch: Watch, batch: object) -> tuple[float, float]:
    """Seconds of this thread's processor, which other programs do not lengthen: what the hook's
    calls of one step take, and what an interval's line does."""
    batches = iter(watch.batches(repeat(batch)))
    loss = torch.zeros(())
    began = time.thread_time()
    for _ in range(CALLS):
        next(batches)
        watch.step(loss=loss)
    each = (time.thread_time() - began) / CALLS
    began = time.thread_time()
    for _ in range(100):
        watch._close_interval(time.perf_counter(), loss)
    return each, (time.thread_time() - began) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps of Swin")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # other programs' threads would decide the rest
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    swin = build_real(planner.SwinConfig(**SMALL), planner.TrainSetting(precision="fp32"))
    cases = [
        ("linear layer, batch 32", linear, (32, 3, 32, 32), 10, 50 * options.steps),
        ("small Swin, batch 2", swin, (2, 3, 112, 112), 1000, options.steps),
    ]
    rows = []
    for title, model, shape, classes, pairs in cases:
        batch = torch.randn(shape), torch.randint(classes, shape[:1])
        with tempfile.TemporaryDirectory() as folder, planner.watch(folder=folder) as watch:
            plain, watched = interleaved(make_step(model), batch, watch, pairs)
            calls, line = call_seconds(watch, batch)
        share = (calls + line * plain / INTERVAL_SECONDS) / plain
        rows.append([
            title, f"{plain * 1e3:.3g} ms", f"{watched / plain:.4f}", f"{calls * 1e6:.2f} µs",
            f"{line * 1e6:.0f} µs", f"{share:.4%}",
        ])  # fmt: skip
    headers = [
        "step",
        "not watched",
        "watched / not",
        "calls of a step",
        "a line",
        "share of a step",
    ]
    print(tabulate(rows, headers=headers, tablefmt="simple"))


if __name__ == "__main__":
    main()
