"""The table that the long tests of the emitted files print at the end."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == "row" and report.when == "call"
    ]
    if not rows:
        return
    terminalreporter.section("emitted files in the real trainers")
    for target, setting, result in sorted(map(tuple, rows)):
        terminalreporter.write_line(f"{target:13} {result:16} {setting}")
