"""What fp32 matrix work is done in while a probe runs, and how cuDNN chooses its algorithms."""

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


def set_precision(request: ProbeRequest) -> None:
    """What fp32 matrix work is done in, said both ways: torch's defaults differ by operation.

    fp32 is fp32 everywhere; tf32 is tf32 wherever it can be. Under autocast what stays fp32 is as
    by default: matmul in fp32, cuDNN's convolutions in tf32.

    A user's module may have said otherwise when it was loaded, and by the API of torch 2.9. What
    that API set for a whole backend comes through wherever the older one says no more than "not
    tf32", and their getters raise where the two disagree; Inductor asks them. So it is unset first.
    """
    for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
        backend.fp32_precision = "none"  # type: ignore[attr-defined]
    precision = request.setting.precision
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = request.setting.cudnn_benchmark
