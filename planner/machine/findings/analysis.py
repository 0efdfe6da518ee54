"""All judges over one machine's facts."""

from __future__ import annotations

from planner.machine.facts import Facts
from planner.machine.findings.card import judge_cards
from planner.machine.findings.container import judge_container
from planner.machine.findings.driver import judge_driver
from planner.machine.findings.finding import Finding
from planner.machine.findings.host import judge_host
from planner.machine.findings.libraries import judge_libraries
from planner.machine.findings.link import judge_links
from planner.machine.findings.peers import judge_peers
from planner.machine.findings.settings import judge_settings
from planner.machine.findings.torch import judge_torch

_JUDGES = (
    judge_driver, judge_cards, judge_links, judge_peers, judge_torch, judge_libraries,
    judge_settings, judge_container, judge_host,
)  # fmt: skip


def judge(facts: Facts) -> list[Finding]:
    """What keeps training from running, or from running fast: the worst first."""
    found = [finding for judge_layer in _JUDGES for finding in judge_layer(facts)]
    return sorted(found, key=lambda finding: finding.rank)
