"""Recorded machines: folders of `tests/environment/machines/`, each with what is to be found there.

`machine.json` holds the snapshot, where its figures come from (`source`) and the findings that are
`expected`; the answers of nvidia-smi lie beside it as text. Only what is read was kept of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.machine.machine import Machine, machine_from_json

FOLDER = Path(__file__).parent / "machines"
_ANSWERS = {
    "smi": "smi.xml", "topology": "topology.txt", "peers": "peers.txt", "nvlink": "nvlink.txt",
}  # fmt: skip
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def raw_machine(name: str) -> dict[str, Any]:
    """The snapshot as JSON, with nvidia-smi's answers put in."""
    raw: dict[str, Any] = json.loads((FOLDER / name / "machine.json").read_text())["machine"]
    for key, file in _ANSWERS.items():
        if (FOLDER / name / file).exists():
            raw[key]["text"] = (FOLDER / name / file).read_text()
    return raw


def recorded(name: str) -> Machine:
    return machine_from_json(raw_machine(name))


def expected(name: str) -> list[tuple[str, str]]:
    """(level, name) of each finding, in no order."""
    found = json.loads((FOLDER / name / "machine.json").read_text())["expected"]
    return sorted((level, finding) for level, finding in found)
