"""Which precisions a probe's device computes in."""

from __future__ import annotations

import torch

from planner.machine.hardware.precisions import CPU_PRECISIONS, lacking_error, precisions_of
from search.probe.protocol import ProbeRequest


def offered_precisions(request: ProbeRequest) -> tuple[str, ...]:
    """What the probe's device computes in at speed. ROCm's answer to the question of a capability
    is of another count."""
    if request.device == "cpu":
        return CPU_PRECISIONS
    vendor = "AMD" if torch.version.cuda is None else "NVIDIA"
    known = request.capability or torch.cuda.get_device_capability(request.device)
    return precisions_of(vendor, known)


def check_matrix_units(request: ProbeRequest) -> None:
    """Raises UnsupportedError for tf32 and fp8 on a device without units for them: torch computes
    the one in fp32 there, and the other not at all."""
    precision = request.setting.precision
    if precision in ("tf32", "fp8"):
        offered = offered_precisions(request)
        if precision not in offered:
            raise lacking_error(request.device, precision, offered)
