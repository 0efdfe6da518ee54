"""The largest batch that fits. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from planner.errors import UnsupportedError
from planner.estimation import Estimate, judge, resolve
from planner.hardware.gpu import Gpu
from planner.hardware.precisions import check_precision
from planner.ledgers import step_ledger
from planner.libraries.limits import largest_sdpa_batch
from planner.memory.allocator_config import AllocatorConfig
from planner.schema import SwinConfig, TrainSetting
from planner.schema.model import MAX_SIZE

# Batches looked at above the one that bisection finds: 7 ms each for a tiny Swin on a CPU core.
MAX_LOOKS = 200


def largest_batch(
    model: SwinConfig,
    setting: TrainSetting,
    gpu: Gpu | None = None,
    memory_bytes: int | None = None,
    ceiling: int = MAX_SIZE,
    allocator: AllocatorConfig | None = None,
) -> Estimate | None:
    """The estimate at the largest batch up to `ceiling` that fits, or None where none does; with
    sdpa no larger one than its kernel takes.

    What is live rises with the batch; what the allocator keeps beside it goes up and down, so a
    larger batch may fit where a smaller one does not. Bisection finds a batch that fits, and the
    last one whose live bytes do; between them every batch is looked at, from above. Where they are
    more than `MAX_LOOKS`, only so many of them are, and the estimate's `assumed` says so.
    Raises UnsupportedError without a budget.
    """
    if gpu is None and memory_bytes is None:
        raise UnsupportedError(
            "the largest batch that fits needs a memory to fit into, and none was named.",
            "Add --gpu NAME or --memory SIZE.",
        )

    check_precision(gpu, setting.precision)
    setting = resolve(model, setting.model_copy(update={"batch_size": 1}))[1]
    if setting.attention == "sdpa":
        ceiling = min(ceiling, largest_sdpa_batch(model, setting) or ceiling)

    @cache
    def at(batch_size: int) -> Estimate:
        chosen = setting.model_copy(update={"batch_size": batch_size})
        ledger = step_ledger(model, chosen)
        return judge(model, chosen, ledger, gpu, memory_bytes, allocator)

    def fits(batch_size: int) -> bool:
        return bool(at(batch_size).fits)

    def may_fit(batch_size: int) -> bool:
        found = at(batch_size)
        assert found.budget_bytes is not None, "a GPU or a memory was named"
        least = found.device_total_bytes - found.breakdown["allocator_overhead"]
        return least <= found.budget_bytes

    last = _last(may_fit, ceiling)
    low = _last(fits, last)
    stride = max(1, -(-(last - low) // MAX_LOOKS))
    best = next((b for b in range(last, low, -stride) if fits(b)), low)
    best = next((b for b in range(min(best + stride - 1, last), best, -1) if fits(b)), best)
    if best == 0:
        return None
    return replace(at(best), assumed=(*at(best).assumed, *_notes(best, last, stride, ceiling)))


def _last(holds: Callable[[int], bool], ceiling: int) -> int:
    """A number up to `ceiling` that `holds`, and the next does not: the last one where what holds
    once holds for all below. 0 where 1 does not."""
    low, high = 0, 1
    while high <= ceiling and holds(high):
        low, high = high, high * 2
    high = min(high, ceiling + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _notes(best: int, last: int, stride: int, ceiling: int) -> list[str]:
    if best == ceiling:
        return [f"batches above {ceiling:,} are not looked at"]
    if stride > 1:
        return [
            f"of the batches above {best:,}, whose live bytes would fit up to {last:,}, one in "
            f"{stride} was looked at"
        ]
    return []
