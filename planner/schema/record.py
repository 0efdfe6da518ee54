"""A measurement record: one probe of one setting on one device, as one JSON line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.schema.model import ImageSize, Side, SwinConfig
from planner.schema.setting import TrainSetting

RECORD_FORMAT = 1
# The flag of a probe that was ended for no fault of its setting.
BUDGET_ENDED = "cut short: the budget ended"

# Every model here builds its validator when it is first used: reading a record is not on the way of
# an estimate, which must answer at once.

ProbeStatus = Literal[
    "measured", "out_of_memory", "timed_out", "crashed", "unsupported", "non_finite"
]


class FactoryModel(BaseModel):
    """A model of the user's own: `package.module:factory`, called without arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    factory: str
    image_size: ImageSize = (224, 224)
    in_channels: Side = 3
    num_classes: Side = 1000

    @property
    def title(self) -> str:
        return self.factory


class DeviceInfo(BaseModel):
    """The device a probe ran on. `memory_cap_bytes` is set where a smaller card was emulated."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    kind: Literal["cuda", "cpu"]
    name: str
    total_bytes: int
    capability: tuple[int, int] | None = None
    driver: str | None = None
    memory_cap_bytes: int | None = None


class PhaseBytes(BaseModel):
    """Live bytes (`torch.cuda.memory_allocated`) at the end of each phase of a steady step."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    before_step: int
    after_forward: int
    after_backward: int
    after_step: int


class Clocks(BaseModel):
    """Device clocks in MHz while the steps were timed, and what held them back."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()


class MeasurementRecord(BaseModel):
    """What one probe found. Bytes are integers, times are seconds, `date` is ISO 8601 in UTC.

    `step_seconds` holds one sample per whole optimizer step, after warm-up, from the second step
    on; `images_per_second` is images of one optimizer step on this device over their median.
    On the CPU `peak_allocated_bytes` is the growth of the worker's peak resident set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    format: int = RECORD_FORMAT
    probe_id: str = Field(default="", description="unique; one probe is counted once by it")
    model: SwinConfig | FactoryModel
    setting: TrainSetting
    device: DeviceInfo
    versions: dict[str, str]
    date: str
    status: ProbeStatus
    message: str = Field(default="", description="why, where the status is not `measured`")
    phase: str = Field(default="", description="where it ended: forward, backward, optimizer …")
    step_seconds: tuple[Annotated[float, Field(gt=0)], ...] = ()
    images_per_second: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    phases: PhaseBytes | None = None
    compile_seconds: float | None = None
    probe_seconds: float = 0.0
    clocks: Clocks | None = None
    flags: tuple[str, ...] = Field(default=(), description="what may have disturbed the samples")

    @property
    def cut_short(self) -> bool:
        """Whether the budget ended it: then it says a probe's cost, and nothing of its setting."""
        return BUDGET_ENDED in self.flags
