"""A GPU: its memory and its rates, with the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# PCIe 4.0 x16, bytes/s one way (16 GT/s, 128 bits of 130 are data): taken where a device's link to
# the host is not known.
ASSUMED_LINK = 31.5e9


@dataclass(frozen=True)
class Gpu:
    """One device. Memory in bytes, rates in FLOP/s (dense, a multiply-add is two) and bytes/s.

    `memory_bytes` is what the driver reports as total, or the marketed size read as GiB where no
    report was found (`sources["memory_bytes"]` says which). A rate is None where the device has no
    such unit. `sources` maps a field to where its figure comes from. `capability` is CUDA's, None
    where the device is not NVIDIA's. `device_names` are what its driver calls it. `fp32_flops` is
    that of a matmul at full precision (on AMD the matrix units'). `memory_type` is "HBM2e",
    "GDDR6X" and the like, "" where it is not known. `link_bandwidth` is that to the host, one way;
    None where it is not known.
    """

    name: str
    title: str
    vendor: str
    architecture: str
    capability: tuple[int, int] | None
    memory_bytes: int
    bandwidth: float
    fp32_flops: float
    tf32_flops: float | None
    bf16_flops: float | None
    fp16_flops: float | None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    device_names: tuple[str, ...] = ()
    num_sms: int | None = None
    boost_mhz: int | None = None
    memory_type: str = ""
    link_bandwidth: float | None = None

    @property
    def threads_per_sm(self) -> int:
        """The most that reside on one multiprocessor (CUDA C++ Programming Guide, technical
        specifications per compute capability); 2,048 where it is not NVIDIA's."""
        if self.capability is None:
            return 2048
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1)) else 2048

    @property
    def fp8_flops(self) -> float | None:
        """Twice bf16's from capability 8.9 on, dense and with FP32 accumulation: H100 2,000 TFLOP/s
        against 1,000 (NVIDIA Hopper Architecture In-Depth, table 3), L40S 733 against 362 (its
        datasheet), RTX 4090 330 against 165 (Ada GPU Architecture whitepaper v2.02, appendix A),
        RTX 5090 419 against 209.5 (RTX Blackwell whitepaper, table 3), B200 4,500 against 2,250
        (glennklockwood.com, B200). Of others it is assumed."""
        if self.bf16_flops is None or (self.capability or (0, 0)) < (8, 9):
            return None
        return 2 * self.bf16_flops

    @property
    def has_bf16(self) -> bool:
        """Whether autocast to bf16 is worth having: the device has bf16 matrix units."""
        return self.bf16_flops is not None
