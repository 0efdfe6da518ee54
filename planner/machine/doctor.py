"""Is this environment set up to be fast? Reads the machine, gathers facts, judges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.machine.facts import Facts, gather_facts
from planner.machine.findings.analysis import judge
from planner.machine.findings.finding import Finding
from planner.machine.machine import Machine
from planner.machine.reading.here import read_machine
from planner.machine.set_up import lines_to_type
from planner.machine.torch_build import TorchBuild


@dataclass(frozen=True)
class Checkup:
    """A machine, what its answers mean, and the findings drawn from them, the worst first."""

    facts: Facts
    findings: Sequence[Finding]

    @property
    def machine(self) -> Machine:
        return self.facts.machine

    @property
    def torch(self) -> TorchBuild:
        return self.facts.torch

    @property
    def is_healthy(self) -> bool:
        """Whether nothing must be fixed first; warnings and notes may remain."""
        return all(finding.level != "fault" for finding in self.findings)

    @property
    def to_type(self) -> list[tuple[str, str]]:
        """(what for, command) that make a torch that can be used."""
        return lines_to_type(self.facts, self.findings)

    def to_json(self) -> dict[str, Any]:
        """Everything: the findings, and the raw answers they come from."""
        return {
            "healthy": self.is_healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "to_type": [command for _, command in self.to_type],
            "machine": self.machine.to_json(),
        }


def check_environment() -> Checkup:
    """Look at this machine; see `read_machine`."""
    return check_machine(read_machine())


def check_machine(machine: Machine) -> Checkup:
    """Judge a machine that was read here, or recorded elsewhere."""
    facts = gather_facts(machine)
    return Checkup(facts, judge(facts))
