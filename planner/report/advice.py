"""Advice as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.advice.advising import Advice, Way
from planner.advice.bottleneck import WORTH, Bottleneck, Treatment
from planner.advice.more_gpus import MoreGpus
from planner.advice.search import NO_TRACE
from planner.advice.waterfall import Fall
from planner.core.units import format_bytes, format_range, format_seconds
from planner.estimation.estimate import Estimate
from planner.report.cost import cost_cells, cost_headers, cost_notes, cost_text, training_text
from planner.report.settings import describe_setting, in_words
from planner.report.tables import NOT_TRACED, total_text
from planner.report.terminal import command_text, table_text, wrapped
from planner.report.time import time_lines
from planner.report.verdicts import fits_cell, verdict_text

MAX_WAYS = 8  # rows; --json has them all


def advice_text(advice: Advice) -> str:
    """The answer, the ways, how they came about, what the device waits for, and what else there
    is."""
    parts = [
        _answer(advice),
        _as_it_stands(advice),
        _next(advice),
        _ways(advice),
        _waterfall(advice),
        _front(advice),
        _bottleneck(advice),
        _cards(advice),
        _more_gpus(advice),
        _levers(advice),
        "Left out:\n" + "\n".join(wrapped(f"- {line}", "  ") for line in advice.left_out),
    ]
    return "\n\n".join(part for part in parts if part)


def _as_it_stands(advice: Advice) -> str:
    plain = advice.plain
    said = [
        f"As it stands: {describe_setting(plain.setting, advice.model)}",
        f"{verdict_text(plain.estimate)} {'' if plain.estimate.fits else 'With enough memory: '}"
        f"{_rate(plain, advice)}, {_step(plain)} (predicted).",
    ]
    if advice.gpu is None:
        said.append(
            f"No GPU was named: ways are ordered, and {advice.unit}/s given, by the rates "
            f"of {advice.rated}."
        )
    return "\n".join(wrapped(line) for line in said)


def _answer(advice: Advice) -> str:
    best = advice.recommended
    where = f"on {advice.gpu}" if advice.gpu else f"in {format_bytes(advice.budget_bytes)}"
    what = f"{advice.model.title} {where}"
    if best is None:
        assert advice.nearest is not None, "some way needs least"
        near = advice.nearest
        may_fit = near.estimate.low_bytes <= advice.budget_bytes
        return "\n".join(
            [
                f"{'Probably nothing' if may_fit else 'Nothing'} fits for {what}. "
                "The nearest needs "
                f"{format_bytes(advice.missing_bytes)} more ({advice.missing_bytes:,} bytes):",
                f"  {_changes(near.changes)}",
                f"  {_memory(near.estimate)}, {_rate(near, advice)}",
                command_text(near.command),
            ]
        )
    lines = [wrapped(f"Recommended for {what}{_standing(best, advice)}:"), *_way(best, advice)]
    if advice.fastest is not None:
        lines += ["Perhaps faster, within the error of the figures:", *_way(advice.fastest, advice)]
    if advice.surely is not None:
        lines += ["The fastest that fits even in the worst case:", *_way(advice.surely, advice)]
    elif not best.estimate.fits_surely:
        lines.append("No way was found that fits even in the worst case: 'planner tune' measures.")
    return "\n".join(lines)


def _standing(best: Way, advice: Advice) -> str:
    """What is best about what is recommended."""
    fastest = advice.fastest
    if fastest is None:
        return ", the fastest that fits"
    found = []
    if best.estimate.fits_surely and not fastest.estimate.fits_surely:
        found.append("fits even in the worst case")
    if best.setting.global_batch != fastest.setting.global_batch:
        found.append(f"has a batch nearer to {advice.plain.setting.global_batch}")
    return f": it {' and '.join(found)}, and no way that fits is known to be faster"


def _way(way: Way, advice: Advice) -> list[str]:
    found = way.estimate
    assert found.throughput is not None, "advice has rates"
    return [
        f"  {_changes(way.changes)}",
        f"  {_memory(found)}, "
        f"{_rate(way, advice)} ±{found.throughput.uncertainty:.0%}, {_step(way)}; "
        + _result(way.effects),
        *(
            [f"  {training_text(found.cost)} {advice.unit}: {cost_text(found.cost)}"]
            if found.cost
            else []
        ),
        command_text(way.command),
    ]


def _memory(found: Estimate) -> str:
    if found.as_eager:
        return f"{total_text(found)} ({NOT_TRACED})"
    return f"{total_text(found)} (up to {format_bytes(found.high_bytes)})"


def _ways(advice: Advice) -> str:
    if not advice.ways:
        return ""
    rows = [
        [
            str(number),
            f"{way.images_per_second:,.0f}",
            total_text(way.estimate),
            fits_cell(way.estimate),
            *cost_cells(way.estimate.cost),
            _effects(way.effects),
            _own(way, advice),
        ]
        for number, way in enumerate(advice.ways[:MAX_WAYS], 1)
    ]
    costs = [way.estimate.cost for way in advice.ways]
    headers = ["way", f"{advice.unit}/s", "memory", "fits", *cost_headers(costs)]
    headers += ["affects", "setting"]
    more = len(advice.ways) - MAX_WAYS
    common = _common(advice)
    title = "Ways that fit, the recommended first and then by speed"
    title += f"; all with {_changes(common)}:" if common else ":"
    text = wrapped(title) + "\n" + table_text(rows, headers, "rrrl")
    text += f"\nand {more} more, with --json" if more > 0 else ""
    return "\n".join([text, *map(wrapped, cost_notes(costs, advice.unit))])


def _next(advice: Advice) -> str:
    """The lines for a shell that go on from the recommended way, and from any."""
    best = advice.recommended
    if best is None:
        return ""
    held = ""
    if advice.share is not None:
        held = f" --global-batch {advice.share * best.setting.world_size}"
    return "\n".join(
        [
            "To measure around it, or to write it for a trainer as predicted:",
            command_text(f"{best.command} --json | planner tune --from -{held}"),
            command_text(f"{best.command} --json | planner emit - --for pytorch --output train.py"),
            wrapped(
                "For another way, save this answer with --json > advice.json; then 'planner tune "
                "--from advice.json --way N', or 'planner emit advice.json --way N'."
            ),
        ]
    )


def _common(advice: Advice) -> tuple[tuple[str, object], ...]:
    """The changes that all ways and the whole front share."""
    first, *others = [*advice.ways, *advice.front]
    return tuple(c for c in first.changes if all(c in way.changes for way in others))


def _own(way: Way, advice: Advice) -> str:
    """What a way changes beside what all of them do."""
    common = _common(advice)
    own = [change for change in way.changes if change not in common]
    return _changes(own) if own or not common else "nothing else"


def _waterfall(advice: Advice) -> str:
    if not advice.waterfall:
        return ""
    plain = advice.plain
    images = plain.setting.batch_size * plain.setting.accumulate
    seconds = plain.estimate.throughput.step_seconds if plain.estimate.throughput else 0.0
    need = plain.estimate.device_total_bytes
    rows = [["as it stands", "", format_bytes(need), "", format_seconds(seconds)]]
    rows += [_fall(fall) for fall in advice.waterfall]
    headers = ["change", "saves", "memory", "costs", f"{images} {advice.unit} in"]
    goal = "recommendation" if advice.recommended else "nearest way"
    table = table_text(rows, headers, "lr")
    return f"From your setting to the {goal}, change by change:\n{table}"


def _fall(fall: Fall) -> list[str]:
    return [
        _changes(fall.changes),
        NOT_TRACED if fall.as_eager else format_bytes(fall.saved_bytes),
        format_range(fall.low_bytes, fall.high_bytes)
        if fall.as_eager
        else format_bytes(fall.num_bytes),
        ("-" if fall.added_seconds < 0 else "+") + format_seconds(abs(fall.added_seconds)),
        format_seconds(fall.seconds),
    ]


def _front(advice: Advice) -> str:
    if len(advice.front) < 2:
        return ""
    rows = [
        [total_text(way.estimate), f"{way.images_per_second:,.0f}", _own(way, advice)]
        for way in advice.front
    ]
    return "Memory against speed (each row is the fastest for its memory):\n" + table_text(
        rows, ["memory", f"{advice.unit}/s", "setting"], "rrl"
    )


def _bottleneck(advice: Advice) -> str:
    found = advice.bottleneck
    lines = time_lines(found.whose, found)
    if found.peak_share is not None and found.model_share is not None:
        more = found.peak_share - found.model_share
        again = f", and what is computed again {more:.0%}" if more > 0.005 else ""
        share = f"{found.model_share:.0%} of the card's peak FLOP/s"
        lines.append(f"The model's own arithmetic is {share}{again}.")
    lines.append(_treatments(found, advice))
    return "\n".join(wrapped(line) for line in lines)


def _treatments(found: Bottleneck, advice: Advice) -> str:
    untraced = [v.name for v in advice.levers if any(NO_TRACE in r for r in v.reasons)]
    untried = f" Not tried, for want of a trace: {', '.join(untraced)}." if untraced else ""
    if not found.treatments:
        rates = [card.rate for card in advice.cards if card.rate is not None and card.fits]
        best = advice.recommended
        is_card = best is not None and max(rates, default=0.0) > WORTH * best.images_per_second
        if is_card and not untried:
            return "Nothing that was tried makes it faster still: the next step is a larger card."
        waits = f": it waits for the {found.largest}" if found.largest == "host" else ""
        return f"Nothing that was tried makes it faster still{waits}.{untried}"
    said = "; ".join(_treatment(t, advice) for t in found.treatments)
    return f"Faster still, and why not recommended: {said}.{untried}"


def _treatment(treatment: Treatment, advice: Advice) -> str:
    rate = f"{treatment.images_per_second:,.0f} {advice.unit}/s"
    return f"{_changes(treatment.changes)} ({rate}, {treatment.why})"


def _cards(advice: Advice) -> str:
    if not advice.cards:
        return ""
    rows = [
        [
            card.name,
            format_bytes(card.memory_bytes),
            "yes" if card.plain_fits else "no",
            f"{card.plain_rate:,.0f}" if card.plain_fits else "",
            f"{card.rate:,.0f}" if card.rate is not None and card.fits else "",
        ]
        for card in advice.cards
    ]
    per_second = f"{advice.unit}/s"
    headers = ["larger card", "memory", "fits as\nit stands", f"{per_second} as\nit stands",
               f"recommended\n{per_second}"]  # fmt: skip
    return "Your setting and the recommended on larger cards:\n" + table_text(rows, headers, "lrlr")


def _more_gpus(advice: Advice) -> str:
    """What other GPUs like it would give, a sentence each."""
    return "\n".join(wrapped(_more(more, advice)) for more in advice.more_gpus)


def _more(more: MoreGpus, advice: Advice) -> str:
    verb = "fits" if more.fits else "does not fit"
    over = f" over {more.link}" if more.link else ""
    need = format_bytes(more.device_total_bytes)
    text = (
        f"{more.gpus} GPUs ({more.parallelism}{over}): batch {more.batch_size} on each, as it "
        f"stands, {verb} ({need if more.images_per_second else f'at least {need}'} each)"
    )
    if not more.fits or not more.images_per_second:
        return f"{text}."
    text += f"; {more.images_per_second:,.0f} {advice.unit}/s in all"
    best = advice.recommended
    if best is not None:
        times = more.images_per_second / _all_rate(best)
        text += f", {times:.2f} times the recommended rate"
    if more.in_place_of:
        text += f", without {_changes(more.in_place_of)}"
    if more.cost is not None:
        text += f"; {cost_text(more.cost)}"
    return f"{text}."


def _all_rate(way: Way) -> float:
    """Images per second of all devices."""
    return way.images_per_second * way.setting.world_size


def _levers(advice: Advice) -> str:
    """What became of each lever: those of one fate in a line, with their reasons."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for lever in advice.levers:
        alike.setdefault((lever.state, lever.reasons), []).append(lever.name)
    lines = ["What was tried, and what became of it:"]
    for (state, reasons), names in alike.items():
        lines.append(wrapped(f"- {state}: {', '.join(names)}", "  "))
        lines += [wrapped(f"  {reason}", "    ") for reason in reasons]
    return "\n".join(lines)


def _changes(changes: Iterable[tuple[str, object]]) -> str:
    """`batch 32, accumulate 8, adamw-fused, expandable segments`."""
    return in_words(dict(changes)) or "as it stands"


def _effects(effects: Sequence[str]) -> str:
    return ", ".join(effects)


def _result(effects: Sequence[str]) -> str:
    return "same result" if list(effects) == ["nothing"] else f"affects {_effects(effects)}"


def _rate(way: Way, advice: Advice) -> str:
    each = f" on each of {way.setting.world_size} GPUs" if way.setting.world_size > 1 else ""
    return f"{way.images_per_second:,.0f} {advice.unit}/s{each}"


def _step(way: Way) -> str:
    assert way.estimate.throughput is not None, "advice has rates"
    return f"{format_seconds(way.estimate.throughput.step_seconds)} a step"
