"""How long a replay of the caching allocator takes.

    python -m tests.benchmarks.allocator

Replays two training steps of timm's Swin-L at batch 64 (bf16, AdamW foreach, eager attention) as
recorded on shapes, and prints the best of 20 in process time, with the options that take the longer
way beside it.

2026-11-20, x86-64 with 2 cores shared with other work, Python 3.11.7:

options                       events  best of 20    per event
default                       11,812      8.1 ms      0.68 µs
expandable_segments:True      11,812     20.0 ms      1.69 µs
max_split_size_mb:128         11,812     16.4 ms      1.39 µs
roundup_power2_divisions:4    11,812     19.2 ms      1.63 µs

Tried before: one sorted list of (size, address) integers instead of addresses under each size took
10.4 ms, with the calls written out 8.9; leaving empty sizes in the list took 22, since three of
four requests split a larger block and every search had to step over them.
"""

from __future__ import annotations

import platform
import time
from datetime import date

from planner.libraries.timm.shapes import SwinTransformer
from planner.memory.replay import ledger_requests, parse_allocator_config, replay
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
    requests, _ = ledger_requests(ledger)
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
