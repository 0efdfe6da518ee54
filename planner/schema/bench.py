"""A benchmark of window attention: what is timed, and what was found, as one JSON line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.schema.model import Library, SwinConfig
from planner.schema.record import Clocks, DeviceInfo
from planner.schema.setting import TrainSetting

BENCH_FORMAT = 1
# Those that attention is timed in: fp8 is one of linear layers only.
BenchPrecision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[BenchPrecision, ...] = ("fp32", "tf32", "bf16", "fp16")
# How attention is computed: written out, by one fused call, and either of them compiled.
Path = Literal["eager", "sdpa", "compiled-eager", "compiled-sdpa"]
PATHS: tuple[Path, ...] = ("eager", "sdpa", "compiled-eager", "compiled-sdpa")
BenchStatus = Literal[
    "measured", "disagrees", "unsupported", "out_of_memory", "failed", "crashed", "timed_out"
]
Count = Annotated[int, Field(ge=1)]
# A block whose patch embedding is never run: any patch will do.
_PATCH = 4


class BenchCase(BaseModel):
    """Window attention of one block: roll, partition, q k v, attention, projection, and back.

    [batch_size, height, width, channels] in and out, without the norm, the MLP and the residual
    connection. `shape` says where the shape is from: "guide", or "native:swin_tiny stage 1".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    library: Library
    version: Literal[1, 2]
    shape: str
    batch_size: Count
    feature_map: tuple[Count, Count]
    channels: Count
    heads: Count
    window: Count
    pretrained_window: Annotated[int, Field(ge=0)] = 0
    qkv_bias: bool = True
    shifted: bool = False
    precision: BenchPrecision = "fp32"
    path: Path = "eager"

    @property
    def model(self) -> SwinConfig:
        """A Swin of one stage and two blocks, of which the second is shifted."""
        return SwinConfig(
            library=self.library,
            version=self.version,
            image_size=(self.feature_map[0] * _PATCH, self.feature_map[1] * _PATCH),
            patch_size=_PATCH,
            num_classes=1,
            embed_dim=self.channels,
            depths=(2,),
            num_heads=(self.heads,),
            window_size=self.window,
            mlp_ratio=1.0,
            qkv_bias=self.qkv_bias,
            drop_path_rate=0.0,
            pretrained_window_size=(self.pretrained_window,),
        )

    @property
    def setting(self) -> TrainSetting:
        compiled, _, attention = self.path.rpartition("-")
        return TrainSetting.model_validate(
            {
                "batch_size": self.batch_size,
                "precision": self.precision,
                "attention": attention,
                "compile": "default" if compiled else "off",
            }
        )

    @property
    def is_compiled(self) -> bool:
        return self.path.startswith("compiled-")


class Timing(BaseModel):
    """Seconds: the median, and the interval that holds the true one with 95% (`certain`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    median: Annotated[float, Field(gt=0)]
    low: Annotated[float, Field(gt=0)]
    high: Annotated[float, Field(gt=0)]
    certain: bool
    samples: Count


class Work(BaseModel):
    """What a pass does, counted on shapes: FLOPs (a multiply-add is two), bytes read and written by
    each operation (compiled: by each fused one), and operations that do something."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    flops: int
    moved_bytes: int
    operations: int


class Peaks(BaseModel):
    """What shares are of, FLOP/s of a matmul in the case's precision and bytes/s of a copy, and how
    they are known."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    flops: float | None
    bandwidth: float
    basis: str


class BenchOutcome(BaseModel):
    """What the process that measures says of one case. `difference` is the largest of output and
    input gradient from float64, relative to its norm; it is held against `tolerance`.

    `peak_bytes` is what a forward and backward take above what was there before them;
    `saved_bytes` what autograd keeps between the two, but for weights, buffers and the input.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    status: BenchStatus
    message: str = ""
    difference: float | None = None
    tolerance: float | None = None
    forward: Timing | None = None
    backward: Timing | None = None
    both: Timing | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    clocks: Clocks | None = None
    flags: tuple[str, ...] = ()


class BenchRecord(BenchOutcome):
    """One case on one device. Times are seconds, `date` is ISO 8601 in UTC.

    `peak_from` says whether the peak was measured, or read off the ledger.
    """

    bench: Literal["attention"] = "attention"
    format: int = BENCH_FORMAT
    case: BenchCase
    device: DeviceInfo
    versions: dict[str, str]
    date: str
    forward_work: Work | None = None
    backward_work: Work | None = None
    peak_from: Literal["measured", "ledger"] | None = None
    peaks: Peaks | None = None

    @property
    def flops_per_second(self) -> float | None:
        """Over forward and backward."""
        if self.both is None or self.forward_work is None or self.backward_work is None:
            return None
        return (self.forward_work.flops + self.backward_work.flops) / self.both.median

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s, read and written, over forward and backward."""
        if self.both is None or self.forward_work is None or self.backward_work is None:
            return None
        moved = self.forward_work.moved_bytes + self.backward_work.moved_bytes
        return moved / self.both.median

    @property
    def flop_share(self) -> float | None:
        """Of the device's matmul rate."""
        reached = self.flops_per_second
        if reached is None or self.peaks is None or not self.peaks.flops:
            return None
        return reached / self.peaks.flops

    @property
    def bandwidth_share(self) -> float | None:
        """Of the device's copy rate."""
        reached = self.bandwidth
        return None if reached is None or self.peaks is None else reached / self.peaks.bandwidth
