"""Advice for a terminal and a page: the recommended way, the other ways, and why they help.

A way is a setting that fits, and a lever one change that may lead to it.
"""

from collections.abc import Iterable, Iterator

from planner.advice.advice import Advice, Way
from planner.advice.space import NO_RECORDING
from planner.advice.waterfall import Bottleneck, WaterfallStep
from planner.advice.wish import NOT_COMPARED
from planner.core.units import format_bytes, format_range, format_seconds
from planner.report import estimates, timing
from planner.report.page import contents as doc
from planner.report.text import describe_fields, describe_setting

NUM_FIRST_WAYS = 6  # ways on a first screen
_TITLES = {"memory format": "channels_last", "memory budget": "compile's activation memory budget"}
SAVE_HINT = "the same with --json > advice.json"


def advice_answer(advice: Advice, save_hint: str = SAVE_HINT) -> list[doc.Part]:
    """Whether the setting fits as it stands, what to do, and what to type next; folded, the rest.

    Where it fits, the ways are on the first screen and the changes are folded; where it does not
    fit, the other way round. `save_hint` says how to write the advice to a file.
    """
    ways, changes = _ways_parts(advice), _waterfall_part(advice)
    limits = [doc.Text(_bottleneck_text(advice)), *timing.time_parts(advice.bottleneck)]
    shown, folded, title = ways, changes, "change by change"
    if not advice.as_asked.estimate.fits:
        shown, folded, title = changes, ways, "all ways"
    next_step = (
        f"Next: {save_hint}, then 'planner tune --from advice.json' (--way N for another), or "
        "'planner emit advice.json --for TRAINER'."
    )
    return [
        doc.Text("\n".join([*_plain_lines(advice), *_answer_lines(advice)])),
        *shown,
        *([doc.Text(next_step)] if advice.recommended else []),
        *([doc.Folded(title, folded)] if folded else []),
        *_front_part(advice),
        doc.Folded("what limits it", limits),
        *estimates.folded_notes("what was tried", _lever_lines(advice)),
        doc.Folded("commands", list(_command_parts(advice))),
        *estimates.folded_notes("left out", advice.left_out),
    ]


def _plain_lines(advice: Advice) -> Iterator[str]:
    """Whether the setting fits as it stands, and its rate."""
    plain = advice.as_asked
    if advice.recommended is None:
        assert advice.nearest is not None, "some way needs least"
        nearest = advice.nearest.estimate
        may_fit = nearest.low_bytes <= advice.budget_bytes
        yield (
            f"{'Probably nothing' if may_fit else 'Nothing'} fits in "
            f"{format_bytes(advice.budget_bytes)}: the nearest way needs "
            f"{estimates.needs_text(nearest)}."
        )
    yield estimates.verdict_text(plain.estimate, " as it stands")
    with_enough = "" if plain.estimate.fits else " with enough memory"
    setting = describe_setting(plain.setting, advice.model)
    yield f"{setting}: {_world_rate(plain.images_per_second, advice)} {advice.unit}/s{with_enough}."
    if advice.gpu is None:
        yield f"No GPU was named: {advice.unit}/s are those of {advice.rates_of}."


def _answer_lines(advice: Advice) -> Iterator[str]:
    """The recommended way or the nearest one, the other ways that are named, and what was not
    tried."""
    best = advice.recommended
    if best is None:
        assert advice.nearest is not None, "some way needs least"
        yield f"The nearest: {_way_text(advice.nearest, advice)}"
    else:
        yield f"Recommended{_merits_text(best, advice)}: {_way_text(best, advice)}"
    if advice.fastest is not None:
        fastest = _way_text(advice.fastest, advice)
        yield f"Perhaps faster, within the error of the figures: {fastest}"
    if (sure := advice.fastest_sure) is not None:
        yield f"The fastest that fits even in the worst case: {_way_text(sure, advice)}"
    elif best is not None and not best.estimate.fits_surely:
        yield "No way was found that fits even in the worst case: 'planner tune' measures."
    reasons = [reason for lever in advice.levers for reason in lever.reasons]
    not_compared = [r.removesuffix(NOT_COMPARED).rstrip(": ") for r in reasons if NOT_COMPARED in r]
    if not_compared:
        yield f"Not compared: {', '.join(not_compared)}. Each is recorded: ask 'planner estimate'."
    unrecorded = _unrecorded(advice)
    if unrecorded:
        yield f"Not tried without --record (some minutes, once): {', '.join(unrecorded)}."
    way = best or advice.nearest
    if way is not None and way.estimate.as_eager:
        yield estimates.narrowing_advice(way.estimate)


def _merits_text(best: Way, advice: Advice) -> str:
    """The merits of the recommended way, after a comma or in brackets."""
    fastest = advice.fastest
    if fastest is None:
        return f", the fastest {'of what was tried' if _unrecorded(advice) else 'found'}"
    merits = []
    if best.estimate.fits_surely and not fastest.estimate.fits_surely:
        merits.append("fits even in the worst case")
    if best.setting.global_batch != fastest.setting.global_batch:
        merits.append(f"has a batch nearer to {advice.as_asked.setting.global_batch}")
    return f" (it {' and '.join(merits)}, and no way that fits is known to be faster)"


def _unrecorded(advice: Advice) -> list[str]:
    """The levers that were not tried, since recording their steps takes minutes; compile first."""
    names = [v.name for v in advice.levers if any(NO_RECORDING in reason for reason in v.reasons)]
    return [_TITLES.get(name, name) for name in sorted(names, key=lambda name: name != "compile")]


def _way_text(way: Way, advice: Advice) -> str:
    estimate, time = way.estimate, way.estimate.throughput
    assert time is not None, "advice has rates"
    text = f"{_changes_text(way.changes)}.\n  Needs {estimates.needs_text(estimate)}; "
    text += f"{estimates.predicted_rate_text(time, advice.unit)}; "
    text += f"{format_seconds(time.step_seconds)} a step; "
    text += "same result" if way.effects == ("nothing",) else f"affects {', '.join(way.effects)}"
    return f"{text}; {timing.hours_text(estimate.cost)}." if estimate.cost else f"{text}."


def _ways_parts(advice: Advice) -> list[doc.Part]:
    if not advice.ways:
        return []
    hours = timing.hours_notes([way.estimate.cost for way in advice.ways], advice.unit)
    return [ways_table(advice, "Ways that fit"), *map(doc.Text, hours)]


def ways_table(advice: Advice, caption: str) -> doc.Table:
    all_fit = all(way.estimate.fits_surely for way in advice.ways)
    rows: list[list[doc.Cell]] = [
        [
            doc.count_cell(number),
            _world_rate(way.images_per_second, advice),
            _needs_cell(way),
            *([] if all_fit else [estimates.estimate_verdict(way.estimate)]),
            *timing.hours_cells(way.estimate.cost),
            ", ".join(way.effects),
            _own_changes(way, advice),
        ]
        for number, way in enumerate(advice.ways, 1)
    ]
    costs = [way.estimate.cost for way in advice.ways]
    headers = ["way", f"{advice.unit}/s", "needs", *([] if all_fit else ["fits"])]
    headers += [*timing.hours_headers(costs), "affects", "setting"]
    common = _common_changes(advice)
    caption = f"{caption}{f', all with {_changes_text(common)}' if common else ''}:"
    return doc.Table(headers, rows, caption, [0], NUM_FIRST_WAYS)


def _command_parts(advice: Advice) -> Iterator[doc.Part]:
    """The commands that estimate each way that was named, and those that tune and emit the best."""
    best = advice.recommended
    ways = [best or advice.nearest, advice.fastest, advice.fastest_sure]
    for command in dict.fromkeys(way.command for way in ways if way):
        yield doc.Copyable(command)
    if best is not None:
        option = ""
        if advice.images_per_device_step is not None:
            option = f" --global-batch {advice.images_per_device_step * best.setting.world_size}"
        estimate = f"{best.command} --json"
        yield doc.Copyable(f"{estimate} | planner tune --from -{option}")
        yield doc.Copyable(f"{estimate} | planner emit - --for pytorch --output train.py")


def _common_changes(advice: Advice) -> tuple[tuple[str, object], ...]:
    """The changes that all ways and the whole front share."""
    first, *others = [*advice.ways, *advice.front]
    return tuple(c for c in first.changes if all(c in way.changes for way in others))


def _own_changes(way: Way, advice: Advice) -> str:
    """The changes of a way that the other ways do not all share."""
    common = _common_changes(advice)
    changes = [change for change in way.changes if change not in common]
    return _changes_text(changes) if changes or not common else "nothing more"


def _waterfall_part(advice: Advice) -> list[doc.Part]:
    if not advice.waterfall:
        return []
    estimate, empty = advice.as_asked.estimate, doc.Number(None, "")
    need = doc.bytes_cell(estimate.device_total_bytes)
    time = doc.seconds_cell(estimate.throughput.step_seconds if estimate.throughput else 0.0)
    rows: list[list[doc.Cell]] = [["as it stands", need, empty, time, empty]]
    rows += [_waterfall_row(step) for step in advice.waterfall]
    images = f"{advice.as_asked.setting.global_batch:,} {advice.unit} in"
    headers = ["change", "needs", "difference", images, "difference"]
    goal = "recommendation" if advice.recommended else "nearest way"
    return [doc.Table(headers, rows, f"From your setting to the {goal}, change by change:")]


def _waterfall_row(step: WaterfallStep) -> list[doc.Cell]:
    """The memory and the time after a change, each with its difference from the row above."""
    needs, added = format_bytes(step.num_bytes), step.added_seconds
    difference = "+-"[step.saved_bytes > 0] + format_bytes(abs(step.saved_bytes))
    if step.as_eager:
        needs, difference = format_range(step.low_bytes, step.high_bytes), estimates.NOT_RECORDED
    return [
        _changes_text(step.changes),
        doc.Number(step.num_bytes, needs),
        doc.Number(-step.saved_bytes, difference),
        doc.seconds_cell(step.seconds),
        doc.Number(added, "+-"[added < 0] + format_seconds(abs(added))),
    ]


def _front_part(advice: Advice) -> list[doc.Part]:
    if len(advice.front) < 2:
        return []
    rows: list[list[doc.Cell]] = [
        [_needs_cell(way), _world_rate(way.images_per_second, advice), _own_changes(way, advice)]
        for way in advice.front
    ]
    caption = "Each row is the fastest for its memory:"
    table = doc.Table(["needs", f"{advice.unit}/s", "setting"], rows, caption)
    return [doc.Folded("memory against speed", [table])]


def _needs_cell(way: Way) -> doc.Number:
    return doc.Number(way.estimate.device_total_bytes, estimates.total_text(way.estimate))


def _bottleneck_text(advice: Advice) -> str:
    bottleneck = advice.bottleneck
    lines = [f"{timing.bound_text(bottleneck.whose, bottleneck.bound_seconds)}."]
    if bottleneck.peak_share is not None and bottleneck.model_share is not None:
        again = bottleneck.peak_share - bottleneck.model_share
        recomputed = f", and what is computed again {again:.0%}" if again > 0.005 else ""
        share = f"{bottleneck.model_share:.0%} of the card's peak FLOP/s"
        lines.append(f"The model's own arithmetic is {share}{recomputed}.")
    return "\n".join([*lines, _treatments_text(bottleneck, advice)])


def _treatments_text(bottleneck: Bottleneck, advice: Advice) -> str:
    if not bottleneck.treatments:
        waits = f": it waits for the {bottleneck.largest}" if bottleneck.largest == "host" else ""
        return f"Nothing that was tried makes it faster still{waits}."
    treatments = "; ".join(
        f"{_changes_text(treatment.changes)} "
        f"({_world_rate(treatment.images_per_second, advice)} {advice.unit}/s, {treatment.why})"
        for treatment in bottleneck.treatments
    )
    return f"Faster still, and why not recommended: {treatments}."


def _rate_cell(rate: float | None) -> doc.Number:
    return doc.Number(rate, "" if rate is None else f"{rate:,.0f}")


def _lever_lines(advice: Advice) -> Iterator[str]:
    """What became of the levers: a line for those with the same outcome and reasons."""
    names_by_outcome: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for lever in advice.levers:
        names_by_outcome.setdefault((lever.state, lever.reasons), []).append(lever.name)
    for (state, reasons), names in names_by_outcome.items():
        reason = f": {'; '.join(reasons)}" if reasons else ""
        yield f"{state}: {', '.join(_TITLES.get(name, name) for name in names)}{reason}"


def _changes_text(changes: Iterable[tuple[str, object]]) -> str:
    return describe_fields(dict(changes)) or "as it stands"


def _world_rate(rate: float | None, advice: Advice) -> doc.Number:
    """The rate of all GPUs, from that of one."""
    return _rate_cell(None if rate is None else rate * advice.as_asked.setting.world_size)
