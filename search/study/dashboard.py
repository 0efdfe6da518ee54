"""What optuna-dashboard shows of a study beside its parameters and values.

User attributes in plain names with their units, constraints in the form that it reads, and
artifacts: a probe's record and a search's recommendation as files. All of it is said a second time
for people who look; nothing here is read back by a search.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.errors import printable
from planner.units import GIB
from search.kinds import ProbeRecord

FOLDER = "artifacts"  # beside the records: 'optuna-dashboard --artifact-dir RUN/artifacts'
METRIC = "images/s"
# Optuna keeps a constraint by its name; optuna-dashboard 0.21 reads the list of Optuna 4.
CONSTRAINTS = "constraints"
_ARTIFACT = "artifacts:"  # what an artifact's key begins with: optuna/artifacts/_upload.py
_MESSAGE_LENGTH = 500


def shown(record: ProbeRecord) -> dict[str, Any]:
    """A record as user attributes: what is known of it, by names that a person reads. Each is one
    more write to the study, some milliseconds: those that the record's file has besides are not
    among them."""
    found = {
        METRIC: _rounded(record.images_per_second),
        "memory (GiB)": _gib(record.used_bytes),
        "compile (s)": _rounded(getattr(record, "compile_seconds", None)),
        "probe (s)": _rounded(record.probe_seconds),
        "why": printable(record.message)[:_MESSAGE_LENGTH] or None,
        "ended in": getattr(record, "phase", None) or None,
        "flags": list(record.flags) or None,
        **_expected(record),
    }
    return {name: value for name, value in found.items() if value is not None}


def _expected(record: ProbeRecord) -> dict[str, Any]:
    """The middle of what the search expected when it chose the probe."""
    expected = getattr(record, "expected", None)
    if expected is None:
        return {}
    rate, num_bytes = expected.images_per_second, expected.used_bytes
    return {
        "expected images/s": _rounded(rate[1]) if rate else None,
        "expected memory (GiB)": _gib(num_bytes[1]) if num_bytes else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else _rounded(num_bytes / GIB)


def artifact_id(of: str) -> str:
    """Always the same of one probe or file: what is written twice is there once."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"planner:{of}"))


def artifact_attribute(of: str, name: str) -> tuple[str, str]:
    """The system attribute of a study or trial that says which file `of` is, for people `name`."""
    known = artifact_id(of)
    said = {"filename": name, "mimetype": "application/json", "encoding": None}
    return _ARTIFACT + known, json.dumps({"artifact_id": known, **said})


def write_artifact(folder: Path, of: str, data: bytes) -> bool:
    """Puts a file into the store of artifacts; False where it cannot be. It is a copy: a probe does
    not wait until it is on disk."""
    path = folder / artifact_id(of)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError:  # a full disk, or no folder
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return False
    return True
