"""`planner doctor` on recorded machines: what it prints and keeps, what differs, the status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.machine.doctor import check_machine
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
    told, _, typed = out.partition("To type:")
    assert max(map(len, told.splitlines()[2:])) <= 100
    assert all(command in typed.splitlines() or f"  {command}" in typed.splitlines()
               for _, command in check_machine(recorded(name)).to_type)  # fmt: skip
    for finding in check_machine(recorded(name)).findings:
        assert out.count(f"{finding.level}: ") >= 1


def test_json_holds_all_and_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", kept(tmp_path, "ecc-errors"), "--json"]) == 1
    first = capsys.readouterr().out
    (tmp_path / "again.json").write_text(first)
    assert main(["doctor", str(tmp_path / "again.json"), "--json"]) == 1
    assert capsys.readouterr().out == first
    found = json.loads(first)
    assert (found["healthy"], found["rates"]) == (False, None)
    assert {f["name"] for f in found["findings"]} == {"card.ecc-errors", "card.reset-pending"}
    assert all(f["evidence"] and f["cost"] and f["next_step"] for f in found["findings"])


def test_what_differs_is_a_table_with_what_it_matters_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        kept(tmp_path, "no-smi", "zero"),
        kept(tmp_path, "a100", "one"),
        kept(tmp_path, "a100", "two", torch={"cudnn": "91002"}),
        kept(tmp_path, "driver-too-old", "three"),
    ]
    assert main(["doctor", "--compare", *files]) == 1
    out = capsys.readouterr().out
    assert [line.split()[:3] for line in out.splitlines()[:1]] == [["layer", "what", "zero"]]
    row = next(line for line in out.splitlines() if " cuDNN " in line)
    assert row.split() == [
        "libraries", "cuDNN", "9.20.0", "9.20.0", "9.10.2", "9.20.0", "speed,", "memory",
    ]  # fmt: skip
    assert "only three: fault: torch's CUDA 13.0 needs driver 580" in out
    assert "probes of one machine do not stand for another" in out
    layers = [line.split()[0] for line in out.splitlines()[2:] if line and line[0] != " "]
    order = ["driver", "card", "link", "torch", "libraries", "container", "host"]
    table = [layer for layer in layers if layer in order]
    assert table == sorted(table, key=order.index)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare"], "two FILEs or more, not 0"),
        (["a.json", "b.json"], "add --compare"),
        (["--device", "cpu"], "--device says what --rates measures."),
        (["a.json", "--rates"], "--rates measures this machine"),
    ],
)
def test_what_contradicts_itself_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err
