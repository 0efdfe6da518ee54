"""What fp32 matrix work is done in while a probe runs, and how cuDNN chooses its algorithms."""

from __future__ import annotations

import torch

from planner.errors import UnsupportedError
from planner.schema.setting import CUDNN_BENCHMARK
from search.probe.protocol import ProbeRequest


def has_tf32(request: ProbeRequest) -> bool:
    """Whether the device has tf32 matrix units: NVIDIA's do from 8.0 on. ROCm's answer to the same
    question is of another count."""
    if request.device == "cpu" or torch.version.cuda is None:
        return False
    known = request.capability or torch.cuda.get_device_capability(request.device)
    return known >= (8, 0)


def check_float8(request: ProbeRequest) -> None:
    """Raises UnsupportedError where the setting multiplies in 8 bits and the device does not."""
    if request.setting.precision != "fp8":
        return
    is_cuda = request.device != "cpu" and torch.version.cuda is not None
    known = request.capability or (
        torch.cuda.get_device_capability(request.device) if is_cuda else None
    )
    if not is_cuda or known is None or known < (8, 9):
        raise UnsupportedError(
            "precision fp8 needs an NVIDIA GPU of compute capability 8.9 or more, and the probe's "
            f"device is {request.device}.",
            "Set precision=bf16.",
        )


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
    torch.backends.cudnn.benchmark = CUDNN_BENCHMARK
