"""Records an exhaustive table of probes on the CPU, for strategies to be compared over.

    python -m tests.benchmarks.record_grid DIRECTORY TABLE [--rounds 2] [--compile off,default]

Every combination of batch × checkpointing × precision × compile of a small Swin. It can be stopped
at any time and goes on from DIRECTORY; TABLE is written when all are done. In each round the order
is shuffled anew, so that the drift of a machine in use falls on all alike: run it on an idle one,
since what strategies are compared by is a table's truth.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from planner.schema import MeasurementRecord, SwinConfig, TrainSetting
from search.probe.device import describe_device, versions
from search.prober import DeviceProber
from search.records import append_records, read_records
from search.session import Limits, Progress, Session
from search.space import Candidate, Space, make_space
from search.strategy import Choice, Situation
from search.study import Identity, make_study

MODEL = SwinConfig(
    name="grid", image_size=(56, 56), embed_dim=32, depths=(1, 1), num_heads=(2, 4),
    window_size=7, num_classes=100, drop_path_rate=0.0,
)  # fmt: skip
BATCHES = (4, 8, 16, 32, 64)
AXES = {
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "blocks"),
    "attention": ("eager",),
    "optimizer": ("adamw",),
}
MEASURE_SECONDS = 2.0
DEADLINE_SECONDS = 600.0


class ShuffledRounds:
    """Every candidate once a round, in another order each time; resumable, since it counts."""

    def __init__(self, space: Space, rounds: int) -> None:
        self.order = [c for n in range(rounds) for c in _shuffled(space, n)]
        self.done: dict[str, int] = {}
        self.stopped_because = ""

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.done[candidate.id] = self.done.get(candidate.id, 0) + 1

    def ask(self, situation: Situation) -> Choice | None:
        left = dict(self.done)
        for c in self.order:
            if left.get(c.id, 0) == 0:
                return Choice(c)
            left[c.id] -= 1
        self.stopped_because = "all rounds are done"
        return None


def _shuffled(space: Space, seed: int) -> list[Candidate]:
    found = list(space.candidates)
    Random(seed).shuffle(found)
    return found


def record_grid(directory: Path, table: Path, rounds: int, compile_modes: tuple[str, ...]) -> None:
    device = describe_device("cpu")
    axes = {**AXES, "compile": compile_modes}
    space = make_space(MODEL, device, TrainSetting(), restrict=axes, batch_sizes=BATCHES)
    directory.mkdir(parents=True, exist_ok=True)
    study = make_study(None, directory, space, None)
    study.adopt(Identity(MODEL, device, versions()))
    study.reconcile()
    prober = DeviceProber(MODEL, "cpu", device, None, measure_seconds=MEASURE_SECONDS)
    session = Session(space, study, prober, Limits(), lambda choice: DEADLINE_SECONDS, None, say)
    session.run(ShuffledRounds(space, rounds))
    append_records(table, list(read_records(directory / "probes.jsonl").records))


def say(progress: Progress) -> None:
    if progress.record and progress.candidate:
        record, setting = progress.record, progress.candidate.setting
        print(progress.probe, setting.differences(TrainSetting()), record.status,
              record.images_per_second, record.probe_seconds, record.flags, flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Records a table of probes on the CPU.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", default="off,default")
    args = parser.parse_args()
    record_grid(args.directory, args.table, args.rounds, tuple(args.compile.split(",")))


if __name__ == "__main__":
    main()
