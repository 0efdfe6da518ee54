"""The page's section on time: every second once, in each of its charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from planner.estimation.estimate import choose, estimate_ledger
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware import find_gpu
from planner.report.page.contents import (
    Chart,
    Folded,
    Group,
    Number,
    Page,
    Section,
    Table,
    Tree,
)
from planner.report.page.rendering import page_html
from planner.report.pages.module_tree import Node
from planner.report.pages.predicted_time import costs_of, predicted_time, time_tree
from planner.report.pages.step import Step
from planner.throughput.parts import Cost
from planner.throughput.timeline import OTHERS, WAITING

TINY = {"image_size": 64, "window_size": 2, "depths": (1, 1, 1, 1)}
SETTINGS: list[dict[str, Any]] = [
    {"batch_size": 2, "precision": "fp16", "accumulate": 4},
    {"compile": "default", "compile_scope": "blocks"},
    {"optimizer_in_backward": True, "optimizer": "adamw-foreach"},
    {"world_size": 8, "parallelism": "fsdp"},
]


def step_of(gpu: str | None = "a100-sxm-80gb", **fields: Any) -> Step:
    card = find_gpu(gpu) if gpu else None
    model, setting = choose("native:swin_tiny", None, card, {**TINY, **fields})
    ledger = step_ledger(model, setting)
    return Step(estimate_ledger(model, setting, ledger, card), ledger, card)


def charts_of(section: Section) -> list[Chart]:
    return [part for part in section.parts if isinstance(part, Chart)]


def table_of(section: Section, summary: str) -> Table:
    for part in section.parts:
        if isinstance(part, Folded) and part.summary == summary:
            (table,) = part.parts
            assert isinstance(table, Table)
            return table
    raise AssertionError(f"no {summary}")


def numbers(column: Iterator[Any]) -> list[float]:
    return [cell.value for cell in column if isinstance(cell, Number) and cell.value is not None]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_costs_by_operation_sum_to_the_step_and_to_each_of_its_parts(
    fields: Mapping[str, Any],
) -> None:
    step = step_of(**fields)
    time = step.estimate.throughput
    assert time is not None
    costs = costs_of(step)
    assert sum(cost.seconds for cost in costs) == pytest.approx(time.step_seconds)
    for part in time.parts:
        of_part = [cost.seconds for cost in costs if cost[:3] == part[:3]]
        of_time = [other.seconds for other in time.parts if other[:3] == part[:3]]
        assert sum(of_part) == pytest.approx(sum(of_time))
    assert all(bool(cost.name) == (cost.kind not in (WAITING, OTHERS)) for cost in costs)


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_every_chart_and_table_holds_all_seconds_once(fields: Mapping[str, Any]) -> None:
    step = step_of(**fields)
    time = step.estimate.throughput
    assert time is not None
    section = predicted_time(step, "g1")
    by_phase, by_kind, clocks = charts_of(section)
    for chart in (by_phase, by_kind):
        drawn = sum(sum(trace.x) for trace in chart.figure.data)
        assert drawn == pytest.approx(1e3 * time.step_seconds)
    for number in range(2):  # both clocks are as long as the step
        drawn = sum(trace.x[number] for trace in clocks.figure.data)
        assert drawn == pytest.approx(1e3 * time.step_seconds)
    (tree,) = [part for part in section.parts if isinstance(part, Tree)]
    assert tree.table.rows[0][1].value == pytest.approx(time.step_seconds)  # type: ignore[union-attr]
    table = table_of(section, "Every part of the step")
    *parts, whole = numbers(row[3] for row in table.rows)
    assert sum(parts) == pytest.approx(whole) == pytest.approx(time.step_seconds)


def nodes_of(root: Node) -> Iterator[Node]:
    for _, node in root.rows():
        yield node


def test_a_module_s_seconds_are_those_of_what_it_holds() -> None:
    root = time_tree(costs_of(step_of()))
    nodes = list(nodes_of(root))
    for node in nodes:
        if node.children:
            inner = sum(child.amount for child in node.children.values())
            assert inner == pytest.approx(node.amount)
    labels = {node.label for node in nodes}
    assert {"layers.0", "blocks.0", "attn", "mlp", "optimizer"} <= labels


def test_hostile_names_are_drawn_as_text() -> None:
    from planner.report.pages import predicted_time as page

    name = "<b onclick=alert(1)>\x1b[31m"
    costs = [Cost("forward", "matmul", "bandwidth", 1.0, f"aten.{name}", f"{name}.0.{name}")]
    section = Section("time", "Time", [page._tree(costs)])
    html = page_html(Page("", "", [Group("g1", "", [section])]))
    assert "&lt;b onclick" in html
    assert "<b onclick" not in html
    assert "\x1b" not in html
