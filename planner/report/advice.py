"""Advice as text, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from planner.advice.advising import Advice, Way
from planner.advice.bottleneck import Bottleneck, Treatment
from planner.advice.more_gpus import MoreGpus
from planner.advice.waterfall import Fall
from planner.report.settings import describe_setting, in_words
from planner.report.tables import fits_word, unit, verdict
from planner.report.time import time_lines
from planner.report.timeline import new_figure, save_figure
from planner.report.wrapping import wrapped
from planner.units import GIB, format_bytes, format_seconds

MAX_WAYS = 8  # rows; --json has them all


def advice_text(advice: Advice) -> str:
    """The answer, the ways, how they came about, what the device waits for, and what else there
    is."""
    parts = [
        _heading(advice),
        _answer(advice),
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


def _heading(advice: Advice) -> str:
    plain = advice.plain.estimate
    where = advice.gpu or f"memory of {format_bytes(advice.budget_bytes)}"
    first = verdict(plain).splitlines()[0]
    said = [
        f"{advice.model.title} on {where}, as it stands: {describe_setting(advice.plain.setting)}",
        f"{first} {_rate(advice.plain, advice)}, {_step(advice.plain)} (predicted).",
    ]
    if advice.gpu is None:
        said.append(
            f"No GPU was named: ways are ordered, and {unit(advice.model)}/s given, by the rates "
            f"of {advice.rated}."
        )
    return "\n".join(wrapped(line) for line in said)


def _answer(advice: Advice) -> str:
    best = advice.recommended
    if best is None:
        assert advice.nearest is not None, "some way needs least"
        near = advice.nearest
        return "\n".join(
            [
                f"Nothing fits. The nearest needs {format_bytes(advice.missing_bytes)} more "
                f"({advice.missing_bytes:,} bytes):",
                f"  {_changes(near.changes)}",
                f"  {format_bytes(near.estimate.device_total_bytes)}, {_rate(near, advice)}",
                f"  {near.command}",
            ]
        )
    lines = ["Recommended, the fastest that fits:", *_way(best, advice)]
    if advice.surely is not None:
        lines += ["The fastest that fits surely:", *_way(advice.surely, advice)]
    elif not best.estimate.fits_surely:
        lines.append("No way was found that fits surely: 'planner tune' measures.")
    return "\n".join(lines)


def _way(way: Way, advice: Advice) -> list[str]:
    found = way.estimate
    assert found.throughput is not None, "advice has rates"
    return [
        f"  {_changes(way.changes)}",
        f"  {format_bytes(found.device_total_bytes)} (up to {format_bytes(found.high_bytes)}), "
        f"{_rate(way, advice)} ±{found.throughput.uncertainty:.0%}, {_step(way)}; "
        f"changes: {_effects(way.effects)}",
        f"  {way.command}",
    ]


def _ways(advice: Advice) -> str:
    if not advice.ways:
        return ""
    rows = [
        [
            f"{way.images_per_second:,.0f}",
            format_bytes(way.estimate.device_total_bytes),
            fits_word(way.estimate),
            _effects(way.effects),
            _own(way, advice),
        ]
        for way in advice.ways[:MAX_WAYS]
    ]
    headers = [f"{unit(advice.model)}/s", "memory", "fits", "changes", "by"]
    more = len(advice.ways) - MAX_WAYS
    common = _common(advice)
    title = "Ways that fit, fastest first"
    title += f"; all with {_changes(common)}:" if common else ":"
    text = wrapped(title) + "\n" + _tabulate(rows, headers)
    return text + (f"\nand {more} more, with --json" if more > 0 else "")


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
    headers = ["lever", "saves", "memory", "costs", f"{images} {unit(advice.model)}"]
    return "From the wish to it, lever by lever:\n" + _tabulate(
        rows, headers, ("left", "right", "right", "right", "right")
    )


def _fall(fall: Fall) -> list[str]:
    return [
        _changes(fall.changes),
        format_bytes(fall.saved_bytes),
        format_bytes(fall.num_bytes),
        ("-" if fall.added_seconds < 0 else "+") + format_seconds(abs(fall.added_seconds)),
        format_seconds(fall.seconds),
    ]


def _front(advice: Advice) -> str:
    if len(advice.front) < 2:
        return ""
    rows = [
        [
            format_bytes(way.estimate.device_total_bytes),
            f"{way.images_per_second:,.0f}",
            _own(way, advice),
        ]
        for way in advice.front
    ]
    return "Less memory, less speed (each the fastest that needs so little):\n" + _tabulate(
        rows, ["memory", f"{unit(advice.model)}/s", "by"], ("right", "right", "left")
    )


def _bottleneck(advice: Advice) -> str:
    found = advice.bottleneck
    lines = time_lines(found.whose, found)
    if found.peak_share is not None and found.model_share is not None:
        more = found.peak_share - found.model_share
        again = f", and {more:.0%} on what is computed again" if more > 0.005 else ""
        lines.append(f"{found.model_share:.0%} of the card's peak FLOP/s go into the model{again}.")
    lines.append(_treatments(found, advice))
    return "\n".join(wrapped(line) for line in lines)


def _treatments(found: Bottleneck, advice: Advice) -> str:
    if not found.treatments:
        return "None of the levers looked at makes it faster still: the next step is a larger card."
    said = "; ".join(_treatment(t, advice) for t in found.treatments)
    return f"Faster still, and why not recommended: {said}."


def _treatment(treatment: Treatment, advice: Advice) -> str:
    why = "does not fit" if treatment.fits is False else f"changes {_effects(treatment.effects)}"
    rate = f"{treatment.images_per_second:,.0f} {unit(advice.model)}/s"
    return f"{_changes(treatment.changes)} ({rate}, {why})"


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
    per_second = f"{unit(advice.model)}/s"
    headers = ["larger card", "memory", "fits as\nit stands", f"then\n{per_second}",
               f"recommended\n{per_second}"]  # fmt: skip
    return "The same on larger cards:\n" + _tabulate(
        rows, headers, ("left", "right", "left", "right", "right")
    )


def _more_gpus(advice: Advice) -> str:
    """What other GPUs like it would give, a sentence each."""
    return "\n".join(wrapped(_more(more, advice)) for more in advice.more_gpus)


def _more(more: MoreGpus, advice: Advice) -> str:
    verb = "fits" if more.fits else "does not fit"
    batch = f"batch {more.batch_size} on each"
    text = (
        f"{more.gpus} GPUs ({more.parallelism} over {more.link}): {batch}, as it stands, {verb} "
        f"({format_bytes(more.device_total_bytes)} each)"
    )
    if not more.fits:
        return f"{text}."
    text += f"; {more.images_per_second:,.0f} {unit(advice.model)}/s of all"
    best = advice.recommended
    if best is not None:
        times = more.images_per_second / _all_rate(best)
        text += f", {times:.2f} times the recommended"
    if more.in_place_of:
        text += f", without {_changes(more.in_place_of)}"
    return f"{text}."


def _all_rate(way: Way) -> float:
    """Images per second of all devices."""
    return way.images_per_second * way.setting.world_size


def _levers(advice: Advice) -> str:
    lines = ["Levers:"]
    for lever in advice.levers:
        lines.append(wrapped(f"- {lever.name} ({lever.says}): {lever.state}", "  "))
        lines += [wrapped(f"  {reason}", "    ") for reason in lever.reasons]
    return "\n".join(lines)


def _changes(changes: Iterable[tuple[str, object]]) -> str:
    """`batch 32, accumulate 8, adamw-fused, expandable segments`."""
    return in_words(dict(changes)) or "as it stands"


def _effects(effects: Sequence[str]) -> str:
    return ", ".join(effects)


def _rate(way: Way, advice: Advice) -> str:
    each = f" on each of {way.setting.world_size} GPUs" if way.setting.world_size > 1 else ""
    return f"{way.images_per_second:,.0f} {unit(advice.model)}/s{each}"


def _step(way: Way) -> str:
    assert way.estimate.throughput is not None, "advice has rates"
    return f"{format_seconds(way.estimate.throughput.step_seconds)} a step"


def _tabulate(
    rows: list[list[str]], headers: Sequence[str], align: Sequence[str] | None = None
) -> str:
    from tabulate import tabulate

    colalign = align or ("right", "right", *["left"] * (len(headers) - 2))
    return tabulate(rows, headers, "simple", disable_numparse=True, colalign=colalign)


def draw_advice(advice: Advice, file: Path) -> None:
    """The front of memory against speed, and the waterfall. Raises PlannerError where the picture
    cannot be made."""
    figure = new_figure(13, 5.5)
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{advice.model.title} on {advice.gpu or 'the memory named'} (predicted)")
    points = sorted((w.estimate.device_total_bytes / GIB, w.images_per_second)
                    for w in advice.front)  # fmt: skip
    left.step([x for x, _ in points], [y for _, y in points], where="post", marker="o")
    left.axvline(advice.budget_bytes / GIB, color="black", linewidth=1, linestyle="--")
    left.set_xlabel("device total (GiB)")
    left.set_ylabel(f"{unit(advice.model)}/s")
    names = ["as it stands", *(_changes(fall.changes) for fall in advice.waterfall)]
    sizes = [advice.plain.estimate.device_total_bytes, *(f.num_bytes for f in advice.waterfall)]
    right.barh(names[::-1], [size / GIB for size in sizes[::-1]])
    right.axvline(advice.budget_bytes / GIB, color="black", linewidth=1, linestyle="--")
    right.set_xlabel("device total (GiB), lever by lever")
    save_figure(figure, file)
