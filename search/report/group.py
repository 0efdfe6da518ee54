"""The page's group of one search: its sections in order."""

from __future__ import annotations

from planner.page.contents import Facts, Group, Section, Text
from planner.report.settings import describe_setting
from search.report.run import Run


def run_group(run: Run, key: str, title: str = "") -> Group:
    """All sections of a run. `key` is unique on the page: charts and anchors begin with it."""
    return Group(key, title, [answer(run)])


def answer(run: Run) -> Section:
    """The recommendation in one sentence."""
    found = run.found
    if found is None or found.setting is None:
        said = f"Nothing is recommended yet, after {len(run.records)} probes."
        return Section("answer", "Answer", [Text(said, "lead")])
    facts = [("Setting", describe_setting(found.setting)), ("Device", found.device.name)]
    return Section("answer", "Answer", [Facts(facts)])
