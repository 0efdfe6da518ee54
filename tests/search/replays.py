"""A recorded table in place of a device: a search runs over it, charged its seconds."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from planner.core.files import TUNE_PROBES, TUNE_RESULT
from planner.core.schema import MeasurementRecord
from planner.core.schema.record import BUDGET_ENDED
from search.loop.options import read_options
from search.loop.prober import OnProgress
from search.loop.records import make_folder, write_result
from search.loop.search import Limits, Search, find_plain_arm
from search.loop.space import Candidate, Pick, setting_id, space_of
from search.loop.study import ProbeStudy, StudyIdentity
from search.loop.surrogate.prior import Prior, generic_prior
from search.probe.evidence import is_feasible
from search.tuning.tune import less_headroom


class Replay:
    """Recorded probes of one model on one device, asked for by candidate.

    A setting that was recorded several times gives its records in turn.
    """

    def __init__(self, records: Iterable[MeasurementRecord]) -> None:
        self.records: dict[str, list[MeasurementRecord]] = {}
        self.asked: dict[str, int] = {}
        for record in records:
            self.records.setdefault(setting_id(record.setting), []).append(record)
        first = next(iter(self.records.values()))[0]
        self.model, self.device, self.versions = first.model, first.device, first.versions
        self.space = space_of(rs[0].setting for rs in self.records.values())

    def probe(self, candidate: Candidate) -> MeasurementRecord:
        """The next record of a candidate, as one more probe; the first again after the last."""
        records = self.records[candidate.id]
        turn = self.asked.get(candidate.id, 0)
        self.asked[candidate.id] = turn + 1
        return records[turn % len(records)].model_copy()

    def rates(self, budget_bytes: int | None) -> dict[str, float]:
        """Images/s of every candidate that ran within the budget, over all its records."""
        found = {}
        for c in self.space.candidates:
            good = [r for r in self.records[c.id] if is_feasible(r, budget_bytes)]
            if samples := [s for r in good for s in r.step_seconds]:
                found[c.id] = c.setting.images_per_device_step / median(samples)
        return found


class ReplayProber:
    """A prober over a recorded table that charges recorded seconds to the limits."""

    def __init__(self, replay: Any, limits: Limits) -> None:
        self.replay, self.limits = replay, limits

    def __call__(self, pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        record = self.replay.probe(pick.candidate)
        end = self.limits.seconds_left()
        if end is not None and record.probe_seconds > end:  # a device's would have been cut short
            ended = {"status": "timed_out", "step_seconds": (), "images_per_second": None,
                     "compile_seconds": None, "probe_seconds": end,
                     "flags": (BUDGET_ENDED,)}  # fmt: skip
            record = record.model_copy(update=ended)
        self.limits.spent_seconds += record.probe_seconds
        return record


def search_table(
    replay: Any,
    prior: Prior,
    budget_bytes: int | None,
    prober: Any = None,
    on_progress: OnProgress = lambda progress: None,
    **options: Any,
) -> tuple[Search, str]:
    """A whole search over a table, and why it ended. Nothing but recorded seconds is charged."""
    study = ProbeStudy(replay.space, budget_bytes=budget_bytes)
    search = _search(replay, study, prior, prober or replay, on_progress, **options)
    return search, search.run()[0]


def _search(
    replay: Replay, study: ProbeStudy, prior: Prior, table: Any,
    on_progress: OnProgress = lambda progress: None, **options: Any,
) -> Search:  # fmt: skip
    asked = read_options({"budget_seconds": None, **options})
    limits = Limits(asked.trials, asked.budget_seconds, clock=lambda: 0.0)
    arm = find_plain_arm(replay.space, replay.model)
    return Search(study, prior, ReplayProber(table, limits), limits, asked, arm, on_progress)


def leave_run(folder: Path, records: Iterable[MeasurementRecord], **options: Any) -> Path:
    """What a search over a table leaves: its probes and its recommendation."""
    replay = Replay(records)
    budget = less_headroom(replay.device.total_bytes, read_options(options).headroom)
    study = ProbeStudy(replay.space, make_folder(folder) / TUNE_PROBES, budget)
    prior = generic_prior(replay.space, replay.device)
    search = _search(replay, study, prior, replay, output=folder, **options)
    identity = StudyIdentity(model=replay.model, device=replay.device, versions=replay.versions)
    write_result(folder / TUNE_RESULT, search.recommend(identity, search.run()[0], []))
    return folder
