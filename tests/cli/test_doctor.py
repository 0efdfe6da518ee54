"""`planner doctor` on recorded machines: what it prints and keeps, and the status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.machine.doctor import install_line
from tests.environment.recorded import expected, raw_machine, recorded


def kept(folder: Path, name: str, title: str = "", **changes: Any) -> str:
    """A file as `planner doctor --json` writes it."""
    raw = raw_machine(name)
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
    path = folder / f"{title or name}.json"
    path.write_text(json.dumps({"healthy": True, "machine": raw}))
    return str(path)


@pytest.mark.parametrize("name", ["h200", "bad-settings", "driver-too-old"])
def test_a_recorded_machine_is_judged(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_faults = any(level == "fault" for level, _ in expected(name))
    assert main(["doctor", kept(tmp_path, name)]) == int(has_faults)
    out = capsys.readouterr().out
    assert ("Something must be fixed first" in out) == has_faults
    assert ("No problems found" in out) == (not expected(name))
    told, _, typed = out.partition("To type")
    assert max(map(len, told.splitlines()[2:])) <= 100
    assert install_line(recorded(name)) in typed


def test_a_machine_without_a_gpu_is_told_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {"shared_memory_bytes": 1 << 33, "container": ""}
    assert main(["doctor", kept(tmp_path, "container-no-gpus", host=host)]) == 0
    told = capsys.readouterr().out.partition("\n\n")[2]
    assert told.startswith(
        "No GPU is visible here: everything would run on the CPU (1 note). Next:"
    )
    assert "planner tune" not in told


def test_json_holds_all_and_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", kept(tmp_path, "ecc-errors"), "--json"]) == 1
    first = capsys.readouterr().out
    (tmp_path / "again.json").write_text(first)
    assert main(["doctor", str(tmp_path / "again.json"), "--json"]) == 1
    assert capsys.readouterr().out == first
    found = json.loads(first)
    assert not found["healthy"]
    assert [f["name"] for f in found["findings"]] == ["card.reset", "card.reset"]
    assert all(f["evidence"] and f["cost"] and f["next_step"] for f in found["findings"])
