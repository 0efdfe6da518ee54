"""ZeRO: DeepSpeed's engine shards the optimizer's state, from stage 2 on the gradients too, and in
stage 3 the weights too.

The engine runs backward and updates the weights, and so it takes the place of these parts of a
step.
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

# Modules that `deepspeed.initialize` imports (0.19.8). The first compiles a function, which imports
# torch._inductor: 40 MiB.
_IMPORTED_LATER = (
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer",
)  # fmt: skip


class ZeroEngine:
    """A module under the stage that `setting` names. From `begin` on the engine runs backward,
    clips, scales, updates the weights and drops the gradients.

    Stage 1 sums gradients in the last micro-batch, the other stages in each, whatever the setting
    says: their engine refuses `no_sync`.
    """

    def __init__(self, setting: TrainSetting, device: torch.device) -> None:
        refuse_unsupported(setting)
        self.setting, self.device = setting, device
        self.engine: Any = None

    def begin(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Take over `module` and `optimizer`. Returns the engine, to be called like the module."""
        deepspeed = import_deepspeed(self.device.type)
        local_rank = distributed.get_rank() if self.device.index is None else self.device.index
        os.environ |= {
            "RANK": str(distributed.get_rank()),
            "WORLD_SIZE": str(distributed.get_world_size()),
            "LOCAL_RANK": str(local_rank),  # the device that the engine chooses
        }
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=configuration(self.setting),
            dist_init_required=False,
        )  # fmt: skip
        engine: nn.Module = self.engine
        return engine

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        scaler: torch.amp.GradScaler | None = self.engine.optimizer.torch_autocast_gradscaler
        return scaler

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)  # `forward` divided by `accumulate`
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # which only counts the micro-batch

    def step(self) -> None:
        self.engine.step()


def refuse_unsupported(setting: TrainSetting) -> None:
    """Raise UnsupportedError without DeepSpeed, and for settings that it cannot run."""
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
    """DeepSpeed for devices of one type, with the modules that it would import later: their memory
    must not count as a setting's.

    On the CPU it would compile its own collective (deepspeed_shm_comm) in a folder that all
    processes of a user share, and wait for the file that locks it: for ever, if the process that
    made the file was killed (DeepSpeed 0.19.8, comm/torch.py; torch 2.13, utils/file_baton.py).
    Here no operator is declared compatible, so that tensors go by gloo.
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
