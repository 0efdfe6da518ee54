"""The largest batch that fits, and the advice where none does. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from planner.core.errors import UnsupportedError
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.model import MAX_SIZE
from planner.estimation.arguments import ModelLike, SettingLike, Target, read_target
from planner.estimation.estimate import Estimate, estimate_ledger, read_model_and_setting, resolve
from planner.estimation.ledgers import record_ledgers, step_ledger
from planner.libraries.limits import SDPA_WINDOWS, batch_multiple, largest_sdpa_batch
from planner.machine.hardware import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.throughput.result import TrainingLength


def largest_batch(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    link: str | None = None,
    recorded: bool = False,
    ceiling: int = MAX_SIZE,
    surely: bool = False,
    **overrides: Any,
) -> Estimate | None:
    """The estimate at the largest batch found up to `ceiling` that fits while the next does not;
    None where none fits. With sdpa it is at most the batch that its kernel takes, with fp8 a
    multiple of 16. With `surely` even the upper end of its range fits. The other arguments are
    those of `planner.estimate`.

    The live bytes rise with the batch; what the allocator keeps beside them goes up and down, so
    that a still larger batch may fit too. Raises UnsupportedError without a budget.
    """
    target = read_target(gpu, memory_bytes, allocator, link, recorded)
    asked = read_model_and_setting(model, setting, target.gpu, overrides)
    return largest_that_fits(*asked, target, ceiling, surely)


def largest_that_fits(
    model: Model, setting: TrainSetting, target: Target, ceiling: int = MAX_SIZE,
    surely: bool = False,
) -> Estimate | None:  # fmt: skip
    """`largest_batch`, of arguments that were read."""
    if target.budget_bytes is None:
        raise UnsupportedError(
            "the largest batch needs a memory size to fit into.", "Add --gpu NAME or --memory SIZE."
        )
    unit = batch_multiple(setting)
    model, resolved = resolve(model, setting.model_copy(update={"batch_size": unit}))
    if resolved.attention == "sdpa" and isinstance(model, SwinConfig):
        ceiling = min(ceiling, largest_sdpa_batch(model, resolved) or ceiling)
    ceiling //= unit  # from here on batches count units

    @cache
    def estimate_at(batch: int) -> Estimate:
        chosen = resolved.model_copy(update={"batch_size": batch * unit})
        ledger = step_ledger(model, chosen, target.recorded, target.gpu)
        return estimate_ledger(model, chosen, ledger, target)

    def spare_bytes(batch: int) -> int:
        """What is left of the budget, with `surely` in the worst case; negative where the batch
        does not fit."""
        estimate = estimate_at(batch)
        need = estimate.high_bytes if surely else estimate.device_total_bytes
        spare = (estimate.budget_bytes or 0) - need
        return spare if estimate.fits else min(spare, -1)

    largest = 0
    if ceiling >= 2 and spare_bytes(2) >= 0:
        largest = find_crossing(spare_bytes, 2, 16, ceiling + 1)
    elif ceiling and runs_at_1(model, resolved, target) and spare_bytes(1) >= 0:
        largest = 1
    if not largest:
        return None
    estimate = estimate_at(largest)
    end = [f"batches above {ceiling * unit:,} are not tried"] if largest == ceiling else []
    return replace(estimate, assumed=(*estimate.assumed, *end))


def describe_kind(setting: TrainSetting) -> str:
    """What tells the rows of --max-batch apart whose precision or checkpointing nobody chose."""
    return f"{setting.precision}, checkpointing {setting.checkpointing}"


@dataclass(frozen=True)
class Largest:
    """The largest batch of a setting: `best` fits by the figures, `sure` even at the upper end of
    its range; None where no batch does."""

    model: Model
    setting: ResolvedSetting
    best: Estimate | None
    sure: Estimate | None = None

    @property
    def batch_size(self) -> int:
        return self.best.setting.batch_size if self.best else 0

    @property
    def sizes(self) -> dict[str, int]:
        """The largest batches that surely and that probably fit; 0 where none does."""
        surely = self.sure.setting.batch_size if self.sure else 0
        return {"surely": surely, "probably": self.batch_size}

    def as_json(self) -> dict[str, Any]:
        """As `planner estimate --max-batch --json` prints it."""
        return {
            "precision": self.setting.precision,
            "checkpointing": self.setting.checkpointing,
            "largest_batch_size": self.batch_size,
            "estimate": self.best,
        }


def find_largest(
    model: Model, setting: ResolvedSetting, target: Target, length: TrainingLength | None
) -> Largest:
    """The largest batches that fit, with how long a training of that `length` takes."""
    sure = best = largest_that_fits(model, setting, target)
    if best and not best.fits_surely:
        sure = largest_that_fits(model, setting, target, best.setting.batch_size, surely=True)
    best, sure = (estimate and estimate.with_cost(length) for estimate in (best, sure))
    return Largest(model, setting, best, sure)


def largest_notes(rows: Sequence[Largest]) -> list[str]:
    """Which settings fit at no batch, and where sdpa's kernel takes no larger one."""
    notes = [_nothing_fits(row.setting) for row in rows if row.best is None]
    limits = [
        row.batch_size for row in rows
        if row.best and row.setting.attention == "sdpa" and isinstance(row.model, SwinConfig)
        and row.batch_size == largest_sdpa_batch(row.model, row.setting)
    ]  # fmt: skip
    if limits:
        notes.append(
            f"Batch {limits[0]} is all that sdpa takes, however much memory there is: its kernel "
            f"takes {SDPA_WINDOWS:,} windows. --attention eager takes more."
        )
    return notes


def _nothing_fits(setting: TrainSetting) -> str:
    ways = ["a smaller image or model"]
    if setting.checkpointing == "none":
        ways.insert(0, "--checkpointing blocks")
    if setting.precision in ("fp32", "tf32"):
        ways.insert(0, "--precision bf16")
    if setting.optimizer_family != "sgd":
        ways.append("--optimizer sgd")
    smallest = batch_multiple(setting)
    return f"Not even batch {smallest} fits with {describe_kind(setting)}. Try {', '.join(ways)}."


def runs_at_1(model: Model, setting: ResolvedSetting, target: Target) -> bool:
    """Whether the step runs at a batch of 1, at which batch norm over the batch alone fails."""
    at_1 = setting.model_copy(update={"batch_size": 1})
    return record_ledgers([(model, at_1, target.gpu)], recorded=target.recorded)[0] is None


def find_crossing(spare_bytes: Callable[[int], int], low: int, guess: int, end: int) -> int:
    """A number from `low` and below `end` at which `spare_bytes` is 0 or more, and at the next less
    than 0; it is 0 or more at `low`. Each guess lies where the line through the last two crosses
    0; every third halves the interval."""
    spare, high = {low: spare_bytes(low)}, end
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        spare[guess] = spare_bytes(guess)
        fall = spare[low] - spare[guess]
        crossing = low + spare[low] * (guess - low) // fall if fall > 0 else 4 * guess
        low, high = (guess, high) if spare[guess] >= 0 else (low, guess)
        is_bounded = high < end and len(spare) % 3 == 0
        guess = (low + high) // 2 if is_bounded else crossing
    return low
