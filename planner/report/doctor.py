"""The doctor's report: its findings, the worst first, and then the facts of the machine."""

from collections.abc import Iterator, Sequence

from planner.core.units import format_bytes
from planner.machine.doctor import MachineFacts, install_line
from planner.machine.findings import LEVELS, NO_GPU, Finding, judge
from planner.report.page import contents as doc
from planner.report.text import parts_text


def facts_text(facts: MachineFacts) -> str:
    return parts_text(facts_answer(facts))


def facts_answer(facts: MachineFacts) -> list[doc.Part]:
    """The findings on one machine, what to type, its cards, and its other facts."""
    findings = judge(facts)
    parts = [doc.Text(f"A recorded machine: {facts.source}")] if facts.source else []
    parts.append(doc.Text(_summary(findings)))
    for message in dict.fromkeys(finding.message for finding in findings):
        first, *other_findings = (finding for finding in findings if finding.message == message)
        heading = f"{first.level}: {first.subject} {message}.".replace("  ", " ")
        if other_findings:
            heading += f" The same of {', '.join(other.subject for other in other_findings)}."
        lines = {"read": first.evidence, "cost": first.cost, "next": first.next_step}
        rows = (f"  {name}  {text}" for name, text in lines.items())
        parts.append(doc.Text("\n".join([heading, *rows])))
    commands = [doc.Copyable(line, "To type") for line in filter(None, [install_line(facts)])]
    shown = facts.visible
    cards: list[list[doc.Cell]] = [
        [
            f"cuda:{shown.index(card)}" if card in shown else "hidden", card.gpu.name,
            doc.bytes_cell(card.gpu.total_bytes), doc.bytes_cell(card.gpu.used_bytes),
            ".".join(map(str, card.gpu.capability)) if card.gpu.capability else "-",
            f"{card.max_generation} x{card.lanes}" if card.lanes else "-",
            str(card.nvlinks_up) if card.nvlinks_up else "-",
        ]
        for card in facts.cards
    ]  # fmt: skip
    headers = ("device", "name", "memory", "in use", "capability", "PCIe", "NVLinks")
    table = doc.Table(headers, cards, first=len(cards))
    return [*parts, *commands, table, doc.Facts(list(_fact_pairs(facts)))]


def _summary(findings: Sequence[Finding]) -> str:
    counts = [(level, sum(f.level == level for f in findings)) for level in LEVELS]
    counts_text = ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for level, n in counts if n)
    if any(finding.level == "fault" for finding in findings):
        return f"Something must be fixed first: {counts_text}."
    lacking = next((f for f in findings if f.cost == NO_GPU), None)
    if lacking is not None:
        problem = f"No GPU is visible here: everything would run on the CPU ({counts_text})."
        return f"{problem} Next: {lacking.next_step[0].lower()}{lacking.next_step[1:]}"
    result = f"Nothing needs fixing ({counts_text})." if counts_text else "No problems found."
    return f"{result} Next: 'planner tune MODEL' finds the fastest setting."


def _fact_pairs(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    torch, host = facts.torch, facts.host
    yield "driver:", facts.driver or "none"
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU"
    libraries = "".join(f", {name} {release}" for name, release in torch.libraries.items())
    kernels = f", kernels for {', '.join(torch.arch_list)}" if torch.arch_list else ""
    yield "torch:", f"{torch.version or 'none'} for {build}{libraries}{kernels}"
    yield "packages:", ", ".join(f"{name} {v}" for name, v in facts.versions.items()) or "none"
    if facts.variables:
        yield "settings:", ", ".join(f"{name}={v}" for name, v in facts.variables.items())
    shared = host.shared_memory_bytes
    shm = f", /dev/shm {format_bytes(shared)}" if shared else ""
    memory = format_bytes(host.memory_bytes) if host.memory_bytes is not None else "unknown"
    system = facts.system.get("description", "unknown")
    processors = f"processors {host.cpus:g} of {host.num_cpus}"
    text = f"{system}, {processors}, memory {memory}{shm}, container {facts.container or 'none'}"
    yield "host:", text
