"""What the real module allocates on real CPU tensors, from the profiler's memory events.

The second oracle: no dispatch mode is in the way, so gradients are summed in place as eager does.
For small fp32 configurations; CPU kernels take scratch of their own, which is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from planner.core.schema import Model, TrainSetting
from planner.ledger.ledger import Allocated, Event, Freed, Marked
from planner.trace.run import Build, Trace, collector_off
from planner.training.parallel.spreading import spread_as_set
from planner.training.step import Training
from planner.training.tasks import as_task
from planner.training.tasks.blocks import blocks_to_shard

_MARK = "planner mark "
_SCALAR_BYTES = 8


def measure_cpu_memory_events(
    build: Build, model: Model, setting: TrainSetting, num_steps: int = 2
) -> Trace:
    """The memory events of `Training.step` run for real on the CPU, as a trace.

    Labels are the operators that asked. Allocations made within a kernel that are freed before it
    returns are its scratch and are left out; so are Python numbers made tensors, which are the
    host's where the step runs on a GPU, and what gloo copies for itself. The module is spread over
    the ranks of the process group as the setting says.
    """
    with (
        collector_off(),
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False
        ) as profiler,
    ):
        module = build()
        module.train()
        task = as_task(module, model, setting)
        cpu = torch.device("cpu")
        batch = task.batch(setting.batch_size, cpu)
        blocks = partial(blocks_to_shard, module, task, model)
        spread = spread_as_set(module, blocks, setting, cpu)
        training = Training(module, setting, task, batch, spread=spread)
        _mark("build", 0)
        for step in range(num_steps):
            training.step(lambda phase, step=step: _mark(phase, step))  # type: ignore[misc]
        if setting.validation_batch_size:
            training.validate(lambda phase: _mark(phase, num_steps - 1))
        num_parameters = sum(p.numel() for p in module.parameters())
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    return Trace(tuple(_events(roots)), num_parameters, num_steps)


def peak_bytes(profiler: profile) -> int:
    """The most that is alive above the start, without the scratch of kernels and of gloo, which
    copies what it sends."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    alive: dict[int, int] = {}
    live = highest = 0
    for event in _events(roots, without=("gloo:", "c10d::")):
        if isinstance(event, Allocated):
            alive[event.storage] = event.num_bytes
            live += event.num_bytes
        elif isinstance(event, Freed):
            live -= alive.pop(event.storage)
        highest = max(highest, live)
    return highest


def _mark(phase: str, step: int) -> None:
    with record_function(f"{_MARK}{phase} {step}"):
        pass


Operators = tuple[str, ...]  # the names of those around an event, outermost first


def _in_order(roots: list[Any]) -> Iterator[tuple[Any, Operators]]:
    """Every event with the operators around it, by time of start."""
    found: list[tuple[int, int, Any, Operators]] = []
    todo: list[tuple[Any, Operators]] = [(root, ()) for root in roots]
    while todo:
        event, around = todo.pop()
        found.append((event.start_time_ns, len(found), event, around))
        is_operator = event.tag == torch._C._profiler._EventType.TorchOp
        inner = (*around, f"{event.name}@{event.id}") if is_operator else around
        todo.extend((child, inner) for child in event.children)
    for _, _, event, around in sorted(found, key=lambda row: row[:2]):
        yield event, around


def _events(roots: list[Any], without: tuple[str, ...] = ()) -> Iterator[Event]:
    """Those of `roots`, but for what is made within operators whose names begin with `without`."""
    rows: list[Event] = []
    alive: dict[int, tuple[int, int, Operators]] = {}
    left_out: set[int] = set()
    number, built = 0, bool(without)  # of a step by itself nothing is built
    for event, around in _in_order(roots):
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.alloc_size > 0 and without and any(n.startswith(without) for n in around):
                continue
            if fields.alloc_size > 0:
                alive[fields.ptr] = (number, fields.alloc_size, around)
                rows.append(Allocated(number, fields.alloc_size, _label(around)))
                if fields.alloc_size <= _SCALAR_BYTES and built and _is_of_host(around):
                    left_out.add(number)
                if any(name.startswith(("c10d::", "gloo:")) for name in around):
                    left_out.add(number)
                number += 1
            elif fields.ptr in alive:
                freed, freed_size, made_in = alive.pop(fields.ptr)
                rows.append(Freed(freed))
                if _is_scratch(freed_size, around, made_in):
                    left_out.add(freed)
        elif event.name.startswith(_MARK):
            phase, step = event.name.removeprefix(_MARK).split()
            built = True
            rows.append(Marked(phase, int(step)))
    return (row for row in rows if getattr(row, "storage", None) not in left_out)


def _label(around: Operators) -> str:
    return around[-1].partition("@")[0] if around else "unseen"


def _is_scratch(num_bytes: int, around: Operators, made_in: Operators) -> bool:
    """Freed by the very call that asked; for a scalar, by any call around that one."""
    if num_bytes <= _SCALAR_BYTES:
        return bool(around) and around[0] == next(iter(made_in), None)
    return bool(around) and around == made_in


def _is_of_host(around: Operators) -> bool:
    """A Python number made a tensor (`torch.tensor(0.0)` is an `empty` at most), as the optimizer's
    `step` is: no other operator asked, within the optimizer's step where that is in backward, or
    within DDP's forward, which is around that of the model."""
    operators = [name.partition("@")[0] for name in around]
    own = ("Optimizer.", "DistributedDataParallel.forward")
    ranges = [index for index, name in enumerate(operators) if name.startswith(own)]
    within = operators[ranges[-1] + 1 :] if ranges else operators
    return within in ([], ["aten::empty"])
