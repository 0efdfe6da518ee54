"""What fp32 matrix work is done in while a probe runs."""

from __future__ import annotations

import torch

from search.probe.protocol import ProbeRequest


def has_tf32(device: str) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability(device) >= (8, 0)


def set_precision(request: ProbeRequest) -> None:
    """What fp32 matrix work is done in, said both ways: torch's defaults differ by operation.

    fp32 is fp32 everywhere; tf32 is tf32 wherever it can be. Under autocast what stays fp32 is as
    by default: matmul in fp32, cuDNN's convolutions in tf32.
    """
    precision = request.setting.precision
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
