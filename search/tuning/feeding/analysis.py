"""Which of loader and step bounds a training, and what follows: pure, from records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.core.schema import MeasurementRecord
from planner.core.schema.loading import DataRecommendation, FedRecord, Feeding, LoaderRecord
from planner.core.units import format_bytes
from planner.report.settings import describe_changes
from planner.throughput.feeding import (
    Loading,
    Need,
    Stepping,
    bound_of,
    fed_rate,
    needed_workers,
    shared_rate,
    waiting_share,
)
from search.loop.contenders import Contender, pareto_front

# A share of time, or of a rate, under which two figures are alike: noise of short runs.
_ALIKE = 0.05
# What a fed run may differ from the law before that is worth a word.
_OFF = 0.15
# What another loader must promise over the recommended one: the law is not surer than this.
_NO_BETTER = 0.02
_MOST_WAYS = 2  # to load faster, that are said: data.json has them all


@dataclass(frozen=True)
class Machine:
    """What the two share: `processors` that this process may keep busy, and whether the step runs
    on them too."""

    processors: float
    steps_on_cpu: bool


def loader_rate(record: LoaderRecord) -> Loading:
    """What a probe of a loader says for the law. Raises AssertionError for one that failed."""
    assert record.images_per_second, "only a measured loader is judged"
    return Loading(
        record.images_per_second, record.setting.workers, record.cpu_seconds_per_image, record.bound
    )


def step_rate(step: MeasurementRecord, machine: Machine, fed: FedRecord | None = None) -> Stepping:
    """What a probe of a step says for the law: where `fed` was measured, as it ran in that very
    process. A step on the CPU keeps all processors busy, unless it was seen to use fewer."""
    rate = step.images_per_second or 0.0
    cpu_seconds = None
    if fed is not None and fed.resident_seconds:
        images = fed.setting.batch_size * fed.setting.accumulate * len(fed.resident_seconds)
        rate = images / sum(fed.resident_seconds)
        cpu_seconds = fed.step_cpu_seconds
    assert rate, "only a measured step is judged"
    if not machine.steps_on_cpu:
        return Stepping(rate)
    return Stepping(rate, machine.processors / rate if cpu_seconds is None else cpu_seconds)


def predicted_rate(step: MeasurementRecord, loader: LoaderRecord, machine: Machine) -> float:
    """What the law says of the two as they were measured apart, in images/s."""
    return fed_rate(loader_rate(loader), step_rate(step, machine), machine.processors)


def loader_for(
    step: MeasurementRecord, data: DataRecommendation, machine: Machine
) -> DataRecommendation:
    """`data` with the loader that feeds this step fastest by the law, of all that were measured:
    one without workers may be the fastest by itself, and the step then waits for all that it
    loads. Of those that are alike the one that `data` recommends."""
    assert data.evidence is not None, "only measured loaders are compared"
    measured = [r for r in (data.evidence, *data.runners_up) if r.images_per_second]
    rates = [predicted_rate(step, record, machine) for record in measured]
    best = measured[rates.index(max(rates))]
    if rates[0] >= max(rates) * (1 - _NO_BETTER):
        return data
    return data.model_copy(update={"setting": best.setting, "evidence": best})


@dataclass(frozen=True)
class Judgement:
    """The two together: `fed` images/s (measured where it was), the step's own rate, which bounds,
    the share of its time that the device waits, and what it would take to feed it."""

    fed: float
    step: Stepping
    loader: Loading
    bound: Literal["loader", "step"]
    waiting: float
    need: Need


def judge(
    step: MeasurementRecord, loader: LoaderRecord, fed: FedRecord | None, machine: Machine
) -> Judgement:
    """Which bounds, by the fed run where it was measured, else by the law.

    On the CPU the step is slowed by the workers beside it: there the loader bounds only where the
    training was seen to wait for it.
    """
    if fed is not None and fed.images_per_second is None:
        fed = None
    stepping, loading = step_rate(step, machine, fed), loader_rate(loader)
    rate = (fed and fed.images_per_second) or fed_rate(loading, stepping, machine.processors)
    bound, waiting = bound_of(rate, stepping, _ALIKE), waiting_share(rate, stepping)
    if machine.steps_on_cpu:
        if fed is not None:
            waiting = sum(fed.wait_seconds) / sum(fed.step_seconds)
        elif loading.workers:
            shared = shared_rate(loading, stepping, machine.processors)
            most = min(stepping.images_per_second, shared)  # with a loader that brings any number
            waiting = max(0.0, 1 - loading.images_per_second / most)
        bound = "loader" if waiting > _ALIKE else "step"
    need = needed_workers(loading, stepping, machine.processors)
    return Judgement(rate, stepping, loading, bound, waiting, need)


def make_feeding(
    step: MeasurementRecord, data: DataRecommendation, fed: FedRecord | None,
    found: Sequence[Contender], machine: Machine,
) -> Feeding:  # fmt: skip
    """What a recommendation says of its data; `found` are all settings that ran, fastest first."""
    loader = data.evidence
    assert loader is not None, "only a measured loader is judged"
    judged = judge(step, loader, fed, machine)
    notes = (
        *_bound_notes(judged, loader, machine),
        *(data.ways_out[:_MOST_WAYS] if judged.bound == "loader" else ()),
        *_shared_notes(judged, fed, machine),
        *_worth_notes(judged, step, found),
        *_law_notes(fed),
    )
    return Feeding(
        loader=loader.setting.model_copy(update={"batch_size": step.setting.batch_size}),
        evidence=loader,
        bound=judged.bound,
        waiting_share=round(judged.waiting, 4),
        needed_workers=judged.need.workers if judged.need.limit is None else None,
        together=fed,
        notes=notes,
    )


def _bound_notes(judged: Judgement, loader: LoaderRecord, machine: Machine) -> list[str]:
    """What bounds, how much it costs, and what would change it."""
    brings = f"{judged.loader.images_per_second:.4g}"
    steps = f"{judged.step.images_per_second:.4g}"
    if judged.bound == "step":
        said = f"The step is the limit: it takes {steps} images/s, the loader brings {brings}"
        spare = loader.setting.workers - judged.need.workers
        if judged.need.limit is None and spare > 0 and not machine.steps_on_cpu:
            said += f"; {_workers(judged.need.workers)} would be enough"
        return [f"{said}."]
    who = "training" if machine.steps_on_cpu else "device"
    said = (
        f"The loader is the limit: the {who} waits {judged.waiting:.0%} of the time, as the loader "
        f"by itself brings {brings} images/s and the step {steps}."
    )
    return [f"{said} {_need_text(judged, loader, machine)}".rstrip()]


def _need_text(judged: Judgement, loader: LoaderRecord, machine: Machine) -> str:
    """`11 workers would be needed, and 8 processors are there`; "" where nothing can be said."""
    need = judged.need
    if need.limit == "processors":
        there = f"{machine.processors:g} {_plural('processor', machine.processors)} are there"
        if machine.steps_on_cpu:
            return (
                f"No number of workers would change it: loading and stepping at that rate take "
                f"{need.processors:.3g} processors, and {there}."
            )
        workers = _workers(need.workers)
        return f"{workers} would be needed, and {there} ({need.processors:.3g} would do)."
    if need.limit is not None:
        return f"The loader is limited by the {need.limit}, which more workers do not help."
    if need.workers <= max(loader.setting.workers, 1):
        return ""
    return f"{_workers(need.workers)} would feed it, if each stays as fast as one is now."


def _shared_notes(judged: Judgement, fed: FedRecord | None, machine: Machine) -> list[str]:
    """On the CPU: what loading takes from the step."""
    if not machine.steps_on_cpu or judged.waiting + _ALIKE > waiting_share(judged.fed, judged.step):
        return []
    slower = judged.step.images_per_second / judged.fed * (1 - judged.waiting)
    how = "measured" if fed is not None and fed.images_per_second else "computed"
    return [
        f"Loading and stepping share {machine.processors:g} processors: a step takes "
        f"{slower:.2f} × as long as by itself ({how})."
    ]


def _worth_notes(
    judged: Judgement, step: MeasurementRecord, found: Sequence[Contender]
) -> list[str]:
    """What is not worth it where the loader bounds: the setting of least memory that it feeds as
    fast as the recommended one."""
    if judged.bound == "step":
        return []
    enough = [c for c in pareto_front(found) if c.num_bytes and c.rate >= judged.fed]
    best = step.used_bytes
    said = "A faster step would gain nothing with this loader."
    if not enough or best is None or (enough[0].num_bytes or 0) >= best:
        return [said]
    least = enough[0]
    saved = format_bytes(best - (least.num_bytes or 0))
    other = describe_changes(least.setting, step.setting)
    return [
        f"{said} Fed by it, {other} ({least.rate:.4g} images/s by itself) trains as fast and takes "
        f"{saved} less; the fastest step is recommended all the same."
    ]


def _law_notes(fed: FedRecord | None) -> list[str]:
    """Where the run says otherwise than the law, or did not end well."""
    if fed is None:
        return []
    if fed.images_per_second is None:
        return [f"The two were not measured together: {failure_text(fed)}"]
    if fed.predicted is None or abs(fed.images_per_second / fed.predicted - 1) <= _OFF:
        return []
    return [
        f"The two rates, measured apart, give {fed.predicted:.4g} images/s: the machine was less "
        "calm in one of the runs, or they share more than processors."
    ]


def failure_text(fed: FedRecord) -> str:
    """How a fed run ended that measured nothing: the item that ended it by name."""
    if fed.fault is not None and fed.fault.item not in ("the loader", "the data"):
        return f"{fed.fault.item}: {fed.fault.message}. A training would end there."
    return f"{fed.status.replace('_', ' ')}: {fed.message.strip().partition(chr(10))[0]}"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _plural(word: str, count: float) -> str:
    return word if count == 1 else f"{word}s"
