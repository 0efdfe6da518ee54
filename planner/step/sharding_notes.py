"""What a ledger of sharded weights rests on, in words."""

from __future__ import annotations

from planner.core.schema import TrainSetting


def sharding_notes(
    setting: TrainSetting, num_blocks: int, num_outside: int, rank: int
) -> tuple[str, ...]:
    """Of a model with `num_blocks` units besides itself, and `num_outside` parameters in none of
    them, on device `rank`."""
    what = f"{num_blocks} blocks and the rest of the model"
    stay = f"the {num_outside:,} parameters outside the blocks stay"
    if not num_blocks:
        what, stay = "the model as one unit", "all parameters stay"
    elif not setting.fsdp_reshard:
        stay = "all parameters stay (fsdp_reshard=false)"
    copies = setting.num_copies
    held = f", and {copies} such groups hold a copy each" if copies > 1 else ""
    return (
        f"FSDP shards {what} over {setting.shard_size} devices{held}; {stay} whole until backward "
        "has passed them",
        f"the figures are those of rank {rank}; the first ranks have the largest shards",
    )
