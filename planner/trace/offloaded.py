"""torchao's CPUOffloadOptimizer on fake tensors: it asks for CUDA's streams, and so the trace has
this in its place. `planner/step/optimizers/offloaded.py` does the same on shapes; change both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.schema import TrainSetting
from planner.ledger.ledger import GRADIENT_TO_HOST, IN_BACKWARD, WEIGHT_TO_DEVICE
from planner.step.optimizers.offloaded import SMALLEST
from planner.trace.costs import transfer_cost
from planner.trace.recorder import Recorder


class Offloaded:
    """What a training asks of its optimizer."""

    def __init__(
        self,
        recorder: Recorder,
        setting: TrainSetting,
        parameters: list[nn.Parameter],
        make: Callable[..., torch.optim.Optimizer],
    ) -> None:
        self.recorder, self.parameters = recorder, parameters
        self.frees = setting.offload_optimizer == "state-and-gradients"
        small = [p for p in parameters if p.numel() < SMALLEST]
        self.on_device = make(small) if small else None
        self.moved = [p for p in parameters if p.numel() >= SMALLEST]
        for parameter in self.moved:
            parameter.register_post_accumulate_grad_hook(self._send_gradient)

    def __getattr__(self, name: str) -> Any:
        """Groups, state and hooks are those of what stays on the device."""
        return getattr(self.on_device, name)

    def _send_gradient(self, parameter: Tensor) -> None:
        event = transfer_cost(GRADIENT_TO_HOST, parameter, IN_BACKWARD)
        self.recorder.events.append(event._replace(kernels=0))
        if self.frees:
            parameter.grad = None

    def step(self) -> None:
        if self.on_device is not None:
            self.on_device.step()
        for parameter in self.moved:
            self.recorder.events.append(transfer_cost(WEIGHT_TO_DEVICE, parameter, ""))

    def zero_grad(self, set_to_none: bool) -> None:
        assert set_to_none
        for parameter in self.parameters:
            parameter.grad = None
