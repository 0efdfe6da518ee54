"""Each instant of a trace belongs to one kind and one phase. The traces are made by hand, in the
fields that kineto writes: no GPU was at hand to record one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from planner.core.errors import PlannerError
from planner.throughput.timeline import WAITING
from search.tuning.profiling.attribution import Attribution, Key, attribute
from search.tuning.profiling.trace import trace_of

Entry = dict[str, Any]
MAIN, AUTOGRAD = 1, 2


def entry(category: str, name: str, start: float, end: float, tid: int = MAIN, **given: Any
          ) -> Entry:  # fmt: skip
    args = {key.replace("_", " "): value for key, value in given.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": tid, "ts": start,
            "dur": end - start, "args": args}  # fmt: skip


def mark(phase: str, start: float, end: float) -> Entry:
    return entry("user_annotation", f"planner: {phase}", start, end)


def op(name: str, start: float, end: float, tid: int = MAIN, **given: Any) -> Entry:
    return entry("cpu_op", name, start, end, tid, **given)


def kernel(name: str, start: float, end: float, correlation: int, stream: int = 7) -> Entry:
    return entry("kernel", name, start, end, stream, correlation=correlation)


def launch(at: float, correlation: int, tid: int = MAIN) -> Entry:
    return entry("cuda_runtime", "cudaLaunchKernel", at, at + 1, tid, correlation=correlation)


def seconds(found: Attribution) -> dict[tuple[str, str], float]:
    """In microseconds, as the entries are written."""
    return {(k.phase, k.kind): round(s * 1e6, 3) for k, s in found.seconds.items()}


def attributed(entries: Iterable[Entry]) -> Attribution:
    found = attribute(trace_of(entries))
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)
    return found


def test_on_a_cpu_an_operation_has_what_those_inside_it_leave() -> None:
    found = attributed(
        [
            mark("forward", 0, 100),
            op("aten::linear", 10, 60),  # calls others: the host's
            op("aten::addmm", 20, 50),
            op("aten::copy_", 25, 30),
            op("aten::add", 70, 80),
            mark("optimizer", 100, 120),
            op("aten::_foreach_add_", 105, 115),
        ]
    )
    assert seconds(found) == {
        ("forward", "matmul"): 25, ("forward", "copy"): 5, ("forward", "pointwise"): 10,
        ("forward", WAITING): 40,  # before, around and after linear; the rest until the optimizer's
        ("optimizer", "pointwise"): 10, ("optimizer", WAITING): 30,
    }  # fmt: skip
    assert found.num_steps == 1
    assert found.names["aten::addmm", "matmul"] == (pytest.approx(25e-6), 1)


def test_a_kernel_counts_as_what_launched_it_in_the_phase_of_its_launch() -> None:
    found = attributed(
        [
            mark("forward", 0, 50),
            op("aten::linear", 0, 20),
            op("aten::addmm", 5, 15),
            launch(8, 1),
            kernel("volta_sgemm_32x128_tn", 10, 110, 1),
            op("aten::add", 30, 35),
            launch(31, 3),
            kernel("elementwise_kernel", 110, 115, 3),  # begins when the host is in backward
            mark("backward", 50, 200),
            op("autograd::engine::evaluate_function: AddmmBackward0", 60, 90, AUTOGRAD),
            op("aten::mm", 65, 85, AUTOGRAD),
            launch(70, 2, AUTOGRAD),
            kernel("ampere_bf16_s16816gemm", 120, 180, 2),
        ]
    )
    assert found.on_device
    assert seconds(found) == {
        ("forward", "matmul"): 100, ("forward", "pointwise"): 5, ("forward", WAITING): 10,
        ("backward", "matmul"): 60, ("backward", WAITING): 25,
    }  # fmt: skip


def test_what_backward_computes_again_is_told_apart() -> None:
    """Autograd records in it, which it does not in backward; a node has the number of its forward,
    and the thread."""
    node = {"Sequence_number": 7, "Fwd_thread_id": 1}
    found = attributed(
        [
            mark("backward", 0, 100),
            op("aten::ones_like", 0, 5, Sequence_number=9, Fwd_thread_id=0),  # before any node
            op("aten::fill_", 1, 5),
            op("autograd::engine::evaluate_function: AddmmBackward0", 10, 90, **node),
            op("AddmmBackward0", 12, 88, **node),
            op("aten::linear", 20, 40, Sequence_number=8, Fwd_thread_id=0),
            op("aten::addmm", 22, 38),
            op("aten::mm", 50, 80),
        ]
    )
    again = {key: round(s * 1e6) for key, s in found.seconds.items() if key.recomputes}
    assert again == {Key("backward", "matmul", True): 16}
    assert seconds(found)["backward", "pointwise"] == 4


def test_a_trace_without_marks_is_refused() -> None:
    with pytest.raises(PlannerError, match="no marked step"):
        attribute(trace_of([op("aten::mm", 0, 1)]))
