"""One process as one rank of many: torch's own NCCL group over the emulated NCCL, which waits for
no other rank.

torch's NCCL holds what was sent until its watchdog, which looks every 100 ms, sees that it was
summed, and then until the next collective. On a card steps are longer than that; here one takes
20 ms, or any time on a busy host. So the watchdog sees nothing within a step, and all between two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore

from planner.core.schema import TrainSetting
from planner.core.schema.distribution import SHARDED
from planner.ledger.ledger import Category
from planner.step.ranks import sharding_notes

# FSDP2's streams (`FSDPCommContext.lazy_init`), and what lies in their pools of memory.
STREAMS: Mapping[str, Category] = {
    "all_gather_copy_in": "parameters", "all_gather": "parameters",
    "reduce_scatter": "gradients", "all_reduce": "gradients",
}  # fmt: skip


def steps_until_steady(setting: TrainSetting) -> int:
    """How many optimizer steps there are until one repeats the one before: DDP rebuilds its buckets
    after the first, and the step after still holds the old."""
    return 3 if setting.parallelism == "ddp" else 2


def join_alone(setting: TrainSetting, rank: int) -> None:
    """Makes this process one rank of the world of `setting`."""
    store = HashStore()
    distributed.init_process_group(
        "nccl", store=store, rank=rank, world_size=setting.world_size,
        timeout=timedelta(days=1),  # however long a step is in which nothing is seen to be done
    )  # fmt: skip
    _hold_watchdog(True)


def let_go() -> None:
    """What NCCL holds of the steps before is seen to be done, as where steps are long."""
    if distributed.is_available() and distributed.is_initialized():
        _hold_watchdog(False)
        distributed.group.WORLD._wait_for_pending_works()  # type: ignore[union-attr]
        _hold_watchdog(True)


def _hold_watchdog(is_held: bool) -> None:
    ctypes.CDLL("libcuda.so.1").emulated_hold_watchdog(ctypes.c_bool(is_held))


def stream_names(module: nn.Module, setting: TrainSetting) -> dict[int, str]:
    """Those that FSDP2 runs `module` on, by the addresses that the allocator's history has."""
    if setting.parallelism not in SHARDED:
        return {}
    root: Any = module
    context = root._get_fsdp_state()._comm_ctx
    return {getattr(context, f"{name}_stream").cuda_stream: name for name in STREAMS}


def whole_gradients(module: nn.Module, setting: TrainSetting) -> Iterator[Tensor]:
    """Those that FSDP2 keeps unsharded until a later micro-batch sums them."""
    for unit in _units(module) if setting.parallelism in SHARDED else ():
        group = unit._get_fsdp_state()._fsdp_param_group
        for weight in group.fsdp_params if group is not None else ():
            kept = weight.unsharded_accumulated_grad
            whole = getattr(weight, "_unsharded_param", None)
            yield from (t for t in (kept, getattr(whole, "grad", None)) if t is not None)


def world_notes(module: nn.Module, setting: TrainSetting) -> Iterator[str]:
    """How weights or gradients are spread, in words."""
    if setting.parallelism in SHARDED:
        _, *blocks = _units(module)
        inside = {id(p) for block in blocks for p in block.parameters()}
        own = sum(p.numel() for p in module.parameters() if id(p) not in inside)
        yield from sharding_notes(setting, len(blocks), own, distributed.get_rank())


def _units(module: nn.Module) -> list[Any]:
    """What FSDP2 shards each for itself, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]
