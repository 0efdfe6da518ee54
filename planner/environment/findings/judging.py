"""All judges over one machine's facts."""

from __future__ import annotations

from planner.environment.facts import Facts
from planner.environment.findings.card import judge_cards
from planner.environment.findings.container import judge_container
from planner.environment.findings.driver import judge_driver
from planner.environment.findings.finding import Finding
from planner.environment.findings.host import judge_host
from planner.environment.findings.libraries import judge_libraries
from planner.environment.findings.link import judge_links
from planner.environment.findings.peers import judge_peers
from planner.environment.findings.settings import judge_settings
from planner.environment.findings.torch import judge_torch

_JUDGES = (
    judge_driver, judge_cards, judge_links, judge_peers, judge_torch, judge_libraries,
    judge_settings, judge_container, judge_host,
)  # fmt: skip


def judge(facts: Facts) -> list[Finding]:
    """What keeps training from running, or from running fast: the worst first."""
    found = [finding for judge_layer in _JUDGES for finding in judge_layer(facts)]
    return sorted(found, key=lambda finding: finding.rank)
