"""Every recorded machine has the findings that are written beside it, and no others."""

from __future__ import annotations

import pytest

from planner.machine.doctor import check_machine
from tests.environment.recorded import NAMES, expected, recorded


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_has_its_findings(name: str) -> None:
    found = check_machine(recorded(name)).findings
    assert sorted((finding.level, finding.name) for finding in found) == expected(name)
    assert all(finding.evidence for finding in found)
    assert all(f.cost and f.next_step for f in found if f.level != "note")
