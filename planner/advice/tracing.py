"""The traces that advice for a model without a step on shapes rests on: few, and kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from planner.advice.levers import LEVERS
from planner.advice.wish import Wish
from planner.core.errors import PlannerError
from planner.core.schema import ResolvedSetting, TrainSetting
from planner.estimation.ledgers import is_on_shapes, record_ledgers
from planner.libraries.limits import batch_unit
from planner.trace.kept_step import alike, traced_step

MAX_TRACES = 10
MAX_SECONDS = 300.0  # of all of them: a ViT-B takes some 20 s, a busy machine several times that
TRACED_LEVERS = (
    "fused optimizer", "attention", "optimizer in backward", "offload", "checkpointing"
)  # fmt: skip
KEPT_LEVERS = TRACED_LEVERS[:2]  # those that follow are tried beside them


def record_traces(wish: Wish, resorts: bool = False) -> tuple[str, ...]:
    """Traces what is not kept, in other processes, last `resorts` too, and says how many traces
    there may be. Raises PlannerError where not even the wish can be traced."""
    if is_on_shapes(wish.model, wish.sample.setting):
        return ()
    steps = dict.fromkeys(_steps(wish, resorts))
    requests = [(wish.model, step) for step in list(steps)[:MAX_TRACES]]
    errors = record_ledgers(requests, limit_seconds=MAX_SECONDS)
    if errors[0] is not None:
        raise errors[0]
    if any(errors) and "attention" not in wish.keep:  # as of a model that has only its eager one
        return record_traces(replace(wish, keep=wish.keep | {"attention"}), resorts)
    reason = traced_step(*requests[0]).reason
    if reason:
        raise PlannerError(
            f"advice compares many batches: {reason}",
            "Estimate the batches that you have in mind, as --batch-size 8,16,32.",
        )
    left = max(0, len(steps) - MAX_TRACES)
    more = f"; {left} more {'is' if left == 1 else 'are'} left out" if left else ""
    return (f"this model is traced: at most {MAX_TRACES} steps, each kept for every batch{more}",)


def record_untraced(wish: Wish, steps: Iterable[ResolvedSetting]) -> bool:
    """Traces each of `steps`, without and with accumulation, where no trace of it is kept; whether
    there was anything to trace."""
    found = {}
    for setting in steps:
        for parts in (1, 2) if wish.is_splittable else (setting.accumulate,):
            updates = {"accumulate": parts, "batch_size": 2 * batch_unit(setting)}
            with suppress(ValueError):  # an optimizer in backward accumulates nothing
                changed = TrainSetting.model_validate({**setting.model_dump(), **updates})
                step = ResolvedSetting(changed)
                if traced_step(wish.model, step).answer(step.batch_size) is None:
                    found[alike(wish.model, step)] = (wish.model, step)
    record_ledgers(list(found.values())[:MAX_TRACES], limit_seconds=2 * MAX_SECONDS)
    return bool(found)


def _steps(wish: Wish, resorts: bool) -> Iterator[ResolvedSetting]:
    """The recorded steps of the wish and of single levers on it, without and with accumulation."""
    sample = wish.sample
    choices = [sample]
    fused = sample
    levers = [lever for lever in LEVERS if resorts or lever.role != "resort"]
    for lever in levers:
        if lever.name in TRACED_LEVERS and lever.effect in wish.allow:
            for updates in wish.changes(lever, fused):
                try:
                    changed = wish.apply(fused, updates)
                except PlannerError:
                    continue
                choices.append(changed)
                fused = changed if lever.name in KEPT_LEVERS else fused
    batch = 2 * batch_unit(sample.setting)
    for parts in (1, 2) if wish.is_splittable else (sample.setting.accumulate,):
        for choice in choices:
            setting = choice.setting.model_copy(update={"accumulate": parts, "batch_size": batch})
            try:
                resolved = wish.resolved(type(setting).model_validate(setting.model_dump()))
            except (PlannerError, ValueError):
                continue
            yield alike(wish.model, resolved).model_copy(
                update={"batch_size": batch, "compile": "off"}
            )
