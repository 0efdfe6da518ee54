"""FSDP2: weights, gradients and the optimizer's state are sharded, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from planner.core.schema import TrainSetting

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sharded:
    """`module`, which `shard_in_place` sharded."""

    module: nn.Module

    def micro_batch(self, sums_gradients: bool) -> AbstractContextManager[object]:
        """As accelerate and Lightning do it, and the scripts that are emitted: nothing is said of
        a last backward, so that each is one to FSDP2."""
        root: Any = self.module
        root.set_requires_gradient_sync(sums_gradients)
        return nullcontext()


def fully_sharded(
    module: nn.Module, blocks: Sequence[nn.Module], setting: TrainSetting, device: torch.device
) -> Sharded:
    """`module` under `fully_shard`, in place: each of `blocks` is a unit, and the rest is the
    root's, whose weights stay gathered after forward (torch's default for a root)."""
    shard_in_place(module, blocks, setting, make_mesh(setting, device.type))
    if device.type == "cpu":
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no averages
    return Sharded(module)


def shard_in_place(
    module: nn.Module, blocks: Sequence[nn.Module], setting: TrainSetting, mesh: DeviceMesh
) -> None:
    """Shards each of `blocks`, and then what is left of `module`."""
    policy = precision_policy(setting)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=setting.fsdp_reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def make_mesh(setting: TrainSetting, device_type: str) -> DeviceMesh:
    """All ranks in one row; for hsdp rows of `shard_size` ranks, each a copy of the others."""
    world, shard = distributed.get_world_size(), setting.shard_size
    if setting.parallelism == "hsdp":
        return init_device_mesh(
            device_type, (world // shard, shard), mesh_dim_names=("replicate", "shard")
        )
    return init_device_mesh(device_type, (world,))


def precision_policy(setting: TrainSetting) -> MixedPrecisionPolicy:
    """Weights that are gathered in fp32 are gathered as they are: nothing casts them."""
    param, reduce = setting.fsdp_param_dtype, setting.fsdp_reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=None if param == "fp32" else _DTYPES[param], reduce_dtype=_DTYPES[reduce]
    )
