"""Is this environment set up to be fast? Reads the machine, gathers facts, judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.environment.facts import Facts, gather_facts
from planner.environment.findings.finding import Finding
from planner.environment.findings.judging import judge
from planner.environment.machine import DriverAnswer, Machine
from planner.environment.reading.here import read_machine
from planner.environment.torch_build import TorchBuild


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

    def to_json(self) -> dict[str, Any]:
        """Everything: the findings, and the raw answers they come from."""
        return {
            "healthy": self.is_healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "machine": self.machine.to_json(),
        }


def check_environment(ask_driver: Callable[[], DriverAnswer] = DriverAnswer) -> Checkup:
    """Look at this machine; see `read_machine`."""
    return check_machine(read_machine(ask_driver=ask_driver))


def check_machine(machine: Machine) -> Checkup:
    """Judge a machine that was read here, or recorded elsewhere."""
    facts = gather_facts(machine)
    return Checkup(facts, judge(facts))
