"""What a search did, as its recommendation needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.core.schema import DeviceInfo, Model, TrainSetting
from planner.core.schema.result import Excluded


@dataclass(frozen=True)
class Summary:
    """`images` is a whole training's, on one device,
    where a length was asked for; `asked` the setting the person would have used, `plain_arm` the
    arm of the plain default. `trials_used` are the probes of the study where --trials allowed no
    more of them, `believed` the rates of what ran on a hot device (`Contender.believed`), by id."""

    model: Model
    device: DeviceInfo
    versions: dict[str, str]
    budget_bytes: int | None
    asked: TrainSetting
    plain_arm: str = ""
    images: float | None = None
    num_candidates: int = 0
    stopped_because: str = ""
    trials_used: int | None = None
    ruled_out: tuple[Excluded, ...] = ()
    believed: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
