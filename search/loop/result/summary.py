"""What a search did, as its recommendation needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.core.schema import DeviceInfo, Model, TrainSetting
from planner.core.schema.record import Excluded
from search.loop.contenders import Contender


@dataclass(frozen=True)
class Summary:
    """`images` is a whole training's, on one device, where a length was asked for; `asked` the
    setting the person would have used (None where its batch was not chosen), `plain_arm` the arm of
    the plain default. `trials_used` are the probes of the study where --trials allowed no more of
    them, `ran` what ran within the budget, as the search compares it; None where only records are
    known."""

    model: Model
    device: DeviceInfo
    versions: dict[str, str]
    budget_bytes: int | None
    asked: TrainSetting | None
    plain_arm: str = ""
    images: float | None = None
    num_candidates: int = 0
    stopped_because: str = ""
    trials_used: int | None = None
    ruled_out: tuple[Excluded, ...] = ()
    ran: Sequence[Contender] | None = None
    notes: tuple[str, ...] = ()
