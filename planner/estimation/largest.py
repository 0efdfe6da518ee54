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
from planner.estimation.estimate import Estimate, estimate_ledger, read_choice, resolve
from planner.estimation.ledgers import record_ledgers, step_ledger
from planner.ledger.ledger import Ledger
from planner.libraries.limits import SDPA_WINDOWS, batch_unit, largest_sdpa_batch
from planner.machine.hardware.gpu import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.throughput.result import Training

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
    """The estimate at a batch up to `ceiling` that fits, of which the next does not, or None where
    none does; with sdpa no larger one than its kernel takes, with fp8 only multiples of 16.
    `allocator` None means torch's defaults; with `retries` a step fits, too, that runs only where
    the allocator frees cached memory; all else is as `planner.estimate` takes it. With `surely` it
    is one of which even the upper end of what is expected fits.

    What is live rises with the batch; what the allocator keeps beside it goes up and down, so that
    a larger batch may fit, too. Raises UnsupportedError without a budget.
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

    def spare_bytes(batch: int) -> int:
        """What is left of the budget, in the worst case with `surely`; less than 0 where it does
        not fit."""
        found = at(batch)
        need = found.high_bytes if surely else found.device_total_bytes
        spare = (found.budget_bytes or 0) - need
        return spare if found.fits else min(spare, -1)

    found = 0
    if ceiling >= 2 and spare_bytes(2) >= 0:
        found = sought(spare_bytes, 2, 16, ceiling + 1)
    elif ceiling and runs_at_1(config, resolved, recorded, device) and spare_bytes(1) >= 0:
        found = 1
    if not found:
        return None
    ended = [f"batches above {ceiling * unit:,} are not looked at"] if found == ceiling else []
    return replace(at(found), assumed=(*at(found).assumed, *ended))


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
