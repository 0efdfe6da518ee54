"""From the probes to the setting to use: measured, in the budget, and the plainest that wins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from planner.report.settings import describe_changes
from planner.schema import DeviceInfo, MeasurementRecord, Model, TrainSetting
from planner.schema.result import Excluded, Recommendation
from planner.units import format_bytes, format_seconds
from search.interrupts import ENDINGS
from search.probe.evidence import calm, is_feasible, price_of_compiling, rate_interval
from search.space import candidate, setting_id, simplicity

MAX_RUNNERS_UP = 5


@dataclass(frozen=True)
class Contender:
    """A setting with all its measured probes. Rates in images/s per device, times in seconds: of
    the probes that nothing disturbed, where there are such."""

    setting: TrainSetting
    records: tuple[MeasurementRecord, ...]

    @property
    def images(self) -> int:
        return self.setting.batch_size * self.setting.accumulate

    @property
    def samples(self) -> list[float]:
        return [s for record in self.judged for s in record.step_seconds]

    @property
    def judged(self) -> list[MeasurementRecord]:
        return calm(self.records)

    @property
    def step_seconds(self) -> float:
        return median(self.samples)

    @property
    def rate(self) -> float:
        return self.images / self.step_seconds

    @property
    def interval(self) -> tuple[float, float]:
        return rate_interval(self.images, self.samples)

    @property
    def compile_seconds(self) -> float:
        return price_of_compiling(self.records)

    @property
    def num_bytes(self) -> int | None:
        known = [n for r in self.records if (n := r.used_bytes) is not None]
        return max(known, default=None)

    @property
    def evidence(self) -> MeasurementRecord:
        """The one record that stands for it: of several, all their samples together."""
        records = self.judged
        if len(records) == 1:
            return records[0]
        flags = tuple(dict.fromkeys(f for r in records for f in r.flags))
        return records[0].model_copy(
            update={
                "step_seconds": tuple(self.samples),
                "images_per_second": self.rate,
                "compile_seconds": self.compile_seconds if records[0].compile_seconds else None,
                "flags": (*flags, f"{len(records)} probes together"),
            }
        )

    def total_seconds(self, images: float) -> float:
        """Seconds to train on so many images of this device, compilation included."""
        return self.compile_seconds + images / self.rate


def contenders(records: Iterable[MeasurementRecord], budget_bytes: int | None) -> list[Contender]:
    """The settings that ran within the budget, fastest first; one that failed once is none."""
    grouped: dict[str, list[MeasurementRecord]] = {}
    for record in records:
        if not record.inconclusive:
            grouped.setdefault(setting_id(record.setting), []).append(record)
    found = [
        Contender(good[0].setting, tuple(good))
        for group in grouped.values()
        if (good := [r for r in group if is_feasible(r, budget_bytes)]) and len(good) == len(group)
    ]
    return sorted(found, key=lambda c: -c.rate)


# Noise lets a plainer setting win, but only where its median is slower by no more than this: with
# few or disturbed samples an interval can be so wide that everything would be level.
SIMPLER_COSTS = 0.01


def choose(found: Sequence[Contender], images: float | None = None) -> Contender:
    """The fastest, or where others cannot be told from it the plainest of them.

    With `images` (of one device, a whole training's) it is the least total time that wins,
    compilation included; compile time does not average out, so noise is that of the rates alone.
    """
    if images is None:
        best = max(found, key=lambda c: c.rate)
        floor = best.rate * (1 - SIMPLER_COSTS)
        level = [c for c in found if c.interval[1] >= best.interval[0] and c.rate >= floor]
    else:
        best = min(found, key=lambda c: c.total_seconds(images))
        latest = best.compile_seconds + images / best.interval[0]
        level = [
            c
            for c in found
            if c.compile_seconds + images / c.interval[1] <= latest
            and c.total_seconds(images) <= best.total_seconds(images) / (1 - SIMPLER_COSTS)
        ]
    return min(level, key=lambda c: simplicity(c.setting))


def pareto_front(found: Iterable[Contender]) -> list[Contender]:
    """The front of throughput against memory: nothing else is both faster and smaller.
    Least memory first."""
    kept: list[Contender] = []
    for c in sorted(found, key=lambda c: (c.num_bytes or 0, -c.rate)):
        if not kept or c.rate > kept[-1].rate:
            kept.append(c)
    return kept


def find_plain_default(found: Iterable[Contender], arm: str) -> Contender | None:
    """The plain default (the settings of `arm`) at the largest batch that was measured to fit."""
    plain = [c for c in found if candidate(c.setting).arm == arm]
    return max(plain, key=lambda c: c.setting.batch_size, default=None)


def break_even_steps(compiled: Contender, eager: Contender) -> int | None:
    """Optimizer steps after which compilation has paid for itself; None if it never does."""
    per_image = eager.step_seconds / eager.images - compiled.step_seconds / compiled.images
    if per_image <= 0:
        return None
    return max(1, round(compiled.compile_seconds / (per_image * compiled.images)))


@dataclass(frozen=True)
class Search:
    """What a search did, for its recommendation. `images` is a whole training's, on one device,
    where a length was asked for; `asked` the setting the person would have used, `plain_arm` the
    arm of the plain default. `trials_used` are the probes of the study where --trials allowed no
    more of them."""

    model: Model
    device: DeviceInfo
    versions: dict[str, str]
    budget_bytes: int | None
    asked: TrainSetting
    plain_arm: str = ""
    images: float | None = None
    num_candidates: int = 0
    stopped_because: str = ""
    trials_used: int | None = None
    ruled_out: tuple[Excluded, ...] = ()
    notes: tuple[str, ...] = ()


def recommend(records: Sequence[MeasurementRecord], search: Search) -> Recommendation:
    """The recommendation that the records prove; `nothing_fits` with advice where none does."""
    found = contenders(records, search.budget_bytes)
    common = {
        "model": search.model,
        "device": search.device,
        "versions": search.versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_probes": len(records),
        "num_candidates": search.num_candidates,
        "stopped_because": search.stopped_because,
        "ruled_out": search.ruled_out,
    }
    if not found:
        return Recommendation(
            status="nothing_fits", setting=None, evidence=None, notes=search.notes,
            advice=_advice(records, search), **common,
        )  # fmt: skip
    best = choose(found, search.images)
    others = [c for c in found if c is not best]
    if search.images is not None:
        images = search.images
        others.sort(key=lambda c: c.total_seconds(images))
    baseline = find_plain_default(found, search.plain_arm)
    return Recommendation(
        status="recommended",
        setting=best.setting,
        evidence=best.evidence,
        runners_up=tuple(c.evidence for c in others[:MAX_RUNNERS_UP]),
        baseline=baseline.evidence if baseline else None,
        gain=best.rate / baseline.rate if baseline else None,
        notes=(*search.notes, *_notes(best, found, search)),
        **common,
    )


def _notes(best: Contender, found: Sequence[Contender], search: Search) -> list[str]:
    candidates = (
        _simpler_note(best, found, search),
        _compile_note(best, found),
        _length_note(best, search),
        _pareto_note(found),
        _learning_rate_note(best.setting, search.asked),
        _flags_note(best),
    )
    return [note for note in candidates if note]


def _simpler_note(best: Contender, found: Sequence[Contender], search: Search) -> str:
    fastest = found[0]
    if fastest is best or search.images is not None:
        return ""
    other = describe_changes(fastest.setting, best.setting)
    return (
        f"{other} measured {fastest.rate / best.rate - 1:.1%} faster, "
        "which is within the noise: the simpler setting is recommended."
    )


def _compile_note(best: Contender, found: Sequence[Contender]) -> str:
    eager = next((c for c in found if c.setting.compile == "off"), None)
    if best.setting.compile == "off" or eager is None:
        return ""
    steps = break_even_steps(best, eager)
    spent = format_seconds(best.compile_seconds)
    if steps is None:
        return f"Compiling takes {spent} and is not faster than the best eager setting."
    return (
        f"Compiling takes {spent} and pays after {steps} optimizer steps, against the fastest "
        "eager setting."
    )


def _pareto_note(found: Sequence[Contender]) -> str:
    """What less memory costs: the front of throughput against memory."""
    kept = [c for c in pareto_front(found) if c.num_bytes is not None]
    if len(kept) < 2:
        return ""
    points = [f"{c.rate:.4g} images/s in {format_bytes(c.num_bytes or 0)}" for c in kept]
    return f"Throughput against memory: {', '.join(points)}."


def _length_note(best: Contender, search: Search) -> str:
    if search.images is None:
        return ""
    total = format_seconds(best.total_seconds(search.images))
    return (
        f"Ranked by total time for {search.images:.0f} images of this device: {total}, "
        f"{format_seconds(best.compile_seconds)} of it compiling."
    )


def _learning_rate_note(setting: TrainSetting, asked: TrainSetting) -> str:
    """The usual rules, said and not applied: schedules are the person's."""
    new, old = setting.global_batch, asked.global_batch
    if new == old:
        return ""
    ratio = new / old
    return (
        f"The global batch is {new}, not {old}: a learning rate tuned for {old} is usually scaled "
        f"by {ratio:.3g} (linear rule; the Swin recipe) or {ratio**0.5:.3g} (square root, often "
        f"for AdamW), with warm-up; or keep {old} with --global-batch {old}."
    )


def _flags_note(best: Contender) -> str:
    flags = sorted({f for r in best.judged for f in r.flags})
    return f"Noted while it was measured: {'; '.join(flags)}." if flags else ""


def _advice(records: Sequence[MeasurementRecord], search: Search) -> str:
    """What would make it fit, from how the probes (or the estimate) failed."""
    if records and all(r.cut_short for r in records):
        phase = records[-1].phase
        last = f" (the last was at: {phase})" if phase else ""
        return (
            f"The budget ended before any probe did{last}: allow more time with --budget, or see "
            "whether the model hangs there."
        )
    if records and all(r.inconclusive for r in records):
        return (
            "Other processes held or took the memory that every probe was to have: free the "
            "device, and run the same command to go on."
        )
    records = [r for r in records if not r.inconclusive]
    ends: dict[str, int] = {}
    for record in records:
        ends[record.status] = ends.get(record.status, 0) + 1
    if not records and search.trials_used is not None:
        return (
            f"No probe of these settings was made: --trials counts those of the whole study, which "
            f"has {search.trials_used}. Allow more with --trials."
        )
    if not records and search.stopped_because in ENDINGS.values():
        return "No probe was made before that: run the same command again."
    if not records and not search.ruled_out:
        return "No probe was made: allow more time with --budget."
    memory_bound = all(r.status in ("out_of_memory", "measured") for r in records)
    if memory_bound:
        needs = [n for r in records if (n := r.used_bytes) and r.status == "measured"]
        needs += [r.predicted_bytes for r in search.ruled_out if r.predicted_bytes]
        least = (
            f"; the least that any setting needs is about {format_bytes(min(needs))}"
            if needs
            else ""
        )
        budget = format_bytes(search.budget_bytes) if search.budget_bytes else "the device's memory"
        return (
            f"Nothing fits in {budget}{least}. Allow batch 1, checkpointing blocks and bf16 if "
            "they were excluded; lower --headroom; free the device of other processes; or choose "
            "a smaller model or --image-size."
        )
    listed = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in ends.items())
    last = next((r.message for r in reversed(records) if r.message), "")
    return f"No probe ended well ({listed}). The last said: {last or 'nothing'}"
