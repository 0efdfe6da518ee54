"""What the doctor found, as text: the findings first, the worst on top, then the layers."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from planner.core.units import format_bytes, format_seconds
from planner.machine.facts import names
from planner.machine.findings.finding import LAYERS, LEVELS, Finding
from planner.machine.layers import Difference, Line, describe
from planner.report.terminal import table_text, wrapped

if TYPE_CHECKING:
    from planner.machine.doctor import Checkup
    from planner.machine.facts import Facts
    from planner.throughput.prediction import DeviceRates

_VALUE_CHARACTERS = 34  # of a line of a value in the table that compares


def checkup_text(checkup: Checkup) -> str:
    """The findings, the cards and the layers of one machine."""
    parts = [_verdict(checkup.findings)]
    alike = groupby(checkup.findings, key=lambda finding: (finding.level, finding.name))
    parts += [_finding_text(*found) for _, found in alike]
    if checkup.to_type:  # each on one line, to be pasted
        lines = [f"  # {where}\n  {command}" for where, command in checkup.to_type]
        parts.append("\n".join(["To type:", *lines]))
    cards = _cards_text(checkup.facts)
    parts += [cards] if cards else []
    parts.append(_layers_text(checkup.facts))
    if checkup.machine.source:
        parts.insert(0, f"A recorded machine: {checkup.machine.source}")
    return "\n\n".join(parts)


def _verdict(findings: Sequence[Finding]) -> str:
    counts = [(level, sum(f.level == level for f in findings)) for level in LEVELS]
    told = ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for level, n in counts if n)
    if not any(finding.level == "fault" for finding in findings):
        found = f"Nothing needs fixing ({told})." if told else "No problems found."
        return wrapped(f"{found} Next: 'planner tune MODEL' finds the fastest setting.")
    return f"Something must be fixed first: {told}."


def _finding_text(finding: Finding, *others: Finding) -> str:
    """A note is short, others say everything. `others` are the same finding of more cards."""
    head = f"{finding.level}: {finding.message}."
    if others:
        head += f" The same of {names([other.subject or other.message for other in others])}."
    rows = [("read", finding.evidence), ("cost", finding.cost), ("next", finding.next_step)]
    if finding.level == "note":
        rows = [row for row in rows if row[0] == "next"]
    lines = [wrapped(head, "  ")]
    lines += [wrapped(f"  {name}  {text}", " " * 8) for name, text in rows if text]
    return "\n".join(lines)


def _cards_text(facts: Facts) -> str:
    rows = [
        (
            f"cuda:{card.position}" if card.position is not None else "hidden", card.gpu.name,
            _size(card.gpu.total_bytes), _size(card.gpu.used_bytes),
            ".".join(map(str, card.capability)) if card.capability else None, card.gpu.driver,
        )
        for card in facts.cards
    ]  # fmt: skip
    headers = ("device", "name", "memory", "in use", "capability", "driver")
    return table_text(rows, headers)


def _layers_text(facts: Facts) -> str:
    """A paragraph for each layer, and within it one for each card: what it is made of."""
    lines = sorted(describe(facts), key=lambda line: (LAYERS.index(line.layer), _card_of(line)))
    paragraphs = []
    for (layer, card), found in groupby(lines, key=lambda line: (line.layer, _card_of(line))):
        told = ", ".join(f"{line.name.removeprefix(card).strip()} {line.value}".strip()
                         for line in found)  # fmt: skip
        head = f"{layer + ':':<11}"
        paragraphs.append(wrapped(f"{head}{card} {told}" if card else head + told, " " * 11))
    return "\n".join(paragraphs)


def _card_of(line: Line) -> str:
    """ "GPU 0" of a line that is about that card, "" of any other."""
    match = re.match(r"GPU \d+(?! to)", line.name)
    return match.group() if match else ""


def comparison_text(checkups: Mapping[str, Checkup], differences: Sequence[Difference]) -> str:
    """What differs, grouped by layer, and which findings only some of the machines have."""
    if not differences:
        return "The machines do not differ in anything that was read."
    rows = [
        (d.layer, d.name, *(_cell(value) for value in d.values), d.matters_for) for d in differences
    ]
    headers = ("layer", "what", *checkups, "matters for")
    table = table_text(rows, headers)
    only = list(_only_some(checkups))
    return "\n\n".join([table, *(["\n".join(only)] if only else []), _advice(differences)])


def _only_some(checkups: Mapping[str, Checkup]) -> Iterator[str]:
    """The faults and warnings that not all machines have."""
    owners: dict[str, list[str]] = {}
    for title, checkup in checkups.items():
        for finding in checkup.findings:
            if finding.level != "note":
                owners.setdefault(f"{finding.level}: {finding.message}", []).append(title)
    for message, titles in owners.items():
        if len(titles) < len(checkups):
            yield wrapped(f"only {', '.join(titles)}: {message}.", "  ")


def _advice(differences: Sequence[Difference]) -> str:
    speed = [d for d in differences if "speed" in d.matters_for]
    memory = [d for d in differences if "memory" in d.matters_for]
    total = f"{len(differences)} difference{'s' if len(differences) != 1 else ''}"
    if not speed and not memory:
        return f"{total}, none of which matters for speed or memory."
    return (
        f"{total}: {len(speed)} for speed, {len(memory)} for memory. Where they matter, probes of "
        "one machine do not stand for another."
    )


def _cell(value: str) -> str:
    """Whole, on several lines: two long values may differ only at their ends."""
    return "\n".join(textwrap.wrap(value, _VALUE_CHARACTERS)) or "-"


def rates_text(rates: DeviceRates) -> str:
    """What `--rates` measured."""
    rows = [
        (f"matmul {dtype}", f"{r / 1e12:.3g} TFLOP/s") for dtype, r in rates.matmul_flops.items()
    ]
    rows.append(("copy", f"{rates.bandwidth / 1e9:.3g} GB/s"))
    rows += [
        (f"{kind}, of the {'matmul' if kind in ('conv', 'attention') else 'copy'}", f"{share:.0%}")
        for kind, share in rates.kind_share.items()
        if kind != "matmul"
    ]
    rows += [
        (f"host, one {phase} operation", format_seconds(seconds))
        for phase, seconds in rates.host_seconds.items()
    ]
    table = table_text(rows, ("what", "rate"))
    return f"\nRates, {rates.basis}:\n{table}"


def _size(count: int | None) -> str | None:
    return None if count is None else format_bytes(count)
