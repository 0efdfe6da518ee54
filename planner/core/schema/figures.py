"""What the figures of a file may be: anybody may have written it."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

# A record's validator is built when it is first used: reading one is not on the way of an estimate,
# which must answer at once. Infinity and what is no number are no measurement.
KEPT = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # nobody has more bytes, or of anything
# What a task calls an item of its batch: it stands in scripts that `planner emit` writes.
UNIT = r"^[A-Za-z][A-Za-z0-9 _-]{0,39}$"
