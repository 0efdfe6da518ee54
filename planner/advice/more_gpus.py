"""What more GPUs like this one would give, and what sharing the weights among them would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.advice.table import Table
from planner.advice.wish import Choice, Wish
from planner.core.errors import PlannerError
from planner.core.schema import TrainSetting
from planner.core.schema.setting import ALONE, Parallelism
from planner.throughput.result import Cost, Training, cost_of

# What a person changes so that a step fits; a second GPU may do instead.
_FOR_MEMORY = frozenset(
    ("accumulate", "checkpointing", "offload", "optimizer_in_backward", "activation_memory_budget")
)


@dataclass(frozen=True)
class MoreGpus:
    """The wish as it stands, on other GPUs: `gpus` in all, `batch_size` images on each, by
    `parallelism` over `link`. Bytes are of one GPU, images per second of all; where one GPU's share
    of the images does not fit even by itself, the bytes are what it needs at least, and the rate is
    None. `in_place_of` are the changes for memory that the recommendation makes and this does
    without, where the wish does not fit as it stands."""

    gpus: int
    parallelism: Parallelism
    link: str | None
    batch_size: int
    device_total_bytes: int
    fits: bool
    images_per_second: float | None = None
    in_place_of: tuple[tuple[str, object], ...] = ()
    cost: Cost | None = None


def more_gpus(
    wish: Wish, table: Table, goal: Choice | None, training: Training | None = None
) -> tuple[MoreGpus, ...]:
    """Twice the GPUs of the wish, and its own with sharded weights. Empty where the link between
    them is not known, or a step of theirs is not on shapes."""
    if wish.gpu is None:
        return ()
    found = []
    alone = table.at(Choice(wish.plain))
    for changes in _changes(wish):
        try:
            setting = TrainSetting.model_validate({**wish.plain.model_dump(), **changes})
            least = _least_bytes_alone(table, setting)
            if least > (alone.budget_bytes or 0):
                gpus, kind, batch = setting.world_size, setting.parallelism, setting.batch_size
                found.append(MoreGpus(gpus, kind, wish.link, batch, least, fits=False))
                continue
            there = Table(replace(wish, plain=setting), table)
            one = _on(there, setting, wish, None if alone.fits else goal, training)
        except (PlannerError, ValueError):  # an unknown link, a kind that no such step has
            continue
        found += [one] if one is not None else []
    return tuple(found)


def _least_bytes_alone(table: Table, setting: TrainSetting) -> int:
    """What one GPU needs at least for its share of the images where each has a whole copy of the
    model: what one needs without the others. 0 where that is not so."""
    one = Choice(setting.model_copy(update=ALONE))
    if setting.parallelism != "ddp" or not table.has_step(one):
        return 0
    return table.least_bytes(one)


def _changes(wish: Wish) -> Iterator[dict[str, object]]:
    plain = wish.plain
    kind: Parallelism = "ddp" if plain.parallelism == "none" else plain.parallelism
    batch = plain.batch_size
    if wish.share is not None and batch % 2 == 0:  # the images of a step stay
        batch //= 2
    yield {"world_size": 2 * plain.world_size, "parallelism": kind, "batch_size": batch}
    if plain.parallelism == "ddp" and plain.world_size > 1:
        fields = TrainSetting.model_fields.items()
        plain_ddp = {name: info.default for name, info in fields if name.startswith("ddp_")}
        yield {"parallelism": "fsdp", **plain_ddp}


def _on(
    there: Table,
    setting: TrainSetting,
    wish: Wish,
    goal: Choice | None,
    training: Training | None,
) -> MoreGpus | None:
    choice = Choice(setting)
    if not there.has_step(choice):
        return None
    found = there.at(choice)
    predicted = found.throughput
    if predicted is None or predicted.communication is None:
        return None
    replaced: tuple[tuple[str, object], ...] = ()
    if found.fits and goal is not None:
        changed = goal.setting.differences(wish.plain).items()
        replaced = tuple((field, value) for field, value in changed if field in _FOR_MEMORY)
    return MoreGpus(
        gpus=setting.world_size,
        parallelism=setting.parallelism,
        link=predicted.communication.link,
        batch_size=setting.batch_size,
        device_total_bytes=found.device_total_bytes,
        fits=bool(found.fits),
        images_per_second=predicted.all_images_per_second,
        in_place_of=replaced,
        cost=cost_of(training, predicted),
    )
