"""What a search may be over: settings of a training step, or of a loader, and their records.

The study, the session, the listed order and the sampler serve both; where nothing is said they are
a step's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

from typing_extensions import TypeVar

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.expected import Expected
from planner.core.schema.loading import LoaderSetting

AnySetting = TrainSetting | LoaderSetting


class Line(Protocol):
    """What is kept as one JSON line, of a format that a later planner may know better."""

    @property
    def format(self) -> int: ...

    @classmethod
    def model_validate_json(cls, json_data: bytes | str) -> Self: ...

    def model_dump_json(self, *, exclude_none: bool = False) -> str: ...


class ProbeRecord(Line, Protocol):
    """What any probe found; `samples` are the seconds that its rate is the median of."""

    @property
    def probe_id(self) -> str: ...
    @property
    def setting(self) -> Any: ...
    @property
    def status(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def flags(self) -> tuple[str, ...]: ...
    @property
    def samples(self) -> tuple[float, ...]: ...
    @property
    def images_per_second(self) -> float | None: ...
    @property
    def used_bytes(self) -> int | None: ...
    @property
    def probe_seconds(self) -> float: ...
    @property
    def cut_short(self) -> bool: ...
    @property
    def inconclusive(self) -> bool: ...
    @property
    def lost_device(self) -> bool: ...
    @property
    def expected(self) -> Expected | None: ...

    def judged_in(self, allowed_bytes: int | None) -> Self: ...
    def with_samples(self, samples: tuple[float, ...]) -> Self: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


SettingT = TypeVar("SettingT", bound=AnySetting, default=TrainSetting)
RecordT = TypeVar("RecordT", bound=ProbeRecord, default=MeasurementRecord)

# For protocols, of which mypy asks in which direction a type may vary.
RecordT_co = TypeVar("RecordT_co", bound=ProbeRecord, default=MeasurementRecord, covariant=True)
RecordT_contra = TypeVar(
    "RecordT_contra", bound=ProbeRecord, default=MeasurementRecord, contravariant=True
)
