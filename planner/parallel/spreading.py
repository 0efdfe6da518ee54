"""A module spread over the ranks of a world as a setting says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.errors import UnsupportedError
from planner.schema import TrainSetting


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Spread(Protocol):
    """`module` is what is called in the place of the module that was spread."""

    @property
    def module(self) -> nn.Module: ...

    def micro_batch(self, sums_gradients: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch, after which gradients are summed over
        the ranks, or are not yet."""


def spread_as_set(
    module: nn.Module, blocks: Callable[[], Sequence[nn.Module]], setting: TrainSetting,
    device: torch.device,
) -> Spread | None:  # fmt: skip
    """`module` over the ranks of the world that this process has joined, in place where it is
    sharded: then its `blocks` are units of their own. None where `setting` spreads nothing.

    Raises UnsupportedError for what no probe runs.
    """
    if setting.parallelism == "none":
        return None
    if setting.parallelism == "ddp":
        from planner.parallel.data_parallel import DataParallel

        return DataParallel(module, setting, device)
    if setting.parallelism in ("fsdp", "hsdp"):
        from planner.parallel.fully_sharded import fully_sharded

        return fully_sharded(module, blocks(), setting, device)
    raise UnsupportedError(
        f"a probe does not run parallelism {setting.parallelism}: DeepSpeed's engine takes the "
        "place of the step that is measured.",
        "Choose parallelism ddp, fsdp or hsdp.",
    )
