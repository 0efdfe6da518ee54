"""Where the predicted seconds of a step go: by phase, kind, what bounds them, module, operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from planner.core.units import format_rate, format_seconds
from planner.report.page.contents import (
    Cell,
    Chart,
    Facts,
    Folded,
    Number,
    Part,
    Section,
    Table,
    Text,
    Tree,
)
from planner.report.page.plotting import (
    BROWN,
    CYCLE,
    GREY,
    LEGEND_ABOVE,
    STEEL,
    new_figure,
    plot_text,
)
from planner.report.pages.module_tree import LEAST_SHOWN, Node, Way, module_way, tree_part
from planner.report.pages.step import Step
from planner.report.time import ranked, seconds_and_share, shares, time_facts
from planner.report.verdicts import is_shown_as_running
from planner.throughput.parts import Cost
from planner.throughput.result import Throughput, datasheet_rates, exchanges_of, step_costs
from planner.throughput.timeline import OTHERS, WAITING

TITLE = "Predicted time"
NO_CARD = (
    "Time is predicted for a card, and none is named: pass --gpu NAME, one of 'planner gpus' "
    "(as --gpu rtx4090)."
)
# The same kind has the same colour in every chart of a page.
_KINDS = ("matmul", "pointwise", "reduction", "transfer", "conv", "attention", "copy")
_COLOURS = {**dict(zip(_KINDS, CYCLE, strict=False)), WAITING: GREY, OTHERS: BROWN}
_BOUNDS = (
    "matrix units", "bandwidth", "kernel starts", "link to the host", "link between devices",
)  # fmt: skip
_BOUND_COLOURS = {**dict(zip(_BOUNDS, CYCLE, strict=False)), "host": GREY}
_NUM_COSTLIEST = 25


def predicted_time(step: Step, key: str) -> Section:
    """Seconds that sum to the step's, in several ways; without a card, how to name one."""
    time = step.estimate.throughput
    if time is None or not time.parts:
        return Section("time", TITLE, [Text(NO_CARD)])
    costs = costs_of(step)
    parts: list[Part] = [
        Text(_sentence(step, time)),
        Facts(time_facts(time, step.estimate.unit, is_shown_as_running(step.estimate))),
        _by_phase(time, f"{key}-time-phase"),
        _by_kind(time, f"{key}-time-bound"),
        _clocks(time, f"{key}-time-clocks"),
    ]
    if costs:
        parts.append(_tree(costs))
        costliest = _costliest(costs, time.step_seconds)
        parts.append(Folded("The costliest operations", [costliest], printed=False))
    parts.append(Folded("Every part of the step", [_table(time)], printed=False))
    parts.append(Text(f"Basis: {time.basis}.", "note"))
    return Section("time", TITLE, parts)


def costs_of(step: Step) -> tuple[Cost, ...]:
    """The seconds of the estimate's step, by operation and module."""
    setting, rates = step.estimate.setting, datasheet_rates(step.gpu, step.estimate.model)
    exchanges = exchanges_of(step.ledger, setting, step.gpu, step.link)
    return step_costs(step.ledger, setting, rates, exchanges)


def predicted_rate(time: Throughput, what: str) -> str:
    """`1,088 images/s (±35%)`; of several devices, of all together."""
    each = f" on {time.devices} devices" if time.devices > 1 else ""
    rate = format_rate(time.all_images_per_second)
    return f"{rate} {what}/s{each} predicted (±{time.uncertainty:.0%})"


def _sentence(step: Step, time: Throughput) -> str:
    if not is_shown_as_running(step.estimate):
        return (
            "This setting does not fit, so no step of it runs: these are the times that the card's "
            f"rates would give it with more memory. What limits it: {shares(time.bound_seconds)}."
        )
    return (
        f"Predicted, not measured: a step takes {format_seconds(time.step_seconds)}, or "
        f"{predicted_rate(time, step.estimate.unit).replace(' predicted', '')}. "
        f"What limits it: {shares(time.bound_seconds)}."
    )


def _by_phase(time: Throughput, key: str) -> Chart:
    """A bar for each phase, stacked by kind of operation."""
    kinds = [kind for kind, _ in ranked(time.kind_seconds)]
    sums = _summed((part.phase, part.kind, part.seconds) for part in time.parts)
    said = "Milliseconds of each phase of the step, stacked by kind of operation."
    return _bars(key, said, list(time.phase_seconds), kinds, sums, time.step_seconds, _COLOURS)


def _by_kind(time: Throughput, key: str) -> Chart:
    """A bar for each kind of operation, stacked by what limits it."""
    kinds = [kind for kind, _ in ranked(time.kind_seconds)]
    bounds = [bound for bound, _ in ranked(time.bound_seconds)]
    sums = _summed((part.kind, part.bound, part.seconds) for part in time.parts)
    said = "Milliseconds of each kind of operation, stacked by what limits it."
    return _bars(key, said, kinds, bounds, sums, time.step_seconds, _BOUND_COLOURS)


def _clocks(time: Throughput, key: str) -> Chart:
    """What the host and the device do meanwhile."""
    waits = time.kind_seconds.get(WAITING, 0.0)
    others = time.kind_seconds.get(OTHERS, 0.0)
    device = {"works": time.step_seconds - waits - others, WAITING: waits, OTHERS: others}
    host = {
        "works": min(time.host_seconds, time.step_seconds),
        "is free": max(time.step_seconds - time.host_seconds, 0.0),
    }
    sums = {("device", k): s for k, s in device.items()} | {("host", k): s for k, s in host.items()}
    shown = {kind for (_, kind), seconds in sums.items() if seconds > 0}
    kinds = [kind for kind in ("works", WAITING, OTHERS, "is free") if kind in shown]
    colours = {**_COLOURS, "works": CYCLE[0], "is free": STEEL}
    said = (
        "Milliseconds in which device and host work: the host issues operations ahead of the "
        "device, which waits where the host is late."
    )
    return _bars(key, said, ["device", "host"], kinds, sums, time.step_seconds, colours)


def _bars(
    key: str,
    said: str,
    names: Sequence[str],
    stacks: Sequence[str],
    seconds: Mapping[tuple[str, str], float],
    total: float,
    colours: Mapping[str, str],
) -> Chart:
    """Horizontal bars, the first on top, in milliseconds."""
    from plotly.graph_objects import Bar

    traces = []
    for stack in stacks:
        of_stack = [seconds.get((name, stack), 0.0) for name in names]
        traces.append(
            Bar(
                name=plot_text(stack),
                y=[plot_text(name) for name in names],
                x=[1e3 * s for s in of_stack],
                customdata=[f"{s / total:.1%}" for s in of_stack],
                orientation="h",
                marker={"color": colours.get(stack, GREY)},
                hovertemplate="%{y}, %{fullData.name}<br>%{x:.3g} ms, %{customdata} of the step"
                "<extra></extra>",
            )
        )
    figure = new_figure(
        traces, barmode="stack", bargap=0.3, legend=LEGEND_ABOVE,
        xaxis={"title": {"text": "milliseconds"}},
        yaxis={"type": "category", "autorange": "reversed", "ticklabelstandoff": 6},
    )  # fmt: skip
    return Chart(key, figure, said, 180 + 32 * len(names))


def time_tree(costs: Iterable[Cost]) -> Node:
    """The root; the seconds of every node are the sum of its children's. Forward and backward of a
    module are in one node; what runs in no module lies under its phase, and waits by themselves."""
    root = Node("step", "step")
    for cost in costs:
        if cost.seconds <= 0:
            continue
        label = cost.name.removeprefix("aten.") or cost.kind
        of = f" of {cost.path}" if cost.path else ""
        shown = f"{cost.phase}: {label}" if cost.name else cost.phase
        leaf = shown, f"{cost.phase}{of} ({label})"
        root.add(_way(cost), leaf, cost.kind, cost.seconds)
    root.join_equals()
    root.gather(root.amount * LEAST_SHOWN)
    return root


def _way(cost: Cost) -> Way:
    if not cost.name and cost.kind in (WAITING, OTHERS):
        return [(cost.kind, cost.kind)]
    if not cost.path or cost.phase not in ("forward", "backward"):
        return [(cost.phase, cost.phase)]
    return module_way(cost.path)


def _tree(costs: Sequence[Cost]) -> Tree:
    """Modules and operations: each as high as the seconds that it takes."""
    said = (
        "The step's seconds by module and operation; what takes most is on top. A box has the "
        "colour of its kind above, and is grey where it holds several; equal blocks are one box."
    )
    return tree_part(time_tree(costs), said, _COLOURS, format_seconds, _kinds)


def _kinds(node: Node) -> str:
    """Its seconds by kind of operation."""
    most = ranked(node.amounts)
    return ", ".join(f"{kind} {format_seconds(seconds)}" for kind, seconds in most)


def _costliest(costs: Sequence[Cost], total: float) -> Table:
    """Operations by phase and name, all modules together."""
    seconds: dict[tuple[str, str, str], float] = {}
    modules: dict[tuple[str, str, str], set[str]] = {}
    for cost in costs:
        named = cost.phase, cost.name.removeprefix("aten.") or cost.kind, cost.bound
        seconds[named] = seconds.get(named, 0.0) + cost.seconds
        modules.setdefault(named, set()).add(cost.path)
    most = sorted(seconds, key=lambda named: -seconds[named])[:_NUM_COSTLIEST]
    return Table(
        ["Operation", "Phase", "Bound by", "Modules", "Time", "Share"],
        [
            [name, phase, bound, _number(len(modules[phase, name, bound])),
             *seconds_and_share(seconds[phase, name, bound], total)]
            for phase, name, bound in most
        ],
        f"The {len(most)} costliest of {len(seconds)} operations, all modules together.",
    )  # fmt: skip


def _table(time: Throughput) -> Table:
    parts = sorted(time.parts, key=lambda part: -part.seconds)
    rows: list[list[Cell]] = [
        [part.phase, part.kind, part.bound, *seconds_and_share(part.seconds, time.step_seconds)]
        for part in parts
        if part.seconds
    ]
    rows.append(["all", "", "", *seconds_and_share(time.step_seconds, time.step_seconds)])
    said = "Every second of the step once, by phase, kind of operation, and what limits it."
    return Table(["Phase", "Kind", "Bound by", "Time", "Share"], rows, said, [len(rows) - 1])


def _number(count: int) -> Number:
    return Number(count, f"{count:,}")


def _summed(entries: Iterable[tuple[str, str, float]]) -> Mapping[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = {}
    for name, stack, seconds in entries:
        sums[name, stack] = sums.get((name, stack), 0.0) + seconds
    return sums
