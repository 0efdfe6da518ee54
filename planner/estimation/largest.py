"""The largest batch that fits. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

from planner.core.errors import UnsupportedError
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.model import MAX_SIZE
from planner.estimation.arguments import (
    ModelLike,
    SettingLike,
    read_allocator,
    read_gpu,
    read_memory,
)
from planner.estimation.estimate import Estimate, estimate_ledger, least_bytes, read_choice, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import Ledger
from planner.libraries.limits import SDPA_WINDOWS, batch_unit, largest_sdpa_batch
from planner.machine.hardware.gpu import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.throughput.cost import Training

# Batches looked at above the one that bisection finds: next to it, where larger ones that fit were
# met (up to 58 above 668: Swin-B, blocks, 24 GiB), and further up, where none was.
NEAR_LOOKS, FAR_LOOKS = 64, 16
RETRIED = "run only if torch frees cached memory, which slows at least the first steps"


def largest_batch(
    model: ModelLike,
    setting: SettingLike | None = None,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    ceiling: int = MAX_SIZE,
    allocator: str | AllocatorConfig | None = None,
    recorded: bool = False,
    link: str | None = None,
    retries: bool = False,
    surely: bool = False,
    **overrides: Any,
) -> Estimate | None:
    """The estimate at the largest batch up to `ceiling` that fits, or None where none does; with
    sdpa no larger one than its kernel takes, with fp8 only multiples of 16. `allocator` None means
    torch's defaults; with `retries` a step fits, too, that runs only where the allocator frees
    cached memory; all else is as `planner.estimate` takes it. With `surely` it is one up to which
    even the upper end of what is expected fits, found by bisection alone.

    What is live rises with the batch; what the allocator keeps beside it goes up and down, so a
    larger batch may fit where a smaller one does not. Bisection finds a batch that fits, and the
    last one whose live bytes do; between them all batches are looked at where they are few, else
    those next to the first and some further up, and then the estimate's `assumed` says so.
    Of a step that is recorded a batch is sought by bisection alone. Raises UnsupportedError without
    a budget.
    """
    device, memory, allocator = read_gpu(gpu), read_memory(memory_bytes), read_allocator(allocator)
    if device is None and memory is None:
        raise UnsupportedError(
            "the largest batch needs a memory size to fit into.", "Add --gpu NAME or --memory SIZE."
        )
    config, wanted = read_choice(model, setting, device, overrides)
    unit = batch_unit(wanted)
    config, resolved = resolve(config, wanted.model_copy(update={"batch_size": unit}))
    if resolved.attention == "sdpa" and isinstance(config, SwinConfig):
        ceiling = min(ceiling, largest_sdpa_batch(config, resolved) or ceiling)
    ceiling //= unit  # from here on batches count units

    @lru_cache(maxsize=2)
    def ledger_at(batch: int) -> Ledger:
        return step_ledger(config, setting_at(batch), recorded, device)

    def setting_at(batch: int) -> ResolvedSetting:
        return resolved.model_copy(update={"batch_size": batch * unit})

    @cache
    def at(batch: int) -> Estimate:
        return estimate_ledger(
            config, setting_at(batch), ledger_at(batch), device, memory, allocator, link=link,
            retries=retries,
        )  # fmt: skip

    budget = at(2).budget_bytes
    assert budget is not None, "a GPU or a memory was named"

    @cache
    def may_fit(batch: int) -> bool:
        if batch * unit == 1 and not runs_at_1(config, resolved, recorded, device):
            return False
        return least_bytes(ledger_at(batch), device) <= budget

    def fits(batch: int) -> bool:
        return may_fit(batch) and bool(at(batch).fits_surely if surely else at(batch).fits)

    if not is_on_shapes(config, resolved, recorded):
        found = 0
        if ceiling >= 2 and at(2).fits:
            found = sought(lambda batch: _spare_bytes(at(batch), surely), 2, 16, ceiling + 1)
        if not found and ceiling and fits(1):
            found = 1
        return at(found) if found else None
    last = _last(may_fit, ceiling)
    low = _last(fits, last)
    if surely:
        return at(low) if low else None
    near = min(low + NEAR_LOOKS, last)
    stride = max(1, -(-(last - near) // FAR_LOOKS))
    best = _largest(fits, (low, near, last), stride)
    if best == 0:
        return None
    notes = _notes(best * unit, (near * unit, last * unit), stride, ceiling * unit)
    return replace(at(best), assumed=(*at(best).assumed, *notes))


def kind_of(setting: TrainSetting) -> str:
    """What tells the rows of a table apart that nobody chose."""
    return f"{setting.precision}, checkpointing {setting.checkpointing}"


@dataclass(frozen=True)
class Largest:
    """The largest batch of a setting: `sure` surely fits, `best` does by the figures, None where
    none does, and `most` runs where torch frees cached memory."""

    model: Model
    setting: ResolvedSetting
    best: Estimate | None
    most: int
    sure: Estimate | None = None

    @property
    def batch_size(self) -> int:
        return self.best.setting.batch_size if self.best else 0

    @property
    def sizes(self) -> dict[str, int]:
        """Of its batches: one that surely fits (0: none), the largest that does by the figures, and
        the largest that runs with retries."""
        surely = self.sure.setting.batch_size if self.sure else 0
        return {"surely": surely, "probably": self.batch_size, "retries": self.most}

    def as_json(self) -> dict[str, Any]:
        """As `planner estimate --max-batch --json` prints it."""
        return {
            "precision": self.setting.precision,
            "checkpointing": self.setting.checkpointing,
            "largest_batch_size": self.batch_size,
            "largest_with_retries": self.most,
            "estimate": self.best,
        }


def find_largest(
    model: Model, setting: ResolvedSetting, gpu: Gpu | None, memory_bytes: int | None,
    allocator: AllocatorConfig | None, recorded: bool, link: str | None, training: Training | None,
) -> Largest:  # fmt: skip
    """The largest batches that fit, with what a whole training costs, and the largest that runs."""
    find = partial(
        largest_batch, model, setting, gpu, memory_bytes, allocator=allocator, recorded=recorded,
        link=link,
    )  # fmt: skip
    best, most = find(), find(retries=True)
    sizes = [one.setting.batch_size for one in (best, most) if one]
    sure = best
    if best and not best.fits_surely:
        sure = find(ceiling=best.setting.batch_size, surely=True)
    best, sure = (one and one.with_cost(training) for one in (best, sure))
    return Largest(model, setting, best, max(sizes, default=0), sure)


def largest_notes(found: Sequence[Largest]) -> list[str]:
    """What is to be said of them: what fits nowhere, and what a larger batch would take."""
    notes = [_nothing_fits(one) for one in found if one.best is None]
    bound = [
        one.batch_size for one in found
        if one.best and one.setting.attention == "sdpa" and isinstance(one.model, SwinConfig)
        and one.batch_size == largest_sdpa_batch(one.model, one.setting)
    ]  # fmt: skip
    if bound:
        notes.append(
            f"Batch {bound[0]} is all that sdpa takes, however much memory there is: its kernel "
            f"takes {SDPA_WINDOWS:,} windows. --attention eager takes more."
        )
    return notes


def _nothing_fits(one: Largest) -> str:
    setting = one.setting
    ways = ["a smaller image or model"]
    if setting.checkpointing == "none":
        ways.insert(0, "--checkpointing blocks")
    if setting.precision in ("fp32", "tf32"):
        ways.insert(0, "--precision bf16")
    if setting.optimizer_family != "sgd":
        ways.append("--optimizer sgd")
    least = f"batch {batch_unit(setting)} fits"
    more = f" Batches up to {one.most} {RETRIED}." if one.most else ""
    return f"Not even {least} with {kind_of(setting)}. Try {', '.join(ways)}.{more}"


def runs_at_1(
    model: Model, setting: ResolvedSetting, recorded: bool = False, gpu: Gpu | None = None
) -> bool:
    """Whether the step runs at a batch of 1: batch norm over nothing but the batch does not."""
    at_1 = ResolvedSetting(setting.model_copy(update={"batch_size": 1}))
    return record_ledgers([(model, at_1, gpu)], recorded=recorded)[0] is None


def _spare_bytes(found: Estimate, surely: bool) -> int:
    """What is left of the budget, in the worst case with `surely`; less than 0 where it does not
    fit."""
    spare = (found.budget_bytes or 0) - (found.high_bytes if surely else found.device_total_bytes)
    return spare if found.fits else min(spare, -1)


def sought(spare_bytes: Callable[[int], int], low: int, guess: int, end: int) -> int:
    """The last number from `low`, which leaves 0 or more, and below `end` that does, of which the
    next leaves less: time after time where a line crosses 0, or halfway."""
    known, high = {low: spare_bytes(low)}, end
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = spare_bytes(guess)
        fall = known[low] - known[guess]
        crossing = low + known[low] * (guess - low) // fall if fall > 0 else 4 * guess
        low, high = (guess, high) if known[guess] >= 0 else (low, guess)
        is_bounded = high < end and len(known) % 3 == 0
        guess = (low + high) // 2 if is_bounded else crossing
    return low


def _last(holds: Callable[[int], bool], ceiling: int) -> int:
    """A number up to `ceiling` that `holds`, and the next does not: the last one where what holds
    once holds for all below. 0 where 1 does not. 1 is looked at only where 2 does not hold."""
    if ceiling < 2 or not holds(2):
        return int(ceiling > 0 and holds(1))
    low, high = 2, 4
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


def _largest(fits: Callable[[int], bool], places: tuple[int, int, int], stride: int) -> int:
    """The largest number found that `fits`: between `near` and `last` one in `stride` is looked at,
    then all around the first of them, else all down to `low`, which fits or is 0."""
    low, near, last = places
    best = next((b for b in range(last, near, -stride) if fits(b)), 0)
    if best:
        return next((b for b in range(min(best + stride - 1, last), best, -1) if fits(b)), best)
    return next((b for b in range(near, low, -1) if fits(b)), low)


def _notes(best: int, between: tuple[int, int], stride: int, ceiling: int) -> list[str]:
    if best == ceiling:
        return [f"batches above {ceiling:,} are not looked at"]
    if stride > 1:
        near, last = between
        return [
            f"of the batches above {near:,}, whose live bytes would fit up to {last:,}, one in "
            f"{stride} was looked at"
        ]
    return []
