"""The probes of a search as trials of Optuna's, which draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from planner.core.schema import MeasurementRecord
from planner.core.units import GIB
from planner.report.estimates import apart_fields

if TYPE_CHECKING:
    from optuna import Study


def studies_of(
    records: Sequence[MeasurementRecord], is_within: Callable[[MeasurementRecord], bool]
) -> tuple[Study, Study]:
    """By images/s, and by memory in GiB and images/s. The parameters are the axes that were varied;
    what measured no value has failed, and what is not within the budget breaks a constraint."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    axes = apart_fields([record.setting for record in records])
    names = {axis: "batch" if axis == "batch_size" else axis.replace("_", " ") for axis in axes}
    known = {names[axis]: _distribution(records, axis) for axis in axes}
    alone = optuna.create_study(directions=["maximize"])
    both = optuna.create_study(directions=["minimize", "maximize"])
    for study in (alone, both):  # Optuna counts from 0, our tables from 1
        study.add_trial(create_trial(state=TrialState.FAIL))
    for record in records:
        size = record.used_bytes and record.used_bytes / GIB
        rate = record.images_per_second
        for study, values in ((alone, (rate,)), (both, (size, rate))):
            ran = record.status == "measured" and None not in values
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if ran else TrialState.FAIL,
                    values=values if ran else None,
                    params={names[axis]: _value(record, axis) for axis in axes},
                    distributions=known,
                    constraints={"budget": float(not is_within(record))},
                )
            )
    return alone, both


def _distribution(records: Sequence[MeasurementRecord], axis: str) -> Any:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    values = [_value(record, axis) for record in records]
    if all(type(value) is int for value in values):
        return IntDistribution(min(values), max(values), log=axis == "batch_size")
    return CategoricalDistribution(sorted(set(values), key=str))


def _value(record: MeasurementRecord, axis: str) -> Any:
    """What a parameter of a study may be: other values as texts."""
    value = getattr(record.setting, axis)
    return value if isinstance(value, str | int | float | None) else str(value)
