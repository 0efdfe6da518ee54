"""Faults that lie between fields, kept apart so that one message can list them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):
    """What is wrong, and the fields it is wrong between."""

    fields: tuple[str, ...]
    message: str


class CrossFieldError(ValueError):
    """Raised by a schema's own validator; `planner.core.schema.validation` takes it apart again."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = tuple(faults)
