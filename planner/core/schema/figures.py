"""What the figures of a file may be: anybody may have written it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

# A record's validator is built when it is first used: reading one is not on the way of an estimate,
# which must answer at once. Infinity and what is no number are no measurement.
KEPT = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # nobody has more bytes, or of anything


def unit_name(text: str) -> str:
    """What an item of a batch is called, in the words of `text`: letters, digits, spaces, hyphens.

    It stands in scripts that `planner emit` writes, and comes from files that others may have made:
    what is no word is dropped.
    """
    return " ".join(re.sub(r"[^\w -]", " ", text).split())[:40].rstrip() or "items"


UnitName = Annotated[str, AfterValidator(unit_name)]
