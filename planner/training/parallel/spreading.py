"""A module spread over the ranks of a world as a setting says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from planner.core.schema import TrainSetting
from planner.core.schema.distribution import DEEPSPEED
from planner.training.parallel.spread import Spread


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
        from planner.training.parallel.data_parallel import DataParallel

        return DataParallel(module, setting, device)
    if setting.parallelism in ("fsdp", "hsdp"):
        from planner.training.parallel.fully_sharded import fully_sharded

        return fully_sharded(module, blocks(), setting, device)
    assert setting.parallelism in DEEPSPEED
    from planner.training.parallel.zero import ZeroSharded

    return ZeroSharded(module, setting, device)
