"""What a search found: as a terminal says it, and as a page with the probes that prove it."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from planner.core.errors import PlannerError, alternatives, printable
from planner.core.schema import MeasurementRecord, SwinConfig
from planner.core.schema.record import Recommendation
from planner.core.units import GIB, format_bytes, format_rate, format_seconds
from planner.report.estimates import apart_fields, notes
from planner.report.page import contents as doc
from planner.report.page.plotting import (
    BLUE,
    GREEN,
    GREY,
    LIMIT,
    PURPLE,
    VERMILION,
    new_figure,
    plot_text,
)
from planner.report.text import describe_setting, in_words
from planner.trainers.emission import emit
from planner.trainers.registry import TARGETS, TRAINERS

Interval = tuple[float, float] | None
IntervalOf = Callable[[MeasurementRecord], Interval]
# What is said of these is on a first screen; the other notes are folded.
FIRST_NOTES = ("learning rate", "record that was not kept", "Other processes hold")
MAX_MESSAGE = 160  # characters in a table's cell; the file of records has all
_FAR = 1.6  # a budget so many times the largest probe is told, not drawn: the probes would be dots


@dataclass(frozen=True)
class Run:
    """A search of settings, left at `place`: what was recommended (None while it runs), and every
    probe in the order they ended. `best` is what it recommends, or else the best so far.
    `interval_of` is where a record's rate lies, `disturbed` are the ids of those that something
    slowed; `faults` say what could not be read, or does not belong together."""

    place: str
    found: Recommendation | None
    records: tuple[MeasurementRecord, ...]
    best: MeasurementRecord | None
    interval_of: IntervalOf
    faults: tuple[str, ...] = ()
    disturbed: frozenset[str] = frozenset()

    @property
    def budget_bytes(self) -> int | None:
        """What a setting may take by the search, as the newest probe was judged. None where no
        search asked."""
        asked = (r.allowed_bytes for r in (*cited(self.found), *reversed(self.records)))
        return next((n for n in asked if n is not None), None)

    @property
    def unit(self) -> str:
        """What a batch counts: images, unless all records are of another task."""
        said = {r.counts for r in self.records if r.images_per_second} or {
            r.counts for r in self.records
        }
        return said.pop() if len(said) == 1 else "images"

    def end_of(self, record: MeasurementRecord) -> str:
        """How a probe ended, in words: "measured", "out of memory" …"""
        if record.cut_short:
            return "cut short by the budget"
        if record.inconclusive and not record.lost_device:
            return "held up by others"
        used, budget = record.used_bytes, self.budget_bytes
        if record.status == "measured" and budget is not None and (used or 0) > budget:
            return "over the budget"
        return record.status.replace("_", " ")


def cited(found: Recommendation | None) -> tuple[MeasurementRecord, ...]:
    """The records that the recommendation itself holds, each once."""
    held = (found.evidence, *found.runners_up, found.baseline) if found else ()
    return tuple({repr(record): record for record in held if record is not None}.values())


def recommendation_answer(
    found: Recommendation, interval_of: IntervalOf, then: str = ""
) -> list[doc.Part]:
    """The setting with its evidence, the others beside it, and what to type next; folded, what else
    is to be known of the search."""
    fed = feeding_lines(found) if found.feeding else []
    ended = (
        f"{count(found.num_probes, 'probe')} of {found.num_candidates} settings; ended "
        f"because {found.stopped_because}.{_going_on(found)}"
    )
    table, close = _beside(found, interval_of)
    first = [note for note in found.notes if any(word in note for word in FIRST_NOTES)]
    rest = [note for note in found.notes if note not in first]
    if (record := found.evidence) is not None:
        steps = count(len(record.step_seconds), "step")
        rest.append(f"Measured {_date(record)}, {steps} timed (probe {record.probe_id[:8]}).")
    return [
        doc.Text("\n".join([*_recommended(found, interval_of), *fed])),
        *table,
        doc.Text("\n".join([*close, *first, ended])),
        *([doc.Text(then)] if then else []),
        *notes("notes", rest),
    ]


def feeding_lines(found: Recommendation) -> list[str]:
    """What the data cost: the loader by itself, and the emitted script's own thirty steps."""
    fed, step = found.feeding, found.evidence
    assert fed is not None, "asked for"
    data = fed.data
    alone = f"{format_rate(data.images_per_second)} images/s by itself, bound by its {data.bound}"
    lines = [f"Fed from {data.location} by {data.setting.title}: {alone}."]
    if fed.images_per_second is not None and fed.waited is not None:
        step_rate = step.images_per_second if step is not None else None
        share = f", {fed.images_per_second / step_rate:.0%} of the step alone" if step_rate else ""
        lines.append(
            f"  The emitted script trained {format_rate(fed.images_per_second)} images/s on them "
            f"({fed.steps} steps, measured){share}; waiting for data {fed.waited:.0%} of the time."
        )
    return [*lines, *(f"  {note}" for note in (*data.notes, *fed.notes))]


def _going_on(found: Recommendation) -> str:
    """Where nothing ran its advice says what would help."""
    if "the budget" in found.stopped_because and found.setting is not None:
        return " Give a longer --budget to go on."
    return " Run the same command to go on." if "interrupted" in found.stopped_because else ""


def _recommended(found: Recommendation, interval_of: IntervalOf) -> list[str]:
    record = found.evidence
    if record is None or found.setting is None:
        probes = count(found.num_probes, "probe")
        return [f"Nothing to recommend after {probes}: {found.stopped_because}.", found.advice]
    how = "memory measured, times predicted" if found.device.emulated else "measured"
    where = "the CPU: " if found.device.kind == "cpu" else ""
    gain = "no gain told" if found.baseline else "the plain default was not measured"
    if found.baseline is not None and found.gain is not None:
        gain = f"{found.gain:.2f} × the plain default"
    return [
        f"Recommended for {found.model.title} on {where}{found.device.title} ({how}):",
        f"  {rate_text(record, interval_of(record))}, {gain}, {memory_text(record)}",
        f"  {describe_setting(found.setting, found.model)}",
    ]


def rate_text(record: MeasurementRecord, interval: Interval) -> str:
    """`1,261 images/s (1,229 to 1,293)`; of several devices what all reach together, first."""
    text = f"{format_rate(record.images_per_second)} {record.counts}/s"
    if record.setting.world_size > 1:
        every = f"{format_rate(record.world_images_per_second)} {record.counts}/s"
        text = f"{every} of all {record.setting.world_size} devices; of each {text}"
    return f"{text} ({interval_text(interval)})" if interval else text


def interval_text(interval: Interval) -> str:
    return f"{format_rate(interval[0])} to {format_rate(interval[1])}" if interval else "-"


def memory_text(record: MeasurementRecord) -> str:
    return "memory unknown" if record.used_bytes is None else format_bytes(record.used_bytes)


def _beside(found: Recommendation, interval_of: IntervalOf) -> tuple[list[doc.Part], list[str]]:
    """The recommended, the others and the plain default, by what differs; and what is alike."""
    if found.evidence is None:
        return [], []
    baseline, records = found.baseline, [found.evidence, *found.runners_up]
    if baseline is not None and baseline not in records:
        records.append(baseline)
    apart = apart_fields([record.setting for record in records])
    rows: list[list[doc.Cell]] = [
        [
            str(rank),
            doc.rate_cell(rate),
            doc.seconds_cell(
                record.setting.batch_size * record.setting.accumulate / rate if rate else None
            ),
            doc.bytes_cell(record.used_bytes),
            in_words({field: getattr(record.setting, field) for field in apart})
            + (" (plain default)" if record == baseline else ""),
        ]
        for rank, record in enumerate(records, start=1)
        for rate in [record.images_per_second]
    ]
    headers = ("", f"{records[0].counts}/s", "step", "memory", "setting")
    table = doc.Table(headers, rows, marked=(0,), first=3).filled()
    return [table], _close(found, records, interval_of)


def _close(found: Recommendation, records: list[MeasurementRecord], of: IntervalOf) -> list[str]:
    """Which rows cannot be told from the recommended, the first."""
    said = "overlap: take the simplest, or measure again with a new --output."
    first, *spread = map(of, records)
    near = [n for n, own in enumerate(spread, 2) if own and first and own[1] >= first[0]]
    return [f"Rows {alternatives(map(str, [1, *near]), 'and')} {said}"] if near else []


def run_group(run: Run, key: str, title: str = "") -> doc.Group:
    """All sections of a run. `key` is unique on the page: charts and anchors begin with it."""
    faults: list[doc.Part] = [doc.Text(fault, "warning") for fault in run.faults]
    rest: list[doc.Section] = []
    if run.found is None:
        answer = doc.Section("answer", "Answer", [doc.Text(so_far(run), "lead"), *faults])
    else:
        answer, *rest = doc.sections_of(recommendation_answer(run.found, run.interval_of))
        answer = replace(answer, parts=[*_tiles(run), *answer.parts, *_launch(run), *faults])
    if not run.records:
        return doc.Group(key, title, [answer, *rest])
    probes: list[doc.Part] = [doc.Text(_ended(run)), _table(run)]
    return doc.Group(key, title, [
        answer, *_charts(run, key), *rest, doc.Section("probes", "Probes in order", probes),
        doc.Section("environment", "Environment", _environment(run)),
    ])  # fmt: skip


def so_far(run: Run) -> str:
    """The fastest of what was measured, where nothing is recommended (yet)."""
    probes = count(len(run.records), "probe")
    if run.best is None:
        return f"No recommendation yet: of {probes} none ran well."
    setting = describe_setting(run.best.setting, run.best.model)
    rate = rate_text(run.best, run.interval_of(run.best))
    return f"No recommendation yet. Best of {probes}: {setting}, {rate}, {memory_text(run.best)}."


def _tiles(run: Run) -> list[doc.Part]:
    record, budget = run.best, run.budget_bytes
    if record is None:
        return []
    of = ""
    if budget is not None:
        kept = 1 - budget / (record.device.memory_cap_bytes or record.device.total_bytes)
        of = f", of {format_bytes(budget)}: {kept:.0%} of the card is kept free"
    rate = format_rate(record.world_images_per_second)
    found = [(f"{run.unit}/s", rate), (f"memory{of}", memory_text(record))]
    if run.found is not None and run.found.gain is not None:
        found.append(("the plain default's rate", f"{run.found.gain:.2f} ×"))
    return [doc.Facts(found, "tiles")]


def _launch(run: Run) -> list[doc.Part]:
    """How to start with it: the file of the trainer that builds the probed library's own model,
    else the plain script."""
    found = run.found
    if found is None or found.setting is None:
        return []
    library = found.model.library if isinstance(found.model, SwinConfig) else None
    own = [t for t in TARGETS if library is not None and TRAINERS[t].library == library]
    for target in dict.fromkeys([*own, "pytorch"]):
        try:
            emitted = emit(found, target)
        except PlannerError:
            continue
        words = ["planner", "emit", run.place, "--for", target, "--output", emitted.filename]
        line = f"{shlex.join(words)}\n{emitted.launch}"
        others = ", ".join(other for other in TARGETS if other != target)
        return [doc.Copyable(line, f"Start training with {target} (or --for {others})")]
    return []


def _charts(run: Run, key: str) -> list[doc.Section]:
    """Memory against rate, the probes in order, and axis by axis."""
    numbers = {id(r): n for n, r in enumerate(run.records, start=1) if r.images_per_second}
    ran = [r for r in run.records if id(r) in numbers]
    within = [r for r in ran if run.end_of(r) == "measured"]
    over = [r for r in ran if run.end_of(r) != "measured"]

    def dots(x: Callable[[MeasurementRecord], object]) -> list[dict[str, Any]]:
        grey = [_dots("over the memory limit", GREY, over, x)] if over else []
        return [_dots("probe", BLUE, within, x), *grey]

    if not ran:
        return []
    unit, of_each = run.unit, f"{run.unit}/s of each probe that ran"
    charts: list[doc.Part] = []
    if any(r.used_bytes for r in ran):
        front = _dots("fastest for its memory", GREEN, _front(within), _gib)
        figure = new_figure([*dots(_gib), front], **_titles("memory, GiB", unit))
        said = f"Memory against {unit}/s: up is faster, left is smaller."
        said = f"{said} {_name_points(run, figure)}"
        charts.append(doc.Chart(f"{key}-front", figure, said))
    x = [numbers[id(r)] for r in within]
    look = {"name": "best so far", "line": {"color": VERMILION}}
    best = _line(x, [*accumulate(map(_rate, within), max)], **look)
    figure = new_figure([*dots(lambda r: numbers[id(r)]), best], **_titles("probe", unit))
    said = f"{of_each.capitalize()}, in order, and the best so far."
    charts.append(doc.Chart(f"{key}-order", figure, said))
    sections = [doc.Section("front", f"Memory against {unit}/s", charts)]
    parts: list[doc.Part] = []
    for n, axis in enumerate(apart_fields([r.setting for r in run.records]), start=1):
        name = "batch" if axis == "batch_size" else axis.replace("_", " ")
        if not (joined := _joined(ran, axis)):
            continue
        figure = new_figure(
            [*dots(partial(_value, axis=axis)), *joined], showlegend=False, **_titles(name, unit)
        )
        kind = "log" if axis == "batch_size" else None  # as plotly takes the values
        figure.update_xaxes(type=kind, categoryorder="category ascending")
        said = f"{name}: {of_each}. Lines join those that differ in {name} only; any other two "
        said += "differ in more." + " Grey: over the memory limit." * bool(over)
        parts.append(doc.Chart(f"{key}-axes-{n}", figure, said, 300))
    return [*sections, *([doc.Section("axes", "Axis by axis", parts)] if parts else [])]


def _titles(x: str, unit: str) -> dict[str, Any]:
    """Of both axes, as a figure's layout."""
    titles = {"xaxis": x, "yaxis": f"{unit}/s"}
    return {axis: {"title": {"text": plot_text(text)}} for axis, text in titles.items()}


def _rate(record: MeasurementRecord) -> float:
    return record.images_per_second or 0.0


def _gib(record: MeasurementRecord) -> float | None:
    return record.used_bytes and record.used_bytes / GIB


def _value(record: MeasurementRecord, axis: str) -> int | str:
    value = getattr(record.setting, axis)
    return value if type(value) is int else plot_text(str(value))


def _dots(
    name: str, colour: str, records: Sequence[MeasurementRecord],
    x: Callable[[MeasurementRecord], object],
) -> dict[str, Any]:  # fmt: skip
    """Records by their rates, as a trace."""
    hover = [plot_text(describe_setting(r.setting, r.model)) for r in records]
    return {
        "type": "scatter", "mode": "markers", "name": name, "marker": {"color": colour, "size": 9},
        "x": [*map(x, records)], "y": [*map(_rate, records)], "hovertext": hover,
    }  # fmt: skip


def _line(x: Sequence[object], y: Sequence[float], **look: Any) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "line": {"color": GREY}, "x": x, "y": y, **look}


def _front(records: Sequence[MeasurementRecord]) -> list[MeasurementRecord]:
    """Than which nothing else is both faster and smaller."""
    found: list[MeasurementRecord] = []
    for r in sorted(records, key=lambda r: (r.used_bytes or 0, -_rate(r))):
        if r.used_bytes and (not found or _rate(r) > _rate(found[-1])):
            found.append(r)
    return found


def _joined(records: Sequence[MeasurementRecord], axis: str) -> list[dict[str, Any]]:
    """Lines between probes that differ in `axis` only."""
    alike: defaultdict[object, dict[int | str, float]] = defaultdict(dict)
    for r in records:
        alike[r.setting.model_copy(update={axis: None})][_value(r, axis)] = _rate(r)
    lines = [sorted(rates.items(), key=lambda at: f"{at[0]!s:>9}") for rates in alike.values()]
    return [_line(*map(list, zip(*line, strict=True))) for line in lines if len(line) > 1]


def _name_points(run: Run, figure: Any) -> str:
    """The recommended and the plain default by their shapes, and the budget; what is said of it."""
    plain = run.found.baseline if run.found is not None else None
    best = "recommended" if run.found is not None else "best so far"
    for record, name, symbol, colour in (
        (plain, "plain default", "square-x-open", PURPLE), (run.best, best, "star", VERMILION)
    ):  # fmt: skip
        if record is not None and record.used_bytes is not None:
            said = f"{name}: {describe_setting(record.setting, record.model)}"
            figure.add_scatter(
                name=name, x=[record.used_bytes / GIB], y=[record.images_per_second],
                mode="markers", marker={"symbol": symbol, "size": 18, "color": colour},
                hovertext=[plot_text(said)], hoverinfo="text",
            )  # fmt: skip
    if run.budget_bytes is None:
        return ""
    is_far = run.budget_bytes > _FAR * max(r.used_bytes or 0 for r in run.records)
    if not is_far:
        line = {"color": LIMIT, "dash": "dash"}
        figure.add_vline(run.budget_bytes / GIB, line=line, annotation_text="limit")
    return f"The memory limit is {format_bytes(run.budget_bytes)}{', far to the right' * is_far}."


def _ended(run: Run) -> str:
    """How many probes, how they ended, and in what time."""
    ends = Counter(end for r in run.records if (end := run.end_of(r)) != "measured")
    failed = "".join(f", {number} {end}" for end, number in ends.items())
    spent = format_seconds(sum(record.probe_seconds for record in run.records))
    compiling = sum(record.compile_seconds or 0.0 for record in run.records)
    dates = sorted(_date(record) for record in run.records)  # ISO 8601 sorts as text
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    of_it = f", {format_seconds(compiling)} of it compiling" if compiling else ""
    ran = len(run.records) - ends.total()
    return (
        f"{count(len(run.records), 'probe')}: {ran} ran{failed}. Together they took {spent} "
        f"({when} UTC){of_it}."
    )


def _table(run: Run) -> doc.Table:
    headers = ["probe", f"{run.unit}/s (95% range)", f"expected {run.unit}/s", "memory", "expected",
               "setting", "ended", "took (compiling)"]  # fmt: skip
    rows: list[list[doc.Cell]] = [
        [
            doc.count_cell(number),
            _rate_cell(record.images_per_second, run.interval_of(record)),
            _rate_cell(rate and rate[1], rate and rate[::2]),
            doc.bytes_cell(record.used_bytes),
            doc.bytes_cell(used and int(used[1])),
            describe_setting(record.setting, record.model),
            "; ".join([_ended_text(run, record), *map(short, record.flags)]),
            doc.Number(record.probe_seconds, _took(record)),
        ]
        for number, record in enumerate(run.records, start=1)
        for e in [record.expected]
        for rate, used in [(e.images_per_second, e.used_bytes) if e else (None, None)]
    ]
    wanted = run.found.setting if run.found is not None else None
    marked = [n for n, record in enumerate(run.records) if record.setting == wanted]
    said = "Every probe. Those of the recommended setting are set apart."
    return doc.Table(headers, rows, said if marked else "Every probe.", marked).filled()


def _ended_text(run: Run, record: MeasurementRecord) -> str:
    """How a probe ended, where, and why: `out of memory in backward: …`."""
    end = run.end_of(record)
    where = f" in {short(record.phase, 40)}" if end != "measured" and record.phase else ""
    why = f": {short(record.message)}" if record.message else ""
    return f"{end}{where}{why}"


def _took(record: MeasurementRecord) -> str:
    """`1 min 12 s (58.5 s)`, of it compiling."""
    took, compiling = map(format_seconds, (record.probe_seconds, record.compile_seconds or 0.0))
    return f"{took} ({compiling})" if record.compile_seconds else took


def _rate_cell(rate: float | None, within: Interval) -> doc.Number:
    """`5,804 (5,764 to 5,841)`"""
    return doc.Number(rate, format_rate(rate) + (f" ({interval_text(within)})" if within else ""))


def _environment(run: Run) -> list[doc.Part]:
    """Where the newest probe ran, what disturbed some, and the options of the search."""
    record = run.records[-1]
    device, world = run.found.device if run.found else record.device, record.world
    memory = format_bytes(device.total_bytes)
    if device.memory_cap_bytes is not None:
        memory += f", capped at {format_bytes(device.memory_cap_bytes)}: a smaller one is emulated"
    facts = [("Device", device.title), ("Memory", memory), ("Driver", device.driver or "-")]
    if world is not None and world.world_size > 1:
        over = "; ".join([world.backend, *world.links])
        facts.append(("Ranks", f"{world.world_size} on {world.nodes} machines over {over}"))
    facts.append(("Software", ", ".join(f"{n} {v}" for n, v in sorted(record.versions.items()))))
    kinds = Counter(
        short(flag.partition(":")[0], 60)
        for r in run.records if r.probe_id in run.disturbed for flag in r.flags
    )  # fmt: skip
    said = ", ".join(f"{flag} ({number})" for flag, number in kinds.most_common(5))
    facts.append(("Disturbed by", said or "nothing, as far as was read"))
    if run.found is not None and run.found.asked is not None:
        asked = ", ".join(f"{name}={value!r}" for name, value in run.found.asked.items())
        facts.append(("Asked", asked or "no option"))
    return [doc.Facts(facts)]


def _date(record: MeasurementRecord) -> str:
    """`2026-11-20 19:36`, of a date in ISO 8601."""
    return record.date[:16].replace("T", " ")


def short(message: str, length: int = MAX_MESSAGE) -> str:
    """A message as one line, no longer than a table bears."""
    line = " ".join(printable(message[: 4 * length]).split())
    return line if len(line) <= length else f"{line[:length]}…"


def count(number: int, one: str) -> str:
    """`1 probe`, `12 probes`."""
    return f"{number:,} {one}{'s' * (number != 1)}"
