"""Advice as an answer."""

from collections.abc import Iterable, Iterator, Sequence

from planner.advice.advising import Advice, Way
from planner.advice.space import NO_RECORDING
from planner.advice.ways import Bottleneck, Treatment, WaterfallStep
from planner.advice.wish import NOT_COMPARED
from planner.core.units import format_bytes, format_range, format_seconds
from planner.report import estimates
from planner.report import time as timing
from planner.report.page import contents as doc
from planner.report.text import describe_setting, in_words

FIRST_WAYS = 6  # of a first screen
_CALLED = {"memory format": "channels_last", "memory budget": "compile's activation memory budget"}
ASKED = "the same with --json > advice.json"


def advice_answer(advice: Advice, asked: str = ASKED) -> list[doc.Part]:
    """Whether it fits as it stands, what to do, the ways (or, where it does not fit, what each
    change does) and what next; folded, the rest. `asked` is what writes it to a file."""
    ways, falls, found = _ways(advice), _waterfall(advice), advice.bottleneck
    is_first = not advice.plain.estimate.fits
    first, second = ((falls, "change by change"), (ways, "all ways"))[:: 1 if is_first else -1]
    return [
        doc.Text("\n".join([*_as_it_stands(advice), *_answer(advice)])),
        *first[0],
        *([doc.Text(_next(asked))] if advice.recommended else []),
        *([doc.Folded(second[1], second[0])] if second[0] else []),
        *_front(advice),
        doc.Folded("what limits it", [doc.Text(_bottleneck(advice)), *timing.time_parts(found)]),
        *estimates.notes("what was tried", _levers(advice)),
        doc.Folded("commands", list(_commands(advice))),
        *estimates.notes("left out", advice.left_out),
    ]  # fmt: skip


def _as_it_stands(advice: Advice) -> Iterator[str]:
    plain = advice.plain
    if advice.recommended is None:
        assert advice.nearest is not None, "some way needs least"
        near = advice.nearest.estimate
        may_fit = near.low_bytes <= advice.budget_bytes
        yield (
            f"{'Probably nothing' if may_fit else 'Nothing'} fits in "
            f"{format_bytes(advice.budget_bytes)}: the nearest way needs "
            f"{estimates.needs_text(near)}."
        )
    yield estimates.verdict_text(plain.estimate, " as it stands")
    with_enough = "" if plain.estimate.fits else " with enough memory"
    setting = describe_setting(plain.setting, advice.model)
    yield f"{setting}: {_all(plain.images_per_second, advice)} {advice.unit}/s{with_enough}."
    if advice.gpu is None:
        yield f"No GPU was named: {advice.unit}/s are those of {advice.rated}."


def _answer(advice: Advice) -> Iterator[str]:
    best = advice.recommended
    if best is None:
        assert advice.nearest is not None, "some way needs least"
        yield f"The nearest: {_way(advice.nearest, advice)}"
    else:
        yield f"Recommended{_standing(best, advice)}: {_way(best, advice)}"
    if advice.fastest is not None:
        yield f"Perhaps faster, within the error of the figures: {_way(advice.fastest, advice)}"
    if advice.surely is not None:
        yield f"The fastest that fits even in the worst case: {_way(advice.surely, advice)}"
    elif best is not None and not best.estimate.fits_surely:
        yield "No way was found that fits even in the worst case: 'planner tune' measures."
    said = [reason for lever in advice.levers for reason in lever.reasons]
    apart = [r.removesuffix(NOT_COMPARED).rstrip(": ") for r in said if NOT_COMPARED in r]
    if apart:
        yield f"Not compared: {', '.join(apart)}. Each is recorded: ask 'planner estimate'."
    unrecorded = _unrecorded(advice)
    if unrecorded:
        yield f"Not tried without --record (some minutes, once): {', '.join(unrecorded)}."
    shown = best or advice.nearest
    if shown is not None and shown.estimate.as_eager:
        yield estimates.narrower(shown.estimate)


def _standing(best: Way, advice: Advice) -> str:
    """What is best about what is recommended."""
    fastest = advice.fastest
    if fastest is None:
        return f", the fastest {'of what was looked at' if _unrecorded(advice) else 'found'}"
    found = []
    if best.estimate.fits_surely and not fastest.estimate.fits_surely:
        found.append("fits even in the worst case")
    if best.setting.global_batch != fastest.setting.global_batch:
        found.append(f"has a batch nearer to {advice.plain.setting.global_batch}")
    return f" (it {' and '.join(found)}, and no way that fits is known to be faster)"


def _unrecorded(advice: Advice) -> list[str]:
    """What was not looked at, since its step is recorded and that takes minutes."""
    found = [v.name for v in advice.levers if any(NO_RECORDING in reason for reason in v.reasons)]
    return [_CALLED.get(name, name) for name in sorted(found, key=lambda name: name != "compile")]


def _way(way: Way, advice: Advice) -> str:
    found, time = way.estimate, way.estimate.throughput
    assert time is not None, "advice has rates"
    text = f"{_changes(way.changes)}.\n  Needs {estimates.needs_text(found)}; "
    text += f"{estimates.rate_text(time, advice.unit)}; "
    text += f"{format_seconds(time.step_seconds)} a step; "
    text += _result(way.effects)
    return f"{text}; {timing.hours_text(found.cost)}." if found.cost else f"{text}."


def _ways(advice: Advice) -> list[doc.Part]:
    if not advice.ways:
        return []
    hours = timing.hours_notes([way.estimate.cost for way in advice.ways], advice.unit)
    return [ways_table(advice, "Ways that fit"), *map(doc.Text, hours)]


def ways_table(advice: Advice, said: str) -> doc.Table:
    all_fit = all(way.estimate.fits_surely for way in advice.ways)
    rows: list[list[doc.Cell]] = [
        [
            doc.count_cell(number),
            _all(way.images_per_second, advice),
            _needs(way),
            *([] if all_fit else [estimates.verdict_of(way.estimate)]),
            *timing.hours_cells(way.estimate.cost),
            ", ".join(way.effects),
            _own(way, advice),
        ]
        for number, way in enumerate(advice.ways, 1)
    ]
    costs = [way.estimate.cost for way in advice.ways]
    headers = ["way", f"{advice.unit}/s", "needs", *([] if all_fit else ["fits"])]
    headers += [*timing.hours_headers(costs), "affects", "setting"]
    common = _common(advice)
    said = f"{said}{f', all with {_changes(common)}' if common else ''}:"
    return doc.Table(headers, rows, said, [0], FIRST_WAYS)


def _next(asked: str) -> str:
    return (
        f"Next: {asked}, then 'planner tune --from advice.json' (--way N for another), or "
        "'planner emit advice.json --for TRAINER'."
    )


def _commands(advice: Advice) -> Iterator[doc.Part]:
    """What estimates the best way, the others that were named, and goes on in one line."""
    best = advice.recommended
    named = [best or advice.nearest, advice.fastest, advice.surely]
    for way in dict.fromkeys(way.command for way in named if way):
        yield doc.Copyable(way)
    if best is not None:
        held = ""
        if advice.share is not None:
            held = f" --global-batch {advice.share * best.setting.world_size}"
        yield doc.Copyable(f"{best.command} --json | planner tune --from -{held}")
        yield doc.Copyable(
            f"{best.command} --json | planner emit - --for pytorch --output train.py"
        )


def _common(advice: Advice) -> tuple[tuple[str, object], ...]:
    """The changes that all ways and the whole front share."""
    first, *others = [*advice.ways, *advice.front]
    return tuple(c for c in first.changes if all(c in way.changes for way in others))


def _own(way: Way, advice: Advice) -> str:
    """What a way changes beside what all of them do."""
    common = _common(advice)
    own = [change for change in way.changes if change not in common]
    return _changes(own) if own or not common else "nothing more"


def _waterfall(advice: Advice) -> list[doc.Part]:
    if not advice.waterfall:
        return []
    plain = advice.plain
    images = f"{plain.setting.global_batch:,} {advice.unit} in"
    seconds = plain.estimate.throughput.step_seconds if plain.estimate.throughput else 0.0
    need, none = plain.estimate.device_total_bytes, doc.Number(None, "")
    rows: list[list[doc.Cell]] = [
        ["as it stands", doc.bytes_cell(need), none, doc.seconds_cell(seconds), none]
    ]
    rows += [_fall(fall) for fall in advice.waterfall]
    headers = ["change", "needs", "difference", images, "difference"]
    goal = "recommendation" if advice.recommended else "nearest way"
    return [doc.Table(headers, rows, f"From your setting to the {goal}, change by change:")]


def _fall(fall: WaterfallStep) -> list[doc.Cell]:
    """What is needed and taken with it, each with its sign against the row above."""
    needs, added = format_bytes(fall.num_bytes), fall.added_seconds
    more = "+-"[fall.saved_bytes > 0] + format_bytes(abs(fall.saved_bytes))
    if fall.as_eager:
        needs, more = format_range(fall.low_bytes, fall.high_bytes), estimates.NOT_RECORDED
    return [
        _changes(fall.changes),
        doc.Number(fall.num_bytes, needs),
        doc.Number(-fall.saved_bytes, more),
        doc.seconds_cell(fall.seconds),
        doc.Number(added, "+-"[added < 0] + format_seconds(abs(added))),
    ]


def _front(advice: Advice) -> list[doc.Part]:
    if len(advice.front) < 2:
        return []
    rows: list[list[doc.Cell]] = [
        [_needs(w), _all(w.images_per_second, advice), _own(w, advice)] for w in advice.front
    ]
    said = "Each row is the fastest for its memory:"
    table = doc.Table(["needs", f"{advice.unit}/s", "setting"], rows, said)
    return [doc.Folded("memory against speed", [table])]


def _needs(way: Way) -> doc.Number:
    return doc.Number(way.estimate.device_total_bytes, estimates.total_text(way.estimate))


def _bottleneck(advice: Advice) -> str:
    found = advice.bottleneck
    lines = [f"{timing.bound_text(found.whose, found.bound_seconds)}."]
    if found.peak_share is not None and found.model_share is not None:
        more = found.peak_share - found.model_share
        again = f", and what is computed again {more:.0%}" if more > 0.005 else ""
        share = f"{found.model_share:.0%} of the card's peak FLOP/s"
        lines.append(f"The model's own arithmetic is {share}{again}.")
    return "\n".join([*lines, _treatments(found, advice)])


def _treatments(found: Bottleneck, advice: Advice) -> str:
    if not found.treatments:
        waits = f": it waits for the {found.largest}" if found.largest == "host" else ""
        return f"Nothing that was tried makes it faster still{waits}."
    said = "; ".join(_treatment(t, advice) for t in found.treatments)
    return f"Faster still, and why not recommended: {said}."


def _treatment(treatment: Treatment, advice: Advice) -> str:
    rate = f"{_all(treatment.images_per_second, advice)} {advice.unit}/s"
    return f"{_changes(treatment.changes)} ({rate}, {treatment.why})"


def _rate_of(rate: float | None) -> doc.Number:
    return doc.Number(rate, "" if rate is None else f"{rate:,.0f}")


def _levers(advice: Advice) -> Iterator[str]:
    """What became of each: those of one fate in a line, with their reasons."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for lever in advice.levers:
        alike.setdefault((lever.state, lever.reasons), []).append(lever.name)
    for (state, reasons), names in alike.items():
        why = f": {'; '.join(reasons)}" if reasons else ""
        yield f"{state}: {', '.join(_CALLED.get(name, name) for name in names)}{why}"


def _changes(changes: Iterable[tuple[str, object]]) -> str:
    """`batch 32, accumulate 8, adamw-fused, expandable segments`."""
    return in_words(dict(changes)) or "as it stands"


def _result(effects: Sequence[str]) -> str:
    return "same result" if list(effects) == ["nothing"] else f"affects {', '.join(effects)}"


def _all(rate: float | None, advice: Advice) -> doc.Number:
    """From one GPU's rate that of all."""
    return _rate_of(None if rate is None else rate * advice.plain.setting.world_size)
