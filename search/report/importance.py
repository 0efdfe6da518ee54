"""Which axis decided the rate, by Optuna's own measure of importance (PED-ANOVA)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.page.contents import Chart, Part, Text
from planner.page.plotting import BLUE, new_figure
from search.report.against import BELOW_BUTTONS
from search.report.axis_pairs import BATCH, Ran

if TYPE_CHECKING:
    import optuna

FEWEST = 12  # settings that ran, by our judgement: of fewer an importance says nothing
# PED-ANOVA asks what the best share of trials have in common; Optuna's reference of
# PedAnovaImportanceEvaluator advises five at least. The share is its default.
TOP_SHARE, FEWEST_IN_TOP = 0.1, 5


def importances(ran: Sequence[Ran], axes: Sequence[str]) -> dict[str, float]:
    """Each axis's share, the largest first; none where too few settings ran."""
    if len(ran) < FEWEST or len(axes) < 2:
        return {}
    import optuna

    top = max(TOP_SHARE, FEWEST_IN_TOP / len(ran))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=top)
        found = optuna.importance.get_param_importances(_study(ran, axes), evaluator=evaluator)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def importance_parts(shares: dict[str, float], key: str) -> list[Part]:
    """A bar for each axis, and what it means."""
    if not shares:
        return []
    from plotly.graph_objects import Bar

    names = [axis_name(axis) for axis in shares]
    figure = new_figure(
        [Bar(
            x=list(shares.values()), y=names, orientation="h", marker={"color": BLUE},
            text=[f"{share:.0%}" for share in shares.values()], textposition="outside",
            cliponaxis=False, hovertemplate="%{y}: %{text}<extra></extra>",
        )],
        xaxis={"tickformat": ".0%", "title": {"text": "share of importance"},
               "range": [0, 1.1 * max(shares.values())]},
        yaxis={"autorange": "reversed", "automargin": True, "ticklabelstandoff": 6},
        bargap=0.35, margin=BELOW_BUTTONS,
    )  # fmt: skip
    first = axis_name(next(iter(shares)))
    said = (
        "How much each axis has to do with a setting being among the fastest, by Optuna's "
        "PED-ANOVA."
    )
    return [
        Text(
            f"What sets the fastest settings apart from the others most is {first}. This is of "
            "probed settings only, and a search does not probe evenly: an axis of which it tried "
            "only the best value looks unimportant, and two axes that help only together share it."
        ),
        Chart(f"{key}-axes-importance", figure, said, 110 + 32 * len(shares)),
    ]


def axis_name(axis: str) -> str:
    """As settings are described: `batch`, `memory format`."""
    return "batch" if axis == BATCH else axis.replace("_", " ")


def _study(ran: Sequence[Ran], axes: Sequence[str]) -> optuna.Study:
    """What ran, as a study in memory whose parameters are the axes."""
    import optuna
    from optuna.distributions import CategoricalDistribution, IntDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, Any] = {}
    for axis in axes:
        values = sorted({str(getattr(one.setting, axis)) for one in ran})
        distributions[axis] = CategoricalDistribution(values)
        if axis == BATCH:
            batches = [one.setting.batch_size for one in ran]
            distributions[axis] = IntDistribution(min(batches), max(batches), log=True)
    study = optuna.create_study(direction="maximize")
    study.add_trials(
        optuna.create_trial(
            value=one.rate,
            params={
                axis: one.setting.batch_size if axis == BATCH else str(getattr(one.setting, axis))
                for axis in axes
            },
            distributions=distributions,
        )
        for one in ran
    )
    return study
