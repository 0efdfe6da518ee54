"""What the probes of one study have in common: model, device and software."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from planner.core.files import to_json
from planner.core.schema import DeviceInfo, MeasurementRecord, Model
from planner.core.schema.record import RECORD_FORMAT


class StudyIdentity(Protocol):
    """What makes a study one: any difference makes probes another study's. `of_what` says in words
    what may differ."""

    @property
    def of_what(self) -> str: ...

    def differences(self, known: dict[str, Any]) -> tuple[str, ...]:
        """How this differs from what `to_json` made of another, a line for each field."""

    def has(self, record: MeasurementRecord) -> bool:
        """Whether a record is of this identity."""


@dataclass(frozen=True)
class Identity:
    """What a study's probes have in common; any difference makes them another study's."""

    format = RECORD_FORMAT
    computed = ("format",)
    model: Model
    device: DeviceInfo
    versions: dict[str, str]

    @property
    def of_what(self) -> str:
        return "model, device or software"

    def differences(self, known: dict[str, Any]) -> tuple[str, ...]:
        """How this differs from what `to_json` made of another, a line for each field."""
        return tuple(differences_between(known, _as_known(known, self)))

    def has(self, record: MeasurementRecord) -> bool:
        """Whether a record is of this model, device and software."""
        same = (record.model, record.versions) == (self.model, self.versions)
        return same and record.device.is_like(self.device)


def _as_known(known: dict[str, Any], identity: Identity) -> dict[str, Any]:
    """The identity in the words of the one known, where a device differs only by how it was read:
    the memory of one card is told in two ways, and which of several alike is no difference."""
    ours: dict[str, Any] = to_json(identity)
    ours["device"].pop("uuid")
    theirs = {k: v for k, v in known.get("device", {}).items() if k != "uuid"}
    try:
        like = DeviceInfo.model_validate(theirs).is_like(identity.device)
    except ValidationError:
        like = False
    ours["device"] = known["device"] if like else {**ours["device"], "uuid": _uuid(known)}
    return ours


def _uuid(known: dict[str, Any]) -> Any:
    return known.get("device", {}).get("uuid")


def differences_between(
    known: dict[str, Any], ours: dict[str, Any], path: str = ""
) -> Iterator[str]:
    """A line for each field that is another, `path` before its name."""
    for key in sorted({*known, *ours}):
        theirs, mine = known.get(key), ours.get(key)
        name = f"{path}{key}"
        if isinstance(theirs, dict) and isinstance(mine, dict):
            yield from differences_between(theirs, mine, f"{name}.")
        elif theirs != mine:
            yield f"{name}: {theirs} there, {mine} here"
