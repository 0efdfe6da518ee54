"""What the probes of a search show together, as Optuna draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from planner.core.schema import MeasurementRecord
from planner.core.units import GIB
from planner.report.page.contents import Chart, Part, Section, Tabs, Text
from planner.report.page.plotting import plot_text, restyled
from search.probe.evidence import is_feasible
from search.report.run import Run

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from pydantic import BaseModel

FEWEST = 12  # probes that ran, by our judgement: of fewer an importance says nothing
# PED-ANOVA asks what the best share of trials have in common; Optuna's reference of
# PedAnovaImportanceEvaluator advises five at least. The share is its default.
TOP_SHARE, FEWEST_IN_TOP = 0.1, 5
Values = Callable[
    [MeasurementRecord], tuple[float | None, ...]
]  # of a trial, one for each objective


def axes_sections(run: Run, key: str) -> list[Section]:
    """Axis by axis, how fast the settings with each value were; none where no axis was varied."""
    parts = axes_parts(run.records, run.unit, run.budget_bytes, key)
    return [Section("axes", "Axis by axis", parts)] if parts else []


def axes_parts(
    records: Sequence[MeasurementRecord], unit: str, budget_bytes: int | None, key: str
) -> list[Part]:
    """Slices by axis; of FEWEST probes or more that ran also which axes matter."""
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import plot_param_importances, plot_slice

    study, axes = study_of(records, budget_bytes), varied_axes([r.setting for r in records])
    num_ran, named = _num_ran(study), {"target_name": plot_text(f"{unit}/s")}
    if not axes or not num_ran:
        return []
    grey = "; grey ones exceed the budget" if budget_bytes is not None else ""
    said = f"{unit.capitalize()}/s of each probe that ran{grey}."
    tabs = [
        (axis, [Chart(f"{key}-axes-{n}", restyled(plot_slice(study, [axis], **named)), said)])
        for n, axis in enumerate(map(axis_name, axes), start=1)
    ]
    parts: list[Part] = [Tabs(f"{key}-axes", tabs)]
    if num_ran < FEWEST or len(axes) < 2:
        return parts
    top = PedAnovaImportanceEvaluator(target_quantile=max(TOP_SHARE, FEWEST_IN_TOP / num_ran))
    important = restyled(plot_param_importances(study, top, **named), showlegend=False)
    return [
        *parts,
        Text(
            "Importance is of probed settings only, and a search does not probe evenly: an axis of "
            "which it tried only the best value looks unimportant.",
            "note",
        ),
        Chart(f"{key}-importance", important, "How much each axis decides, by Optuna.", 320),
    ]


def history_parts(
    records: Sequence[MeasurementRecord], unit: str, budget_bytes: int | None, key: str
) -> list[Part]:
    """Images/s of the probes in order, with the best so far; none where nothing ran."""
    from optuna.visualization import plot_optimization_history

    study = study_of(records, budget_bytes)
    if not _num_ran(study):
        return []
    figure = plot_optimization_history(study, target_name=plot_text(f"{unit}/s"))
    said = f"{unit.capitalize()}/s of each probe that ran, in order, and the best so far."
    return [Chart(key, restyled(figure), said)]


def front_figure(records: Sequence[MeasurementRecord], unit: str, budget_bytes: int | None) -> Any:
    """Memory in GiB against images/s, with the Pareto front; None where nothing ran."""
    from optuna.visualization import plot_pareto_front

    def sized(record: MeasurementRecord) -> tuple[float | None, ...]:
        used = record.used_bytes
        return None if used is None else used / GIB, record.images_per_second

    study = study_of(records, budget_bytes, ("minimize", "maximize"), sized)
    names = ["memory, GiB", plot_text(f"{unit}/s")]
    if not _num_ran(study):
        return None
    figure = restyled(plot_pareto_front(study, target_names=names))
    for trace, name in zip(figure.data, ("over the budget", "probe", "unbeaten"), strict=True):
        trace.update(name=name, showlegend=True)
    return figure


def study_of(
    records: Sequence[MeasurementRecord],
    budget_bytes: int | None,
    directions: Sequence[str] = ("maximize",),
    values: Values = lambda record: (record.images_per_second,),
) -> Study:
    """Probes as the trials of a study in memory, whose parameters are the axes that were varied.
    Those that measured no value have failed; those over the budget break a constraint."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=list(directions))
    study.add_trial(create_trial(state=TrialState.FAIL))  # Optuna counts from 0, our tables from 1
    known = {a: _distribution(records, a) for a in varied_axes([r.setting for r in records])}
    for record in records:
        found = values(record)
        ran = record.status == "measured" and None not in found
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if ran else TrialState.FAIL,
                values=found if ran else None,
                params={axis_name(a): _value(record, a) for a in known},
                distributions={axis_name(a): d for a, d in known.items()},
                constraints={"budget": 0.0 if is_feasible(record, budget_bytes) else 1.0},
            )
        )
    return study


def varied_axes(settings: Sequence[BaseModel]) -> list[str]:
    """The fields in which settings differ."""
    return [
        field
        for field in (type(settings[0]).model_fields if settings else ())
        if len({getattr(setting, field) for setting in settings}) > 1
    ]


def axis_name(axis: str) -> str:
    """As settings are described: `batch`, `memory format`."""
    return "batch" if axis == "batch_size" else axis.replace("_", " ")


def _distribution(records: Sequence[MeasurementRecord], axis: str) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    values = [_value(record, axis) for record in records]
    if all(type(value) is int for value in values):
        return IntDistribution(min(values), max(values), log=axis == "batch_size")
    return CategoricalDistribution(sorted(set(values), key=str))


def _value(record: MeasurementRecord, axis: str) -> Any:
    """What a parameter of a study may be: other values as texts."""
    value = getattr(record.setting, axis)
    return value if isinstance(value, str | int | float | None) else str(value)


def _num_ran(study: Study) -> int:
    return sum(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False))
