"""What the doctor found, as text: the findings first, the worst on top, then what was read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from planner.core.units import format_bytes, format_seconds
from planner.machine.doctor import Facts
from planner.machine.findings import LEVELS, Finding, judge
from planner.machine.set_up import lines_to_type
from planner.report.terminal import table_text, wrapped

if TYPE_CHECKING:
    from planner.throughput.prediction import DeviceRates

_VALUE_CHARACTERS = 34  # of a line of a value in the table that compares


def facts_text(facts: Facts) -> str:
    """The findings, what to type, the cards, and what else was read of one machine."""
    findings = judge(facts)
    parts = [wrapped(f"A recorded machine: {facts.source}")] if facts.source else []
    parts.append(_verdict(findings))
    for message in dict.fromkeys(found.message for found in findings):
        parts.append(_finding_text(*(found for found in findings if found.message == message)))
    if typed := lines_to_type(facts):  # each on one line, to be pasted
        lines = [f"  # {where}\n  {command}" for where, command in typed]
        parts.append("\n".join(["To type:", *lines]))
    if facts.cards:
        parts.append(_cards_text(facts))
    parts.append("\n".join(wrapped(line, " " * 11) for line in _lines(facts)))
    return "\n\n".join(parts)


def _verdict(findings: Sequence[Finding]) -> str:
    counts = [(level, sum(f.level == level for f in findings)) for level in LEVELS]
    told = ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for level, n in counts if n)
    if any(finding.level == "fault" for finding in findings):
        return f"Something must be fixed first: {told}."
    found = f"Nothing needs fixing ({told})." if told else "No problems found."
    return wrapped(f"{found} Next: 'planner tune MODEL' finds the fastest setting.")


def _finding_text(finding: Finding, *others: Finding) -> str:
    """`others` say the same of more cards."""
    head = f"{finding.level}: {finding.subject} {finding.message}.".replace("  ", " ")
    if others:
        head += f" The same of {', '.join(other.subject for other in others)}."
    rows = {"read": finding.evidence, "cost": finding.cost, "next": finding.next_step}
    told = (wrapped(f"  {name}  {text}", " " * 8) for name, text in rows.items())
    return "\n".join([wrapped(head, "  "), *told])


def _cards_text(facts: Facts) -> str:
    shown = facts.visible
    rows = [
        (
            f"cuda:{shown.index(card)}" if card in shown else "hidden", card.gpu.name,
            _size(card.gpu.total_bytes), _size(card.gpu.used_bytes),
            ".".join(map(str, card.gpu.capability)) if card.gpu.capability else None,
            f"{card.max_generation} x{card.lanes}" if card.lanes else None,
            str(card.nvlinks_up) if card.nvlinks_up else None,
        )
        for card in facts.cards
    ]  # fmt: skip
    headers = ("device", "name", "memory", "in use", "capability", "PCIe", "NVLinks")
    return table_text(rows, headers)


def _lines(facts: Facts) -> Iterator[str]:
    torch, host = facts.torch, facts.host
    yield f"driver:    {facts.driver or 'none'}"
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU"
    libraries = "".join(f", {name} {release}" for name, release in torch.libraries.items())
    kernels = f", kernels for {', '.join(torch.arch_list)}" if torch.arch_list else ""
    yield f"torch:     {torch.version or 'none'} for {build}{libraries}{kernels}"
    yield f"packages:  {', '.join(f'{name} {v}' for name, v in facts.versions.items()) or 'none'}"
    if facts.variables:
        yield f"settings:  {', '.join(f'{name}={v}' for name, v in facts.variables.items())}"
    shared = f", /dev/shm {_size(host.shared_memory_bytes)}" if host.shared_memory_bytes else ""
    yield (
        f"host:      {facts.system.get('description', 'unknown')}, processors {host.cpus:g} of "
        f"{host.num_cpus}, memory {_size(host.usable_bytes) or 'unknown'}{shared}, container "
        f"{facts.container or 'none'}"
    )


def _size(count: int | None) -> str | None:
    return None if count is None else format_bytes(count)


def comparison_text(machines: Mapping[str, Facts], differences: Mapping[str, list[str]]) -> str:
    """What differs, and which faults and warnings only some of the machines have."""
    if not differences:
        return "The machines do not differ in anything that was read."
    rows = [
        (name, *("\n".join(textwrap.wrap(value, _VALUE_CHARACTERS)) or "-" for value in values))
        for name, values in differences.items()
    ]
    parts = [table_text(rows, ("what", *machines))]
    owners: dict[str, list[str]] = {}
    for title, facts in machines.items():
        for found in judge(facts):
            if found.level != "note":
                owners.setdefault(f"{found.level}: {found.name}: {found.message}", []).append(title)
    parts += [
        wrapped(f"only {', '.join(titles)}: {message}.", "  ")
        for message, titles in owners.items()
        if len(titles) < len(machines)
    ]
    return "\n".join(parts)


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
