"""A GPU: its memory and its rates, with the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# PCIe 4.0 x16, bytes/s one way: taken where a device's link to the host is not known.
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
    def fp8_flops(self) -> float | None:
        """Twice bf16's in every datasheet from capability 8.9 on: H100 SXM 1,979 TFLOP/s against
        989 dense, L4 242 against 121, RTX 4090 330 against 165 with FP32 accumulation (NVIDIA's
        datasheets of H100 and L4; Ada GPU Architecture whitepaper, appendix A)."""
        if self.bf16_flops is None or (self.capability or (0, 0)) < (8, 9):
            return None
        return 2 * self.bf16_flops

    @property
    def has_bf16(self) -> bool:
        """Whether autocast to bf16 is worth having: the device has bf16 matrix units."""
        return self.bf16_flops is not None
