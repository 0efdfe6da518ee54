"""The page's first sections of a search: what to train with, and why that."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from planner.core.schema import MeasurementRecord
from planner.core.schema.result import Recommendation
from planner.core.units import format_bytes, format_rate
from planner.report.page.contents import Copyable, Facts, Folded, Number, Part, Section, Table, Text
from planner.report.settings import describe_setting
from search.loop.contenders import Contender, choose
from search.report.run import Run
from search.report.trainers import first_choice
from search.report.wording import (
    bytes_cell,
    bytes_text,
    count,
    date_text,
    images_of,
    interval_of,
    interval_text,
    rate_cell,
    seconds_cell,
    seconds_text,
    within_text,
)


def answer(run: Run) -> list[Section]:
    """The recommendation in one sentence, and how to start with it; what there is of one while a
    search goes on, and why there is none."""
    if run.found is None:
        parts = _best_so_far(run)
    elif run.found.setting is None:
        parts = _nothing(run.found)
    else:
        parts = _recommended(run, run.found)
    return [Section("answer", "Answer", [*parts, *faults_of(run)])]


def faults_of(run: Run) -> list[Part]:
    """What could not be read, as warnings."""
    return [Text(fault, "warning") for fault in run.faults]


def _recommended(run: Run, found: Recommendation) -> list[Part]:
    assert found.evidence is not None, "a recommended setting was measured"
    return [Text(sentence(run, found), "lead"), *_launch(run, found), Facts(_facts(run, found))]


def sentence(run: Run, found: Recommendation) -> str:
    """The recommendation in one sentence: setting, rate, memory of the budget, gain."""
    evidence, setting = found.evidence, found.setting
    assert evidence is not None, "asked for"
    assert setting is not None, "asked for"
    gain = ""
    if found.gain is not None and found.baseline is not None:
        base = format_rate(found.baseline.images_per_second)
        gain = f", {found.gain:.2f} × the plain default's {base}"
    return (
        f"Train {found.model.title} with {describe_setting(setting, found.model)}: "
        f"{_rate(run, evidence)} on {found.device.title}{gain}, in "
        f"{_memory(run, evidence.used_bytes)}."
    )


def _rate(run: Run, record: MeasurementRecord) -> str:
    each = "" if record.world is None or record.world.world_size == 1 else " of each device"
    return f"{format_rate(record.images_per_second)} {run.unit}/s{each}{within_text(record)}"


def _memory(run: Run, used: int | None) -> str:
    if used is None:
        return "memory that is not known"
    allowed = run.budget_bytes
    if allowed is None:
        return format_bytes(used)
    return f"{format_bytes(used)} of the {format_bytes(allowed)} allowed"


def _launch(run: Run, found: Recommendation) -> list[Part]:
    """How to start with it: the trainer's file written, and its launch line."""
    chosen = first_choice(found)
    if chosen is None:
        return []
    place = run.folder / run.name if run.name.endswith(".json") else run.folder
    write = shlex.join(
        ["planner", "emit", str(place), "--for", chosen.target, "--output", chosen.filename]
    )
    return [Copyable(f"{write}\n{chosen.launch}", f"Start training ({chosen.target})")]


def _facts(run: Run, found: Recommendation) -> list[tuple[str, str]]:
    evidence = found.evidence
    assert evidence is not None, "asked for"
    rate = evidence.images_per_second or 0.0
    probe = f"{run.proof(evidence)} of {date_text(evidence.date)}"
    base = found.baseline
    plain = "not measured, so no gain is reported"
    if base is not None:
        rate_of_it = f"{format_rate(base.images_per_second)} {run.unit}/s"
        title = describe_setting(base.setting, base.model)
        plain = f"{title}: {rate_of_it}, {bytes_text(base.used_bytes)}"
    facts = [
        ("Proof", f"{probe}, {count(len(evidence.step_seconds), 'step')} timed"),
        ("Step", seconds_text(images_of(evidence) / rate if rate else None)),
        *(
            [("Compiling", seconds_text(evidence.compile_seconds))]
            if evidence.compile_seconds
            else []
        ),
        ("Plain default", plain),
    ]
    facts += _all_devices(run, evidence)
    ended = (
        f"{count(found.num_probes, 'probe')} of {found.num_candidates:,} settings; it ended "
        f"because {found.stopped_because}"
    )
    return [*facts, ("Search", ended)]


def _all_devices(run: Run, record: MeasurementRecord) -> list[tuple[str, str]]:
    if record.world is None or record.world.world_size == 1:
        return []
    rate = format_rate(record.world_images_per_second)
    return [(f"All {record.world.world_size} devices", f"{rate} {run.unit}/s")]


def _nothing(found: Recommendation) -> list[Part]:
    said = (
        f"Nothing is recommended for {found.model.title} on {found.device.title}: "
        f"{count(found.num_probes, 'probe')} of {found.num_candidates:,} settings, and none ran "
        "within the budget."
        if found.num_probes
        else f"Nothing is recommended for {found.model.title} on {found.device.title}: no setting "
        "was probed."
    )
    return [
        Text(said, "lead"),
        Text(found.advice),
        Text(f"The search ended because {found.stopped_because}.", "note"),
    ]


def _best_so_far(run: Run) -> list[Part]:
    """The fastest of what was measured, where nothing is recommended (yet)."""
    if not run.records:
        return [Text("No probe of a step has ended yet.", "lead")]
    probes = count(len(run.records), "probe")
    if not run.contenders:
        return [Text(f"{probes}, and none ran well.", "lead")]
    best = choose(run.contenders)
    setting = describe_setting(best.setting, best.records[0].model)
    found = f"{setting}, {_contender(run, best)}, in {_memory(run, best.num_bytes)}"
    return [Text(f"best of {probes}: {found}.", "lead")]


def _contender(run: Run, best: Contender) -> str:
    return f"{format_rate(best.rate)} {run.unit}/s ({interval_text(best.interval)})"


def reasons(run: Run) -> list[Section]:
    """Why this setting: none where the search recommends nothing yet."""
    found = run.found
    if found is None:
        return []
    parts: list[Part] = [*_runners_up(run, found), *map(Text, found.notes), *_ruled_out(found)]
    return [Section("reasons", "Why this setting", parts)] if parts else []


def _runners_up(run: Run, found: Recommendation) -> list[Part]:
    if found.evidence is None:
        return []
    ranked = [(str(n), r) for n, r in enumerate((found.evidence, *found.runners_up), start=1)]
    if found.baseline is not None and all(found.baseline != r for _, r in ranked):
        ranked.append(("plain default", found.baseline))
    headers = ("", "setting", f"{run.unit}/s", "memory", "compile", "step", "interval")
    rows = [(rank, *_cells(record)) for rank, record in ranked]
    caption = "The recommended setting, the runners-up and the plain default, as measured."
    return [Table(headers, rows, caption, marked=(0,)).filled()]


def _cells(record: MeasurementRecord) -> Sequence[str | Number]:
    rate = record.images_per_second
    step = images_of(record) / rate if rate else None
    return (
        describe_setting(record.setting, record.model),
        rate_cell(rate),
        Number(record.used_bytes, bytes_text(record.used_bytes)),
        seconds_cell(record.compile_seconds),
        seconds_cell(step),
        interval_text(interval_of(record)),
    )


def _ruled_out(found: Recommendation) -> list[Part]:
    """What was not probed and why; each line stands for larger batches too."""
    if not found.ruled_out:
        return []
    rows = [
        (
            describe_setting(ruled.setting, found.model),
            bytes_cell(ruled.predicted_bytes),
            ruled.reason,
        )
        for ruled in found.ruled_out
    ]
    table = Table(
        ("setting", "expected memory", "why"),
        rows,
        "Larger batches of these were not probed either.",
    )
    return [Folded(f"Not worth a probe: {count(len(rows), 'setting')}", [table])]
