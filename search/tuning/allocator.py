"""The caching allocator's options where nobody names any: expandable segments, and what the
recommended setting is without them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from planner.advice.levers import EXPANDABLE
from planner.core.schema import MeasurementRecord
from planner.core.schema.record import Recommendation
from planner.memory.allocator_config import VARIABLES, allocator_in_environment
from search.loop.interrupts import ending, hold, let_go
from search.loop.limits import START_SECONDS, TIMING_SECONDS, Limits
from search.loop.prober import Prober
from search.loop.progress_text import memory_text, rate_text
from search.loop.space import candidate
from search.loop.strategies.strategy import Choice
from search.loop.study.records import RecordsNotWrittenError, append_records, read_records
from search.probe.device import torch_build, versions, why_no_segments
from search.probe.evidence import is_feasible, rate_interval

ALLOCATOR_PROBES = "allocator.jsonl"  # in the folder of a tune
TORCHS_OWN = "expandable_segments:False"
NOT_COMPARED = "The recommended setting was not probed without expandable segments"


def usual_options(device: str) -> tuple[str | None, list[str]]:
    """What probes on `device` run with where no option of `tune` and no variable of this
    environment says otherwise, as advice counts; None for torch's own. And what is to be said."""
    is_cuda = device != "cpu" and (torch_build() or "rocm")[0].isdigit()
    if not is_cuda or any(name in os.environ for name in VARIABLES):
        return None, []
    if why := why_no_segments(device):
        return None, [f"Probes run without expandable segments, which fail on this device: {why}."]
    return EXPANDABLE, [
        "Probes run with expandable segments, as advice counts; --allocator "
        f"{TORCHS_OWN} is torch's own way."
    ]


def compare_allocators(
    found: Recommendation, start: Callable[[], Prober], limits: Limits, trials_used: int,
    budget_bytes: int | None, kept: Path,
) -> Recommendation:  # fmt: skip
    """`found`, whose probes ran with expandable segments, held against one probe of its setting
    without them, which `start` makes a prober for and which stays in the file `kept`. Where that is
    faster beyond noise and fits, it is the evidence. Ctrl-C leaves `found` as it is."""
    if found.setting is None or found.evidence is None:
        return found
    with allocator_in_environment(TORCHS_OWN):
        known = (found.setting, found.device, versions())
        records = [
            r for r in read_records(kept).records if (r.setting, r.device, r.versions) == known
        ]
        if not records:
            left = limits.seconds_left()
            if limits.trials is not None and trials_used >= limits.trials:
                return _noted(found, f"{NOT_COMPARED}: --trials allowed no more probes.")
            if left is not None and left < found.evidence.probe_seconds:
                return _noted(found, f"{NOT_COMPARED}: the budget has ended.")
            try:
                if not let_go():
                    return _noted(found, f"{NOT_COMPARED}: {ending()}.")
                choice = Choice(candidate(found.setting), "finalists")
                record = start()(choice, uuid.uuid4().hex, _deadline(found.evidence))
                hold()
            except KeyboardInterrupt:
                hold()
                return _noted(found, f"{NOT_COMPARED}: {ending()}.")
            records = [record.judged_in(budget_bytes)]
            try:
                append_records(kept, records)
            except RecordsNotWrittenError as error:
                found = _noted(found, str(error))
        assert found.evidence is not None, "it was there before"
    return _better(found, found.evidence, records[-1], budget_bytes)


def _deadline(evidence: MeasurementRecord) -> float:
    """Seconds after which a probe of the same setting is hung: a judgement."""
    return START_SECONDS + TIMING_SECONDS + 5 * evidence.probe_seconds


def _better(
    found: Recommendation, ours: MeasurementRecord, plain: MeasurementRecord,
    budget_bytes: int | None,
) -> Recommendation:  # fmt: skip
    """`plain` is without expandable segments."""
    with_them = f"With expandable segments the recommended setting {_said(ours)}; without"
    if not is_feasible(plain, budget_bytes):
        ended = "does not fit" if plain.status in ("measured", "out_of_memory") else "did not run"
        return _noted(found, f"{with_them} it {ended}: they are kept.")
    both = f"{with_them} it {_said(plain)}"
    if _interval(plain)[0] <= _interval(ours)[1]:
        return _noted(found, f"{both}: not faster beyond noise, and they are kept.")
    gain = found.gain and found.gain * _rate(plain) / _rate(ours)
    better = found.model_copy(update={"evidence": plain, "gain": gain})
    return _noted(better, f"{both}: faster, and so it is recommended without.")


def _said(record: MeasurementRecord) -> str:
    how = "is predicted at" if record.device.emulated else "runs at"
    return f"{how} {rate_text(record)} in {memory_text(record)}"


def _rate(record: MeasurementRecord) -> float:
    return record.images_per_second or 0.0


def _interval(record: MeasurementRecord) -> tuple[float, float]:
    images = record.setting.batch_size * record.setting.accumulate
    return rate_interval(images, record.step_seconds)


def _noted(found: Recommendation, note: str) -> Recommendation:
    return found.model_copy(update={"notes": (*found.notes, note)})
