"""DistributedDataParallel: every rank has the whole model, and gradients are summed in buckets."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from planner.core.errors import UnsupportedError
from planner.core.schema import TrainSetting

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class DataParallel:
    """`module` under DDP, with the options of `setting`."""

    def __init__(self, module: nn.Module, setting: TrainSetting, device: torch.device) -> None:
        refuse_unsupported(setting, device.type)
        with warnings.catch_warnings():
            # torch 2.13 asks for forward_sync_buffers in its place. That one still sends all
            # buffers as DDP is made, and no earlier torch has it.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.module = DistributedDataParallel(
                module,
                device_ids=None if device.type == "cpu" else [device.index],
                gradient_as_bucket_view=setting.ddp_bucket_view,
            )
        if setting.ddp_compression != "none":
            self.module.register_comm_hook(None, _HOOKS[setting.ddp_compression])

    def micro_batch(self, sums_gradients: bool) -> AbstractContextManager[object]:
        return nullcontext() if sums_gradients else self.module.no_sync()


def refuse_unsupported(setting: TrainSetting, device_type: str) -> None:
    """Raises UnsupportedError for what DDP does not do on a device (seen in torch 2.13: a
    TypeError); what it does on none, `planner.libraries.limits` says."""
    if setting.ddp_compression == "bf16" and device_type == "cpu":
        raise UnsupportedError(
            "ddp_compression bf16 needs NCCL, and ranks on the CPU have gloo.",
            "Set ddp_compression=fp16 or none.",
        )
