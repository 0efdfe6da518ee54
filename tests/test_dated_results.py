"""The kept results of the benchmarks print as tables, and say what the README says of them."""

from __future__ import annotations

import subprocess
import sys

from tests.benchmarks import estimate_speed, other_tools
from tests.benchmarks.dated import latest_results


def test_every_tool_has_a_row_and_ours_is_equal_to_the_trace() -> None:
    found = latest_results("other_tools")
    assert set(found["tools"]) == set(other_tools.TOOLS)
    peaks = {
        name: [answer["peak_bytes"] for answer in tool["answers"]]
        for name, tool in found["tools"].items()
    }
    assert peaks["planner"] == peaks["reference"]
    rows = [line for line in other_tools.table(found).splitlines() if line.startswith("| ")]
    assert len(rows) == len(found["tools"]) + 2
    assert rows[3].count("(equal)") == len(other_tools.STEPS)


def test_the_steps_that_were_asked_about_are_those_in_the_code() -> None:
    kept = latest_results("other_tools")["steps"]
    for step, (name, model, setting) in zip(kept, other_tools.chosen_steps(), strict=True):
        assert step["name"] == name
        assert step["model"].items() <= model.model_dump(mode="json").items()
        assert step["setting"].items() <= setting.model_dump(mode="json").items()


def test_a_missing_tool_is_said() -> None:
    answer = {"peak_bytes": None, "cpu_seconds": 0.1, "fault": "torchinfo is not installed"}
    assert other_tools._cell(answer, 1 << 30) == "torchinfo is not installed"


def test_speeds_print_without_torch() -> None:
    assert "native Swin-L" in estimate_speed.table(latest_results("estimate_speed"))
    code = (
        "import sys; from tests.benchmarks import estimate_speed, other_tools; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
