"""The page's first section of a search: what to train with, in one sentence."""

from __future__ import annotations

import shlex

from planner.page.contents import Copyable, Facts, Part, Section, Text
from planner.report.settings import describe_setting
from planner.schema import MeasurementRecord
from planner.schema.result import Recommendation
from planner.units import format_bytes
from search.report.run import Run
from search.report.trainers import first_choice
from search.report.wording import (
    bytes_text,
    count,
    date_text,
    images_of,
    interval_text,
    rate_text,
    seconds_text,
    within_text,
)
from search.result.contenders import Contender, choose


def answer(run: Run) -> list[Section]:
    """The recommendation in one sentence, and how to start with it; what there is of one while a
    search goes on, and why there is none. None of a search that is only for a loader."""
    if run.found is None and not run.records and (run.loaders or run.fed or run.observations):
        parts = faults_of(run) if run.loaders is None else []
        return [Section("answer", "Answer", parts)] if parts else []
    if run.found is None:
        parts = [part for one in run.parts for part in _best_so_far(one, len(run.parts) > 1)]
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
        base = rate_text(found.baseline.images_per_second)
        gain = f", {found.gain:.2f} × the plain default's {base}"
    return (
        f"Train {found.model.title} with {describe_setting(setting)}: {_rate(run, evidence)} on "
        f"{found.device.name}{gain}, in {_memory(run, evidence.used_bytes)}."
    )


def _rate(run: Run, record: MeasurementRecord) -> str:
    each = "" if record.world is None or record.world.world_size == 1 else " of each device"
    return f"{rate_text(record.images_per_second)} {run.unit}/s{each}{within_text(record)}"


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
    probe = f"{evidence.probe_id[:8]} of {date_text(evidence.date)}, " if evidence.probe_id else ""
    base = found.baseline
    plain = "not measured, so no gain is reported"
    if base is not None:
        plain = (
            f"{describe_setting(base.setting)}: {rate_text(base.images_per_second)} {run.unit}/s, "
            f"{bytes_text(base.used_bytes)}"
        )
    facts = [
        ("Proof", f"probe {probe}{count(len(evidence.step_seconds), 'step')} timed"),
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
    rate = rate_text(record.world_images_per_second)
    return [(f"All {record.world.world_size} devices", f"{rate} {run.unit}/s")]


def _nothing(found: Recommendation) -> list[Part]:
    said = (
        f"Nothing is recommended for {found.model.title} on {found.device.name}: "
        f"{count(found.num_probes, 'probe')} of {found.num_candidates:,} settings, and none ran "
        "within the budget."
        if found.num_probes
        else f"Nothing is recommended for {found.model.title} on {found.device.name}: no setting "
        "was probed."
    )
    return [
        Text(said, "lead"),
        Text(found.advice),
        Text(f"The search ended because {found.stopped_because}.", "note"),
    ]


def _best_so_far(run: Run, several: bool) -> list[Part]:
    """The fastest of what was measured, where nothing is recommended (yet)."""
    if not run.records:
        return [Text("No probe of a step has ended yet.", "lead")]
    about = f"{run.title}: " if several else ""
    probes = count(len(run.records), "probe")
    if not run.contenders:
        return [Text(f"{about}{probes}, and none ran well.", "lead")]
    best = choose(run.contenders)
    said = (
        f"{about}best of {probes}: {describe_setting(best.setting)}, {_contender(run, best)}, in "
        f"{_memory(run, best.num_bytes)}."
    )
    return [Text(said, "lead")]


def _contender(run: Run, best: Contender) -> str:
    return f"{rate_text(best.rate)} {run.unit}/s ({interval_text(best.interval)})"
