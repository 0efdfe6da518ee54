"""The result of a search, for a terminal (`recommendation_answer`) and for a page (`run_group`).

The page also shows each probe: in charts of rate and memory, and in a table.
"""

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
from planner.report.estimates import differing_fields, folded_notes
from planner.report.page import contents as doc
from planner.report.page import plotting
from planner.report.page.plotting import new_figure, plot_text
from planner.report.text import describe_fields, describe_setting
from planner.trainers.emission import emit
from planner.trainers.registry import TARGETS, TRAINERS

Interval = tuple[float, float] | None
RateInterval = Callable[[MeasurementRecord], Interval]
# A note that contains one of these is on the first screen; the other notes are folded.
FIRST_NOTES = ("learning rate", "record that was not kept", "Other processes hold")
MAX_MESSAGE = 160  # characters in a table's cell; the file of records has the whole message
# A memory limit of more than 1.6 times the largest probe is written, not drawn: it would squeeze
# the probes into a corner.
_FAR = 1.6


@dataclass(frozen=True)
class SearchRun:
    """A search of settings that is kept at `place`: its `result` (None while it runs), and every
    probe in the order in which they ended. `best` is the recommended probe, or else the best so
    far. `rate_interval` gives the 95% interval of a record's rate. `disturbed` holds the ids of the
    probes that something slowed, and `faults` say what could not be read or does not belong
    together."""

    place: str
    result: Recommendation | None
    records: tuple[MeasurementRecord, ...]
    best: MeasurementRecord | None
    rate_interval: RateInterval
    faults: tuple[str, ...] = ()
    disturbed: frozenset[str] = frozenset()

    @property
    def budget_bytes(self) -> int | None:
        """The memory that the search allows a setting, by the newest probe. None where no search
        set a limit."""
        limits = (r.allowed_bytes for r in (*cited_records(self.result), *reversed(self.records)))
        return next((n for n in limits if n is not None), None)

    @property
    def unit(self) -> str:
        """What a batch counts: images, unless all records are of another task."""
        ran = [r for r in self.records if r.images_per_second]
        units = {r.counts for r in ran or self.records}
        return units.pop() if len(units) == 1 else "images"

    def ending_of(self, record: MeasurementRecord) -> str:
        """The way in which a probe ended, in words: "measured", "out of memory" …"""
        if record.cut_short:
            return "cut short by the budget"
        if record.inconclusive and not record.lost_device:
            return "held up by others"
        used, budget = record.used_bytes or 0, self.budget_bytes
        if record.status == "measured" and budget is not None and used > budget:
            return "over the budget"
        return record.status.replace("_", " ")


def cited_records(result: Recommendation | None) -> tuple[MeasurementRecord, ...]:
    """The records that a result itself holds, each once."""
    records = (result.evidence, *result.runners_up, result.baseline) if result else ()
    return tuple({repr(record): record for record in records if record is not None}.values())


def recommendation_answer(
    result: Recommendation, rate_interval: RateInterval, next_step: str = ""
) -> list[doc.Part]:
    """The recommended setting with its evidence, the runners-up, and what to type next; folded, the
    other notes on the search."""
    feeding_text = feeding_lines(result) if result.feeding else []
    probes_text = (
        f"{count_text(result.num_probes, 'probe')} of {result.num_candidates} settings; ended "
        f"because {result.stopped_because}.{_continue_hint(result)}"
    )
    comparison, overlaps = _compare_probes(result, rate_interval)
    first = [note for note in result.notes if any(word in note for word in FIRST_NOTES)]
    folded = [note for note in result.notes if note not in first]
    if (record := result.evidence) is not None:
        steps = count_text(len(record.step_seconds), "step")
        folded.append(f"Measured {_date(record)}, {steps} timed (probe {record.probe_id[:8]}).")
    return [
        doc.Text("\n".join([*_recommendation_lines(result, rate_interval), *feeding_text])),
        *comparison,
        doc.Text("\n".join([*overlaps, *first, probes_text])),
        *([doc.Text(next_step)] if next_step else []),
        *folded_notes("notes", folded),
    ]


def feeding_lines(result: Recommendation) -> list[str]:
    """What the data cost: the rate of the loader by itself, and of the emitted script's own thirty
    steps."""
    feeding, step = result.feeding, result.evidence
    assert feeding is not None, "asked for"
    data, fed_rate = feeding.data, feeding.images_per_second
    alone = f"{format_rate(data.images_per_second)} images/s by itself, bound by its {data.bound}"
    lines = [f"Fed from {data.location} by {data.setting.title}: {alone}."]
    if fed_rate is not None and feeding.waited is not None:
        step_rate = step.images_per_second if step is not None else None
        share = f", {fed_rate / step_rate:.0%} of the step alone" if step_rate else ""
        lines.append(
            f"  The emitted script trained {format_rate(fed_rate)} images/s on them "
            f"({feeding.steps} steps, measured){share}; waiting for data {feeding.waited:.0%} of "
            "the time."
        )
    return [*lines, *(f"  {note}" for note in (*data.notes, *feeding.notes))]


def _continue_hint(result: Recommendation) -> str:
    """How to continue a search that stopped early. Where nothing ran, `result.advice` says what
    would help instead."""
    if "the budget" in result.stopped_because and result.setting is not None:
        return " Give a longer --budget to go on."
    return " Run the same command to go on." if "interrupted" in result.stopped_because else ""


def _recommendation_lines(result: Recommendation, rate_interval: RateInterval) -> list[str]:
    record = result.evidence
    if record is None or result.setting is None:
        probes = count_text(result.num_probes, "probe")
        return [f"Nothing to recommend after {probes}: {result.stopped_because}.", result.advice]
    basis = "memory measured, times predicted" if result.device.emulated else "measured"
    place = "the CPU: " if result.device.kind == "cpu" else ""
    gain = "no gain known" if result.baseline else "the plain default was not measured"
    if result.baseline is not None and result.gain is not None:
        gain = f"{result.gain:.2f} × the plain default"
    return [
        f"Recommended for {result.model.title} on {place}{result.device.title} ({basis}):",
        f"  {measured_rate_text(record, rate_interval(record))}, {gain}, {memory_text(record)}",
        f"  {describe_setting(result.setting, result.model)}",
    ]


def measured_rate_text(record: MeasurementRecord, interval: Interval) -> str:
    """`1,261 images/s (1,229 to 1,293)`; for several devices the rate of all comes first."""
    text = f"{format_rate(record.images_per_second)} {record.counts}/s"
    if record.setting.world_size > 1:
        total = f"{format_rate(record.world_images_per_second)} {record.counts}/s"
        text = f"{total} of all {record.setting.world_size} devices; of each {text}"
    return f"{text} ({interval_text(interval)})" if interval else text


def interval_text(interval: Interval) -> str:
    return f"{format_rate(interval[0])} to {format_rate(interval[1])}" if interval else "-"


def memory_text(record: MeasurementRecord) -> str:
    return "memory unknown" if record.used_bytes is None else format_bytes(record.used_bytes)


def _compare_probes(
    result: Recommendation, rate_interval: RateInterval
) -> tuple[list[doc.Part], list[str]]:
    """A table of the recommended setting, the runners-up and the plain default, by the fields that
    differ; and a line that names the rows whose rates overlap that of the first."""
    if result.evidence is None:
        return [], []
    baseline, records = result.baseline, [result.evidence, *result.runners_up]
    if baseline is not None and baseline not in records:
        records.append(baseline)
    fields = differing_fields([record.setting for record in records])
    rows: list[list[doc.Cell]] = [
        [
            str(rank),
            doc.rate_cell(rate),
            doc.seconds_cell(record.setting.images_per_device_step / rate if rate else None),
            doc.bytes_cell(record.used_bytes),
            describe_fields({field: getattr(record.setting, field) for field in fields})
            + (" (plain default)" if record == baseline else ""),
        ]
        for rank, record in enumerate(records, start=1)
        for rate in [record.images_per_second]
    ]
    headers = ("", f"{records[0].counts}/s", "step", "memory", "setting")
    table = doc.Table(headers, rows, marked=(0,), first=3).compact()
    best, *others = map(rate_interval, records)
    overlapping = [n for n, other in enumerate(others, 2) if other and best and other[1] >= best[0]]
    if not overlapping:
        return [table], []
    numbers = alternatives(map(str, [1, *overlapping]), "and")
    return [table], [
        f"Rows {numbers} overlap: take the simplest, or measure again with a new --output."
    ]


def run_group(run: SearchRun, key: str, title: str = "") -> doc.Group:
    """All sections of a run. `key` is unique on the page: its charts and anchors begin with it."""
    faults: list[doc.Part] = [doc.Text(fault, "warning") for fault in run.faults]
    folded: list[doc.Section] = []
    if run.result is None:
        answer = doc.Section("answer", "Answer", [doc.Text(progress_text(run), "lead"), *faults])
    else:
        answer, *folded = doc.make_sections(recommendation_answer(run.result, run.rate_interval))
        parts = [*_tile_facts(run), *answer.parts, *_launch_command(run), *faults]
        answer = replace(answer, parts=parts)
    if not run.records:
        return doc.Group(key, title, [answer, *folded])
    probes: list[doc.Part] = [doc.Text(_probes_summary(run)), _probe_table(run)]
    return doc.Group(key, title, [
        answer, *_chart_sections(run, key), *folded,
        doc.Section("probes", "Probes in order", probes),
        doc.Section("environment", "Environment", _environment_facts(run)),
    ])  # fmt: skip


def progress_text(run: SearchRun) -> str:
    """The fastest probe of a run that recommends nothing (yet)."""
    probes = count_text(len(run.records), "probe")
    if run.best is None:
        return f"No recommendation yet: of {probes} none ran well."
    setting = describe_setting(run.best.setting, run.best.model)
    rate = measured_rate_text(run.best, run.rate_interval(run.best))
    return f"No recommendation yet. Best of {probes}: {setting}, {rate}, {memory_text(run.best)}."


def _tile_facts(run: SearchRun) -> list[doc.Part]:
    record, budget = run.best, run.budget_bytes
    if record is None:
        return []
    limit = ""
    if budget is not None:
        free_share = 1 - budget / (record.device.memory_cap_bytes or record.device.total_bytes)
        limit = f", of {format_bytes(budget)}: {free_share:.0%} of the card is kept free"
    rate = format_rate(record.world_images_per_second)
    tiles = [(f"{run.unit}/s", rate), (f"memory{limit}", memory_text(record))]
    if run.result is not None and run.result.gain is not None:
        tiles.append(("the plain default's rate", f"{run.result.gain:.2f} ×"))
    return [doc.Facts(tiles, "tiles")]


def _launch_command(run: SearchRun) -> list[doc.Part]:
    """The commands that start a training with the recommended setting: by the trainer that builds
    the probed library's own model, or else by the plain script."""
    result = run.result
    if result is None or result.setting is None:
        return []
    library = result.model.library if isinstance(result.model, SwinConfig) else None
    same_library = [t for t in TARGETS if library is not None and TRAINERS[t].library == library]
    for target in dict.fromkeys([*same_library, "pytorch"]):
        try:
            emitted = emit(result, target)
        except PlannerError:
            continue
        command = ["planner", "emit", run.place, "--for", target, "--output", emitted.filename]
        text = f"{shlex.join(command)}\n{emitted.launch}"
        others = ", ".join(other for other in TARGETS if other != target)
        return [doc.Copyable(text, f"Start training with {target} (or --for {others})")]
    return []


def _chart_sections(run: SearchRun, key: str) -> list[doc.Section]:
    """Charts of memory against rate, of the probes in order, and of one axis after another."""
    numbers = {id(r): n for n, r in enumerate(run.records, start=1) if r.images_per_second}
    ran = [r for r in run.records if id(r) in numbers]
    allowed = [r for r in ran if run.ending_of(r) == "measured"]
    oversized = [r for r in ran if run.ending_of(r) != "measured"]

    def dots(x_value: Callable[[MeasurementRecord], object]) -> list[dict[str, Any]]:
        blue = _dots_trace("probe", plotting.BLUE, allowed, x_value)
        grey = [_dots_trace("over the memory limit", plotting.GREY, oversized, x_value)]
        return [blue, *grey] if oversized else [blue]

    if not ran:
        return []
    unit, rates = run.unit, f"{run.unit}/s of each probe that ran"
    charts: list[doc.Part] = []
    if any(r.used_bytes for r in ran):
        front = _dots_trace("fastest for its memory", plotting.GREEN, _pareto_front(allowed), _gib)
        figure = new_figure([*dots(_gib), front], **_axis_titles("memory, GiB", unit))
        caption = f"Memory against {unit}/s: up is faster, left is smaller."
        caption = f"{caption} {_mark_points(run, figure)}"
        charts.append(doc.Chart(f"{key}-front", figure, caption))
    rising = zip(allowed, accumulate(map(_rate, allowed), max), strict=True)
    points = [(numbers[id(r)], rate) for r, rate in rising]
    best = _line_trace(points, plotting.VERMILION, "best so far")
    figure = new_figure([*dots(lambda r: numbers[id(r)]), best], **_axis_titles("probe", unit))
    caption = f"{rates.capitalize()}, in order, and the best so far."
    charts.append(doc.Chart(f"{key}-order", figure, caption))
    sections = [doc.Section("front", f"Memory against {unit}/s", charts)]
    parts: list[doc.Part] = []
    for n, axis in enumerate(differing_fields([r.setting for r in run.records]), start=1):
        name = "batch" if axis == "batch_size" else axis.replace("_", " ")
        if not (lines := _lines_along(ran, axis)):
            continue
        traces = [*dots(partial(_value, axis=axis)), *lines]
        figure = new_figure(traces, showlegend=False, **_axis_titles(name, unit))
        kind = "log" if axis == "batch_size" else None  # None: plotly chooses by the values
        figure.update_xaxes(type=kind, categoryorder="category ascending")
        caption = f"{name}: {rates}. Lines join those that differ in {name} only; any other two "
        caption += "differ in more." + " Grey: over the memory limit." * bool(oversized)
        parts.append(doc.Chart(f"{key}-axes-{n}", figure, caption, 300))
    return [*sections, *([doc.Section("axes", "Axis by axis", parts)] if parts else [])]


def _axis_titles(x: str, unit: str) -> dict[str, Any]:
    """The titles of both axes, as a figure's layout."""
    titles = {"xaxis": x, "yaxis": f"{unit}/s"}
    return {axis: {"title": {"text": plot_text(text)}} for axis, text in titles.items()}


def _rate(record: MeasurementRecord) -> float:
    return record.images_per_second or 0.0


def _gib(record: MeasurementRecord) -> float | None:
    return record.used_bytes and record.used_bytes / GIB


def _value(record: MeasurementRecord, axis: str) -> int | str:
    value = getattr(record.setting, axis)
    return value if type(value) is int else plot_text(str(value))


def _dots_trace(
    name: str, colour: str, records: Sequence[MeasurementRecord],
    x_value: Callable[[MeasurementRecord], object],
) -> dict[str, Any]:  # fmt: skip
    """A dot for each record: its `x_value`, and its rate."""
    hover = [plot_text(describe_setting(r.setting, r.model)) for r in records]
    return {
        "type": "scatter", "mode": "markers", "name": name, "marker": {"color": colour, "size": 9},
        "x": [*map(x_value, records)], "y": [*map(_rate, records)], "hovertext": hover,
    }  # fmt: skip


def _line_trace(
    points: Sequence[tuple[object, float]], colour: str = plotting.GREY, name: str | None = None
) -> dict[str, Any]:
    x, y = zip(*points, strict=True)
    line = {"color": colour}
    return {"type": "scatter", "mode": "lines", "line": line, "x": x, "y": y, "name": name}


def _pareto_front(records: Sequence[MeasurementRecord]) -> list[MeasurementRecord]:
    """The records that no other record beats in both rate and memory, the smallest first."""
    front: list[MeasurementRecord] = []
    for r in sorted(records, key=lambda r: (r.used_bytes or 0, -_rate(r))):
        if r.used_bytes and (not front or _rate(r) > _rate(front[-1])):
            front.append(r)
    return front


def _lines_along(records: Sequence[MeasurementRecord], axis: str) -> list[dict[str, Any]]:
    """Lines that join the probes that differ in `axis` only."""
    rates: defaultdict[object, dict[int | str, float]] = defaultdict(dict)
    for r in records:
        rates[r.setting.model_copy(update={axis: None})][_value(r, axis)] = _rate(r)
    lines = [sorted(line.items(), key=lambda item: f"{item[0]!s:>9}") for line in rates.values()]
    return [_line_trace(line) for line in lines if len(line) > 1]


def _mark_points(run: SearchRun, figure: Any) -> str:
    """Mark the recommended probe and the plain default in `figure`, and draw the memory limit.
    Returns the sentence that names the limit."""
    plain = run.result.baseline if run.result is not None else None
    title = "recommended" if run.result is not None else "best so far"
    for record, name, symbol, colour in (
        (plain, "plain default", "square-x-open", plotting.PURPLE),
        (run.best, title, "star", plotting.VERMILION),
    ):  # fmt: skip
        if record is not None and record.used_bytes is not None:
            hover = f"{name}: {describe_setting(record.setting, record.model)}"
            figure.add_scatter(
                name=name, x=[record.used_bytes / GIB], y=[record.images_per_second],
                mode="markers", marker={"symbol": symbol, "size": 18, "color": colour},
                hovertext=[plot_text(hover)], hoverinfo="text",
            )  # fmt: skip
    if run.budget_bytes is None:
        return ""
    is_far = run.budget_bytes > _FAR * max(r.used_bytes or 0 for r in run.records)
    if not is_far:
        line = {"color": plotting.LIMIT, "dash": "dash"}
        figure.add_vline(run.budget_bytes / GIB, line=line, annotation_text="limit")
    return f"The memory limit is {format_bytes(run.budget_bytes)}{', far to the right' * is_far}."


def _probes_summary(run: SearchRun) -> str:
    """How many probes there are, how they ended, and how long they took."""
    endings = Counter(end for r in run.records if (end := run.ending_of(r)) != "measured")
    failures = "".join(f", {number} {end}" for end, number in endings.items())
    total = format_seconds(sum(record.probe_seconds for record in run.records))
    compiling = sum(record.compile_seconds or 0.0 for record in run.records)
    dates = sorted(_date(record) for record in run.records)  # ISO 8601 sorts as text
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    share = f", {format_seconds(compiling)} of it compiling" if compiling else ""
    ran = len(run.records) - endings.total()
    return (
        f"{count_text(len(run.records), 'probe')}: {ran} ran{failures}. Together they took {total} "
        f"({when} UTC){share}."
    )


def _probe_table(run: SearchRun) -> doc.Table:
    headers = ["probe", f"{run.unit}/s (95% range)", f"expected {run.unit}/s", "memory", "expected",
               "setting", "ended", "took (compiling)"]  # fmt: skip
    rows: list[list[doc.Cell]] = [
        [
            doc.count_cell(number),
            _rate_cell(record.images_per_second, run.rate_interval(record)),
            _rate_cell(rate and rate[1], rate and rate[::2]),
            doc.bytes_cell(record.used_bytes),
            doc.bytes_cell(used and int(used[1])),
            describe_setting(record.setting, record.model),
            "; ".join([_ending_text(run, record), *map(cell_text, record.flags)]),
            doc.Number(record.probe_seconds, _duration_text(record)),
        ]
        for number, record in enumerate(run.records, start=1)
        for e in [record.expected]
        for rate, used in [(e.images_per_second, e.used_bytes) if e else (None, None)]
    ]
    recommended = run.result.setting if run.result is not None else None
    marked = [n for n, record in enumerate(run.records) if record.setting == recommended]
    caption = "Every probe. Those of the recommended setting are set apart."
    return doc.Table(headers, rows, caption if marked else "Every probe.", marked).compact()


def _ending_text(run: SearchRun, record: MeasurementRecord) -> str:
    """How, where and why a probe ended: `out of memory in backward: …`."""
    ending = run.ending_of(record)
    phase = f" in {cell_text(record.phase, 40)}" if ending != "measured" and record.phase else ""
    reason = f": {cell_text(record.message)}" if record.message else ""
    return f"{ending}{phase}{reason}"


def _duration_text(record: MeasurementRecord) -> str:
    """`1 min 12 s (58.5 s)`: the probe's seconds, and those of compiling among them."""
    duration, compiling = map(format_seconds, (record.probe_seconds, record.compile_seconds or 0.0))
    return f"{duration} ({compiling})" if record.compile_seconds else duration


def _rate_cell(rate: float | None, interval: Interval) -> doc.Number:
    """`5,804 (5,764 to 5,841)`"""
    text = f" ({interval_text(interval)})" if interval else ""
    return doc.Number(rate, format_rate(rate) + text)


def _environment_facts(run: SearchRun) -> list[doc.Part]:
    """Where the newest probe ran, what disturbed any probe, and the options of the search."""
    record = run.records[-1]
    device, world = run.result.device if run.result else record.device, record.world
    memory = format_bytes(device.total_bytes)
    if device.memory_cap_bytes is not None:
        memory += f", capped at {format_bytes(device.memory_cap_bytes)}: a smaller one is emulated"
    facts = [("Device", device.title), ("Memory", memory), ("Driver", device.driver or "-")]
    if world is not None and world.world_size > 1:
        ranks = f"{world.world_size} on {world.nodes} machines over {world.backend}"
        facts.append(("Ranks", ranks))
    facts.append(("Software", ", ".join(f"{n} {v}" for n, v in sorted(record.versions.items()))))
    kinds = Counter(
        cell_text(flag.partition(":")[0], 60)
        for r in run.records if r.probe_id in run.disturbed for flag in r.flags
    )  # fmt: skip
    disturbances = ", ".join(f"{flag} ({number})" for flag, number in kinds.most_common(5))
    facts.append(("Disturbed by", disturbances or "nothing, as far as was read"))
    if run.result is not None and run.result.asked is not None:
        options = ", ".join(f"{name}={value!r}" for name, value in run.result.asked.items())
        facts.append(("Asked", options or "no option"))
    return [doc.Facts(facts)]


def _date(record: MeasurementRecord) -> str:
    """`2026-11-20 19:36`, from a date in ISO 8601."""
    return record.date[:16].replace("T", " ")


def cell_text(message: str, length: int = MAX_MESSAGE) -> str:
    """A message as one line of at most `length` characters."""
    line = " ".join(printable(message[: 4 * length]).split())
    return line if len(line) <= length else f"{line[:length]}…"


def count_text(number: int, noun: str) -> str:
    """`1 probe`, `12 probes`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
