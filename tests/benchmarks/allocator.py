"""How long a replay of the caching allocator takes.

    python -m tests.benchmarks.allocator

Replays two training steps of timm's Swin-L at batch 64 (bf16, AdamW foreach, eager attention) as
recorded on shapes, and prints the best of 20 in process time, with options that look at more than
the best fit beside it.

2026-11-22, x86-64 with 2 cores under a load of 11, Python 3.11.7:

options                       events  best of 20    per event
default                       12,182     15.8 ms      1.29 µs
expandable_segments:True      12,182     26.6 ms      2.19 µs
max_split_size_mb:128         12,182     24.1 ms      1.98 µs
roundup_power2_divisions:4    12,182     17.0 ms      1.40 µs

Tried before: addresses under each size instead of one sorted list of numbers took as long; one
150-line loop per pool without calls took half, its preparation (requests split by pool) the rest;
leaving empty sizes in the list took twice as long, since three of four requests split a larger
block and every search had to step over them.
"""

from __future__ import annotations

import platform
import time
from datetime import date

from planner.libraries.timm.shapes import SwinTransformer
from planner.memory.allocator_config import parse_allocator_config
from planner.memory.profile import walk_ledger
from planner.memory.replay import replay
from planner.schema import SwinConfig, TrainSetting
from planner.step.training import record_training

MODEL = SwinConfig(
    library="timm", embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48)
)  # fmt: skip
SETTING = TrainSetting(batch_size=64, attention="eager")
OPTIONS = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4")
NUM_RUNS = 20


def main() -> None:
    ledger = record_training(lambda d: SwinTransformer(d, MODEL, SETTING), MODEL, SETTING)
    requests = walk_ledger(ledger).requests
    print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}")
    print(f"{'options':<28} {'events':>7}  best of {NUM_RUNS}    per event")
    for options in OPTIONS:
        seconds = min(measure(requests, options) for _ in range(NUM_RUNS))
        print(
            f"{options or 'default':<28} {len(requests):>7,}  {seconds * 1e3:>7.1f} ms  "
            f"{seconds / len(requests) * 1e6:>8.2f} µs"
        )


def measure(requests: list[int], options: str) -> float:
    """Process seconds of one replay."""
    config = parse_allocator_config(options)
    start = time.process_time()
    replay(requests, config)
    return time.process_time() - start


if __name__ == "__main__":
    main()
