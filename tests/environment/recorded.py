"""Recorded machines: files of `tests/environment/machines/`, each with the findings that are
`expected`. They were read by nvidia-smi, and written anew in what NVML tells."""

import json
from pathlib import Path
from typing import Any

from planner.machine.doctor import MachineFacts, load_facts

FOLDER = Path(__file__).parent / "machines"
NAMES = sorted(path.stem for path in FOLDER.iterdir())


def raw_machine(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())["machine"]
    return raw


def recorded(name: str) -> MachineFacts:
    return load_facts(FOLDER / f"{name}.json")


def expected(name: str) -> list[tuple[str, str]]:
    """(level, name) of each finding, in no order."""
    found = json.loads((FOLDER / f"{name}.json").read_text())["expected"]
    return sorted((level, finding) for level, finding in found)
