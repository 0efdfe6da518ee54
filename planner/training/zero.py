"""ZeRO: DeepSpeed's engine shards the optimizer's state, gradients too, weights too, by stage.

It runs backward and updates weights by itself, and so it takes the place of those parts of a step.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from planner.core.errors import UnsupportedError
from planner.core.schema import TrainSetting
from planner.training.setting import configuration

# What `deepspeed.initialize` imports (0.19.8); the first by compiling a function brings in
# torch._inductor: 40 MiB.
_IMPORTED_LATER = (
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer",
)  # fmt: skip


class ZeroEngine:
    """A module under the stage that `setting` names, from `begin` on: the engine runs backward,
    clips, scales, updates the weights and lets go of the gradients by itself.

    Stage 1 sums gradients in the last micro-batch, the others in each, whatever is asked: their
    engine refuses `no_sync`.
    """

    def __init__(self, setting: TrainSetting, device: torch.device) -> None:
        refuse_unsupported(setting)
        self.setting, self.device = setting, device
        self.engine: Any = None

    def begin(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Takes `optimizer` over; what is called in the place of `module` from then on."""
        deepspeed = import_deepspeed(self.device.type)
        local = distributed.get_rank() if self.device.index is None else self.device.index
        os.environ |= {
            "RANK": str(distributed.get_rank()),
            "WORLD_SIZE": str(distributed.get_world_size()),
            "LOCAL_RANK": str(local),  # the device that the engine chooses
        }
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=configuration(self.setting),
            dist_init_required=False,
        )  # fmt: skip
        called: nn.Module = self.engine
        return called

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        found: torch.amp.GradScaler | None = self.engine.optimizer.torch_autocast_gradscaler
        return found

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)  # it was divided by `accumulate`
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # only counts

    def step(self) -> None:
        self.engine.step()


def refuse_unsupported(setting: TrainSetting) -> None:
    """Raises UnsupportedError without DeepSpeed, and for what the configuration does not say."""
    if find_spec("deepspeed") is None:
        raise UnsupportedError(
            f"parallelism {setting.parallelism} is DeepSpeed's, which is not installed.",
            "Install deepspeed, or choose parallelism ddp, fsdp or hsdp.",
        )
    if setting.precision == "pure-bf16":
        raise UnsupportedError(
            "pure-bf16 under DeepSpeed (bf16.enabled) adds fp32 copies of the weights: no trainer "
            "is written for it, and no probe runs it.",
            "Set precision=bf16.",
        )
    if setting.compile != "off":
        raise UnsupportedError(
            f"a probe under DeepSpeed compiles nothing, and compile is {setting.compile}.",
            "Set compile=off, or choose parallelism ddp or fsdp.",
        )
    if not setting.zero_grad_to_none:
        raise UnsupportedError(
            "DeepSpeed always sets gradients to None, and zero_grad_to_none is false.",
            "Set zero_grad_to_none=true.",
        )


def import_deepspeed(device_type: str) -> Any:
    """DeepSpeed for devices of one type, with what it would import later, which is no setting's
    memory.

    On the CPU it would compile a collective of its own (deepspeed_shm_comm) in a folder that all
    processes of a user share, and wait for the file that locks it: for ever, where the process that
    made that was killed (DeepSpeed 0.19.8, comm/torch.py; torch 2.13, utils/file_baton.py). With
    no operator that is compatible, as here, tensors go by gloo.
    """
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = importlib.import_module("deepspeed")
    for name in _IMPORTED_LATER:
        with suppress(ImportError):  # of another version
            importlib.import_module(name)
    if device_type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed
