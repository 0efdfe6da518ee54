"""What the real module allocates on real CPU tensors, from the profiler's memory events.

The second oracle: no dispatch mode is in the way, so gradients are summed in place as eager does.
For small fp32 configurations; CPU kernels take scratch of their own, which is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from planner.schema import FactoryModel, SwinConfig, TrainSetting
from planner.step.ledger import Allocated, Event, Freed, Marked
from planner.trace.run import Build, Trace, collector_off
from planner.training import Training, make_batch

_MARK = "planner mark "
_SCALAR_BYTES = 8  # a step scalar and its like: host memory in a GPU run


def measure_cpu_memory_events(
    build: Build, model: SwinConfig | FactoryModel, setting: TrainSetting, num_steps: int = 2
) -> Trace:
    """The memory events of `Training.step` run for real on the CPU, as a trace.

    Labels are the operators that asked. Allocations made within a kernel that are freed before it
    returns are its scratch and are left out, and scalars made by the optimizer are the host's.
    """
    with (
        collector_off(),
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False
        ) as profiler,
    ):
        module = build()
        module.train()
        images, targets = make_batch(model, setting, torch.device("cpu"))
        training = Training(module, setting, images, targets)
        _mark("build", 0)
        for step in range(num_steps):
            training.step(lambda phase, step=step: _mark(phase, step))  # type: ignore[misc]
        num_parameters = sum(p.numel() for p in module.parameters())
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    return Trace(tuple(_events(roots)), num_parameters, num_steps)


def _mark(phase: str, step: int) -> None:
    with record_function(f"{_MARK}{phase} {step}"):
        pass


def _in_order(roots: list[Any], operator: Any = None) -> Iterator[tuple[Any, Any]]:
    """(event, innermost operator around it) by time of start."""
    found: list[tuple[int, int, Any, Any]] = []
    todo = [(root, operator) for root in roots]
    while todo:
        event, around = todo.pop()
        found.append((event.start_time_ns, len(found), event, around))
        inner = event if event.tag == torch._C._profiler._EventType.TorchOp else around
        todo.extend((child, inner) for child in event.children)
    for _, _, event, around in sorted(found, key=lambda row: row[:2]):
        yield event, around


def _events(roots: list[Any]) -> Iterator[Event]:
    kinds = torch._C._profiler._EventType
    rows: list[Event] = []
    alive: dict[int, int] = {}
    inside: dict[int, Any] = {}
    scratch: set[int] = set()
    phase, number = "build", 0
    for event, operator in _in_order(roots):
        if event.tag == kinds.Allocation:
            fields = event.extra_fields
            if fields.alloc_size > 0:
                alive[fields.ptr] = number
                inside[number] = operator
                label = operator.name if operator is not None else "unseen"
                rows.append(Allocated(number, fields.alloc_size, label))
                number += 1
            elif fields.ptr in alive:
                freed = alive.pop(fields.ptr)
                rows.append(Freed(freed))
                if operator is not None and operator is inside[freed]:
                    scratch.add(freed)
        elif event.name.startswith(_MARK):
            phase, step = event.name.removeprefix(_MARK).split()
            rows.append(Marked(phase, int(step)))
    scratch |= set(_optimizer_scalars(rows))
    return (row for row in rows if getattr(row, "storage", None) not in scratch)


def _optimizer_scalars(rows: list[Event]) -> Iterator[int]:
    """Scalars made between the end of backward and the end of the optimizer's step."""
    stepping = False
    for row in rows:
        if isinstance(row, Marked):
            stepping = row.phase == "backward"
        elif stepping and isinstance(row, Allocated) and row.num_bytes <= _SCALAR_BYTES:
            yield row.storage
