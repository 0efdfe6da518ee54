"""Measured laid against predicted, part by part, and where the two differ most."""

from __future__ import annotations

from collections import defaultdict

from planner.advice.bottleneck import FOR_SPEED
from planner.advice.levers import LEVERS, Lever
from planner.core.errors import PlannerError
from planner.core.schema import Model, TrainSetting
from planner.core.schema.profile import ProfiledPart
from planner.core.schema.setting import GRAPH_MODES
from planner.core.units import format_seconds
from planner.estimation.estimate import resolve
from planner.estimation.ledgers import is_on_shapes, step_ledger
from planner.machine.hardware import Gpu
from planner.report.profile import sums
from planner.report.settings import in_words
from planner.throughput.parts import Accounts
from planner.throughput.prediction import DeviceRates, StepTime
from planner.throughput.result import step_time
from search.tuning.profiling.attribution import Attribution
from search.tuning.profiling.kinds import FUSED

# What a compiler makes one kernel of: which of them a kernel is can no longer be told.
_FUSIBLE = ("pointwise", "reduction", "copy")
FUSED_KINDS = ", ".join(_FUSIBLE)
# A lever that saves less of a kind than this is no treatment of it.
_LEAST_SAVED = 0.1


def parts_of(
    found: Attribution, predicted: Accounts | None, setting: TrainSetting
) -> tuple[ProfiledPart, ...]:
    """Each (phase, kind) that was measured or predicted, the longest measured first."""
    steps = found.num_steps
    measured: dict[tuple[str, str], float] = defaultdict(float)
    again: dict[tuple[str, str], float] = defaultdict(float)
    for key, seconds in found.seconds.items():
        at = key.phase, _row(key.kind, setting)
        measured[at] += seconds / steps
        again[at] += seconds / steps if key.recomputes else 0.0
    expected: dict[tuple[str, str], float] = defaultdict(float)
    for part in predicted.parts if predicted is not None else ():
        expected[part.phase, _row(part.kind, setting)] += part.seconds
    ranked = sorted({**expected, **measured}, key=lambda at: -measured[at])
    return tuple(
        ProfiledPart(
            phase=phase,
            kind=kind,
            measured_seconds=measured[phase, kind],
            predicted_seconds=expected[phase, kind] if predicted is not None else None,
            recomputed_seconds=again[phase, kind],
        )
        for phase, kind in ranked
    )


def _row(kind: str, setting: TrainSetting) -> str:
    """Under a compiler all that it may fuse is one row; torch's profiler tells no groups."""
    if kind == "grouped conv":
        return "conv"
    is_fused = setting.compile != "off" and kind in (FUSED, *_FUSIBLE)
    return FUSED_KINDS if is_fused else kind


def widest_gap(parts: tuple[ProfiledPart, ...]) -> tuple[str, float, float]:
    """The kind whose measured and predicted seconds lie farthest apart, and both."""
    by_kind = sums(parts, lambda part: part.kind)
    kind = max(by_kind, key=lambda k: abs(by_kind[k][0] - by_kind[k][1]))
    return kind, *by_kind[kind]


def gap_notes(
    parts: tuple[ProfiledPart, ...], model: Model, setting: TrainSetting, rates: DeviceRates,
    gpu: Gpu | None,
) -> list[str]:  # fmt: skip
    """Where measurement and prediction part most, and what treats that and the longest kind."""
    kind, measured, predicted = widest_gap(parts)
    apart = format_seconds(abs(measured - predicted))
    notes = [
        f"Measured and predicted part most in {kind}: {format_seconds(measured)} against "
        f"{format_seconds(predicted)}, {apart} {'more' if measured > predicted else 'less'} than "
        "expected."
    ]
    by_kind = sums(parts, lambda part: part.kind)
    if by_kind.get("attention", (1.0, 0.0))[0] == 0.0:
        notes.append(
            "No fused attention ran, though it was predicted: its work was measured as matmul, "
            "reduction and pointwise."
        )
    longest = next(iter(by_kind))
    for treated in dict.fromkeys((kind, longest)):
        said = treatment_of(treated, model, setting, rates, gpu)
        notes.append(said or f"No change of the setting is predicted to shorten {treated} here.")
    return notes


def treatment_of(
    row: str, model: Model, setting: TrainSetting, rates: DeviceRates, gpu: Gpu | None
) -> str:
    """The lever for speed that is predicted to save most of a row; "" where none saves a tenth.

    Only for models with a step on shapes: any other would be traced anew for each lever.
    """
    before = _on_shapes(model, setting, rates)
    if before is None:
        return ""
    best, most = "", _LEAST_SAVED * _seconds_of(row, before)
    for lever in LEVERS:
        for updates in _updates(lever, model, setting, gpu, rates):
            changed = setting.model_copy(update=updates)
            after = _on_shapes(model, changed, rates)
            if after is None or after.step_seconds >= before.step_seconds:
                continue
            # A compiler moves work from one of the fusible kinds to another: all of them count.
            is_moved = row in _FUSIBLE and changed.compile != setting.compile
            counted = FUSED_KINDS if is_moved else row
            saved = min(
                _seconds_of(counted, before) - _seconds_of(counted, after),
                before.step_seconds - after.step_seconds,  # some moves to another kind
            )
            if saved > most:
                most = saved
                best = (
                    f"What treats {counted}: {in_words(updates)} ({lever.says}), predicted to save "
                    f"{format_seconds(saved)} a step."
                )
    return best


def _updates(
    lever: Lever, model: Model, setting: TrainSetting, gpu: Gpu | None, rates: DeviceRates
) -> list[dict[str, object]]:
    """Those that keep the recipe; a CPU has no graphs of kernels."""
    if lever.name not in FOR_SPEED or lever.effect not in ("nothing", "rounding"):
        return []
    found = [dict(updates) for updates in lever.changes(model, setting, gpu)]
    return [u for u in found if rates.asynchronous or u.get("compile") not in GRAPH_MODES]


def _seconds_of(row: str, step: StepTime) -> float:
    kinds = {FUSED_KINDS: _FUSIBLE, "conv": ("conv", "grouped conv")}.get(row, ())
    return sum(part.seconds for part in step.parts if part.kind in (row, *kinds))


def _on_shapes(model: Model, setting: TrainSetting, rates: DeviceRates) -> StepTime | None:
    """The predicted step; None for what cannot run or has no step on shapes."""
    try:
        has_step = is_on_shapes(model, resolve(model, setting)[1])
        return predict(model, setting, rates) if has_step else None
    except PlannerError:
        return None


def predict(model: Model, setting: TrainSetting, rates: DeviceRates) -> StepTime:
    """Raises PlannerError where there is no ledger of the step."""
    resolved = resolve(model, setting)[1]
    time = step_time(step_ledger(model, resolved), resolved, rates)
    assert time is not None, "there are rates"
    return time
