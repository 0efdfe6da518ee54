"""Records an exhaustive table of probes on the CPU, for strategies to be compared over.

    python -m tests.benchmarks.record_grid DIRECTORY tests/truth/cpu_grid_DATE.jsonl

Every combination of batch × checkpointing × precision × compile of a small Swin, probed one after
the other. It can be stopped at any time and goes on from DIRECTORY; the table is written when
all are done. Load of the machine is in the numbers: records say how well they are known.
"""

from __future__ import annotations

import sys
from pathlib import Path

from planner.schema import SwinConfig, TrainSetting
from search.baselines import WalkStrategy, exhaustive
from search.probe.device import describe_device, versions
from search.prober import DeviceProber
from search.records import read_records
from search.session import Limits, Progress, Session
from search.space import make_space
from search.study import Identity, make_study

MODEL = SwinConfig(
    name="grid", image_size=(56, 56), embed_dim=32, depths=(1, 1), num_heads=(2, 4),
    window_size=7, num_classes=100, drop_path_rate=0.0,
)  # fmt: skip
BATCHES = (4, 8, 16, 32, 64)
AXES = {
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "blocks"),
    "compile": ("off", "default"),
    "attention": ("eager",),
    "optimizer": ("adamw",),
}
MEASURE_SECONDS = 2.0


def main(directory: Path, table: Path) -> None:
    device = describe_device("cpu")
    space = make_space(MODEL, device, TrainSetting(), restrict=AXES, batch_sizes=BATCHES)
    directory.mkdir(parents=True, exist_ok=True)
    study = make_study(None, directory, space, None)
    study.adopt(Identity(MODEL, device, versions()))
    study.reconcile()
    prober = DeviceProber(MODEL, "cpu", device, None, measure_seconds=MEASURE_SECONDS)
    session = Session(space, study, prober, Limits(), lambda choice: 600.0, None, say)
    session.run(WalkStrategy(exhaustive(space)))
    lines = [
        r.model_dump_json(exclude_none=True)
        for r in read_records(directory / "probes.jsonl").records
    ]
    table.write_text("\n".join(lines) + "\n")


def say(progress: Progress) -> None:
    if progress.record and progress.candidate:
        record = progress.record
        print(progress.probe, progress.candidate.setting.differences(TrainSetting()), record.status,
              record.images_per_second, record.probe_seconds, record.flags, flush=True)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
