"""What devices do together, by the names of torch.distributed."""

from __future__ import annotations

from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
# Which devices take part: all, those that share one set of shards, those that hold the same shard.
Group = Literal["world", "shard", "replicate"]
