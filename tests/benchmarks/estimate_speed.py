"""How long an estimate of Swin-L takes in process, once its step is recorded.

    python -m tests.benchmarks.estimate_speed          measure (two minutes)
    python -m tests.benchmarks.estimate_speed --show   the newest results
    python -m tests.benchmarks.estimate_speed --against FOLDER

The last runs whole commands from an empty cache, in turn here and in another checkout: how long
each takes there for a second here, and how many steps it traces. Writes nothing.

Processor seconds, so that other work on the machine counts little; each estimate is of another
batch, so that nothing is answered from a memory of the same question. Beside it: a thousand
settings ranked from nothing, and the same step of the real module under FakeTensorMode.

Where the time goes (native, batch 32): two thirds is the replay of 14,000 requests through the
allocator, about a microsecond each; a sixth the walk over 18,800 events; a tenth their making. One
150-line loop per pool, over requests prepared once for all batches, took 10 ms in place of 25, and
a third of the memory code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tabulate import tabulate

from planner.core.schema import SwinConfig, TrainSetting
from planner.estimation.estimate import choose, estimate
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware import find_gpu
from tests.benchmarks.dated import latest_results, write_results

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "native Swin-L, bf16, SDPA": ("native:swin_large", {}),
    "timm Swin-L, bf16, eager attention": ("timm:swin_large_patch4_window7_224", {}),
    "timm Swin-L, bf16, blocks checkpointed": (
        "timm:swin_large_patch4_window7_224", {"checkpointing": "blocks"},
    ),
}  # fmt: skip
COMMANDS = (
    "estimate timm:vit_base_patch16_224 --gpu a100-sxm-80gb --batch-size 128 --precision bf16",
    "estimate timm:resnet50 --gpu a100-sxm-80gb --batch-size 64",
    "estimate native:swin_tiny --gpu rtx-3090 --batch-size 64",
    "advise native:swin_base --gpu rtx-3060-12gb --batch-size 256",
    "advise timm:vit_base_patch16_224 --gpu a100-sxm-80gb --batch-size 128",
)
TURNS = 3
BATCHES = range(8, 248, 8)
GPU = "h100-sxm-80gb"
# 1000 settings of one model: 10 arms of 100 batches.
RANKED: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16", "pure-bf16"),
    "checkpointing": ("none", "blocks"),
    "batch_size": tuple(range(4, 404, 4)),
}
PACKAGES = ("torch", "timm")


def measure() -> dict[str, Any]:
    cases = {}
    for name, (model, of_setting) in CASES.items():
        config, setting = choose(model, TrainSetting(**of_setting), None, {})
        cases[name] = {
            "model": config.model_dump(mode="json"),
            "setting": setting.model_dump(mode="json"),
            "batch_sizes": list(BATCHES),
            **_time_estimates(config, setting),
        }
        print(name, cases[name], flush=True)
    ranking = _time_ranking()
    print(ranking, flush=True)
    # Last, since it imports torch.
    traced = {name: _time_trace(model, of_setting) for name, (model, of_setting) in CASES.items()}
    return {"gpu": GPU, "cases": cases, "ranking": ranking, "trace_cpu_seconds": traced}


def _time_estimates(config: SwinConfig, setting: TrainSetting) -> dict[str, Any]:
    """Milliseconds: recording (once for all batches), then the median and the least estimate."""
    gpu = find_gpu(GPU)
    at = [setting.model_copy(update={"batch_size": b}) for b in BATCHES]

    def record() -> None:
        step_ledger(config, at[0])
        estimate(config, at[1])

    recording = _milliseconds(record)
    alone = [_milliseconds(lambda s=s: estimate(config, s)) for s in at]
    timed = [_milliseconds(lambda s=s: estimate(config, s, gpu=gpu)) for s in at]
    events = step_ledger(config, setting).events
    return {
        "num_events": len(events),
        "recording_ms": round(recording, 1),
        "estimate_ms": {"median": round(median(alone), 2), "least": round(min(alone), 2)},
        "with_seconds_on_a_gpu_ms": {
            "median": round(median(timed), 2), "least": round(min(timed), 2),
        },
    }  # fmt: skip


def _time_ranking() -> dict[str, Any]:
    """1000 settings of native Swin-L by predicted images/s, recordings included."""
    found = []

    def rank() -> None:
        gpu = find_gpu(GPU)
        for values in itertools.product(*RANKED.values()):
            setting = TrainSetting(**dict(zip(RANKED, values, strict=True)))
            found.append(estimate("native:swin_large", setting, gpu=gpu))
        found.sort(key=lambda e: (not e.fits, -e.throughput.images_per_second))  # type: ignore[union-attr]

    seconds = _milliseconds(rank) / 1e3
    best = found[0].setting
    return {
        "num_settings": len(found),
        "cpu_seconds": round(seconds, 2),
        "settings": {k: list(v) for k, v in RANKED.items()},
        "best": best.model_dump(mode="json", include=set(RANKED)),
    }


def _time_trace(model: str, of_setting: dict[str, Any]) -> float:
    """CPU seconds of the same step of the real module on fake tensors, imports left out."""
    from planner.libraries.building import build_for
    from planner.trace.ledger import trace_estimate

    config, setting = choose(model, TrainSetting(**of_setting), None, {})
    build_for(config, setting)()  # the library's import
    seconds = _milliseconds(lambda: trace_estimate(config, setting)) / 1e3
    print(model, f"traced in {seconds:.1f} s", flush=True)
    return round(seconds, 1)


def compare(other: Path) -> None:
    """Processor seconds of COMMANDS and of the processes that they start: the least of TURNS."""
    for command in COMMANDS:
        here, there = [], []
        for _ in range(TURNS):
            there.append(_run(command, other))
            here.append(_run(command, Path(__file__).parents[2]))
        (seconds, num_steps), (before, num_before) = min(here), min(there)
        print(
            f"{before / seconds:.2f} times as long there, {before:.1f} for {seconds:.1f} s; "
            f"{num_before} steps traced there, {num_steps} here: planner {command}",
            flush=True,
        )


def _run(command: str, checkout: Path) -> tuple[float, int]:
    """Processor seconds, and how many steps were traced."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    with TemporaryDirectory() as cache:
        known = {**os.environ, "PYTHONPATH": str(checkout), "PLANNER_CACHE_DIR": cache}
        subprocess.run(
            [sys.executable, "-m", "planner", *command.split()],
            cwd=checkout, env=known, capture_output=True, check=False,
        )  # fmt: skip
        kept = [p.read_bytes().split(b"\n", 2)[1] for p in Path(cache).rglob("*.ledger")]
    steps = [json.loads(key) for key in kept]
    after = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    return after - before, sum("setting" in key for key in steps)


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def table(found: dict[str, Any]) -> str:
    rows = [
        (
            name,
            case["recording_ms"],
            case["estimate_ms"]["median"],
            case["with_seconds_on_a_gpu_ms"]["median"],
            found["trace_cpu_seconds"][name] * 1e3,
        )
        for name, case in found["cases"].items()
    ]
    headers = (
        "CPU ms", "recording, once", "an estimate", "with images/s", "FakeTensorMode",
    )  # fmt: skip
    device, ranking = found["device"], found["ranking"]
    return "\n".join([
        tabulate(rows, headers=headers, tablefmt="github", floatfmt=".1f"),
        "",
        f"{ranking['num_settings']} settings of native Swin-L ranked by images/s, recordings "
        f"included: {ranking['cpu_seconds']} CPU seconds.",
        f"{found['date']}; {device['processor']}, {device['cores']} cores, load average "
        f"{device['load_average']}; "
        + ", ".join(f"{k} {v}" for k, v in device["versions"].items() if v)
        + ".",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="print the newest results")
    parser.add_argument("--against", type=Path, help="compare whole commands with a checkout")
    options = parser.parse_args()
    if options.against:
        compare(options.against.resolve())
        return
    if not options.show:
        print(write_results("estimate_speed", PACKAGES, measure()))
    print(table(latest_results("estimate_speed")))


if __name__ == "__main__":
    main()
