"""Records an exhaustive table of probes on the CPU, for strategies to be compared over.

    python -m tests.benchmarks.record_grid DIRECTORY TABLE [--repeats 2] [--compile off,default]

Every combination of batch × checkpointing × precision × compile of a small Swin, in a shuffled
order; then the fastest of them again, several times, each in another order. It can be stopped at
any time and goes on from DIRECTORY; TABLE is written when all are done. Run it on an idle machine:
what strategies are compared by is a table's truth. Compilers find no cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from planner.core.schema import MeasurementRecord, SwinConfig, TrainSetting
from search.loop.limits import Limits
from search.loop.prober import DeviceProber
from search.loop.progress import Progress
from search.loop.session import Session
from search.loop.space import Candidate, Space, make_space
from search.loop.strategies.strategy import Choice, Situation
from search.loop.study.identity import Identity
from search.loop.study.optuna_study import make_study
from search.loop.study.records import append_records, read_records
from search.probe.device import describe_device, versions

MODEL = SwinConfig(
    name="grid", image_size=(56, 56), embed_dim=32, depths=(1, 1), num_heads=(2, 4),
    window_size=7, num_classes=100, drop_path_rate=0.0,
)  # fmt: skip
BATCHES = (4, 8, 16, 32, 64, 128)
AXES = {
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "blocks", "stages"),
    "attention": ("eager",),
    "optimizer": ("adamw",),
}
MEASURE_SECONDS = 3.0
NUM_BEST = 16  # are recorded again
DEADLINE_SECONDS = 600.0


class ShuffledRounds:
    """Every candidate once, then the fastest so many times more, each time in another order.

    Resumable, since it counts.
    """

    def __init__(self, space: Space, repeats: int) -> None:
        self.space, self.repeats = space, repeats
        self.rates: dict[str, list[float]] = {}
        self.stopped_because = ""

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.rates.setdefault(candidate.id, []).append(record.images_per_second or 0.0)

    def ask(self, situation: Situation) -> Choice | None:
        for candidates, count in self._rounds():
            for c in candidates:
                if len(self.rates.get(c.id, ())) < count:
                    return Choice(c)
        self.stopped_because = "all rounds are done"
        return None

    def _rounds(self) -> Iterator[tuple[list[Candidate], int]]:
        """What to record, and how often it then has been."""
        yield _shuffled(self.space.candidates, 0), 1
        best = sorted(self.space.candidates, key=lambda c: -self.rates[c.id][0])[:NUM_BEST]
        for n in range(self.repeats):
            yield _shuffled(best, n + 1), n + 2


def _shuffled(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    found = list(candidates)
    Random(seed).shuffle(found)
    return found


def record_grid(directory: Path, table: Path, repeats: int, compile_modes: tuple[str, ...]) -> None:
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    device = describe_device("cpu")
    axes = {**AXES, "compile": compile_modes}
    space = make_space(MODEL, device, TrainSetting(), restrict=axes, batch_sizes=BATCHES)
    directory.mkdir(parents=True, exist_ok=True)
    study = make_study(None, directory, space, None)
    study.adopt(Identity(MODEL, device, versions()))
    study.reconcile()
    prober = DeviceProber(MODEL, "cpu", device, None, measure_seconds=MEASURE_SECONDS)
    session = Session(space, study, prober, Limits(), lambda choice: DEADLINE_SECONDS, None, say)
    session.run(ShuffledRounds(space, repeats))
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
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compile", default="off,default")
    args = parser.parse_args()
    record_grid(args.directory, args.table, args.repeats, tuple(args.compile.split(",")))


if __name__ == "__main__":
    main()
