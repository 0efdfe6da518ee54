"""What optuna-dashboard shows of a study beside its parameters and values.

A few user attributes in plain names with their units, constraints in the form that it reads, and
artifacts: a probe's record and a search's recommendation as files. All of it is said a second time
for people who look; nothing here is read back by a search.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.core.errors import printable
from planner.core.schema import MeasurementRecord
from planner.core.units import GIB

FOLDER = "artifacts"  # beside the records: 'optuna-dashboard --artifact-dir RUN/artifacts'
METRIC = "images/s"
# Optuna keeps a constraint by its name; optuna-dashboard 0.21 reads the list of Optuna 4.
CONSTRAINTS = "constraints"
_ARTIFACT = "artifacts:"  # what an artifact's key begins with: optuna/artifacts/_upload.py
_MESSAGE_LENGTH = 500


def shown(record: MeasurementRecord) -> dict[str, Any]:
    """What a person looks for in a list of trials and neither their value nor their parameters say.
    Each attribute is a transaction of its own (Optuna 5.0 has none for several), so that the rest
    is left to the artifact, which is the whole record."""
    used = record.used_bytes
    found = {
        "memory (GiB)": None if used is None else float(f"{used / GIB:.4g}"),
        "why": printable(record.message)[:_MESSAGE_LENGTH] or None,
    }
    return {name: value for name, value in found.items() if value is not None}


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
