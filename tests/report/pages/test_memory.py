"""What the page draws of a step's memory is what its ledger and its estimate say."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cli import cli
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.units import GIB
from planner.estimation.estimate import choose, estimate_ledger
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import CATEGORIES, Allocated, Ledger, Marked
from planner.machine.hardware import find_gpu
from planner.machine.hardware.overheads import processors_of
from planner.memory.allocator_config import parse_allocator_config
from planner.memory.profile import category_bytes, steady_step
from planner.memory.scratch import on_device
from planner.report.page.contents import Chart, Folded, Group, Page, Part, Section
from planner.report.page.rendering import page_html
from planner.report.pages.alive import alive_at_peak, alive_tree, equal_ones
from planner.report.pages.answer import said_again
from planner.report.pages.course import Course, step_course
from planner.report.pages.over_time import clock, limit_of, shown_categories, thinned, timeline_data
from planner.report.pages.recomputation import RECOMPUTATION, UPDATE, find_stretches
from planner.report.pages.sections import step_group
from planner.report.pages.step import Step
from planner.report.pages.totals import waterfall
from tests.report.ledgers import layered_ledger

SWIN = "timm:swin_tiny_patch4_window7_224"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"checkpointing": "blocks", "accumulate": 2, "compile": "default"},
    "fsdp": {"parallelism": "fsdp", "world_size": 8, "checkpointing": "blocks"},
    "validated": {"validation_batch_size": 64, "zero_grad_to_none": False},
}


@cache
def swin_step(name: str, gpu: str | None = "rtx-4090", options: str = "") -> Step:
    card = find_gpu(gpu) if gpu else None
    allocator = parse_allocator_config(options) if options else None
    config, setting = choose(SWIN, None, card, {"batch_size": 8, **SETTINGS[name]})
    return step_of(config, setting, step_ledger(config, setting), card, allocator)


def step_of(
    config: Any, setting: Any, ledger: Ledger, card: Any = None, options: Any = None
) -> Step:
    found = estimate_ledger(config, setting, ledger, card, None, options)
    return Step(found, on_device(ledger, processors_of(card)), card, options)


@cache
def course_of(name: str) -> Course:
    return step_course(swin_step(name))


def decoded(data: dict[str, Any]) -> dict[str, list[int]]:
    """The series of a chart's data, in bytes."""
    return {
        name: [value * data["unit_bytes"] for value in accumulate(each)]
        for name, each in data["series"].items()
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_every_point_of_the_ledger_is_on_the_page(name: str) -> None:
    step, course = swin_step(name), course_of(name)
    data = json.loads(json.dumps(timeline_data(course)))
    series, live = decoded(data), course.live
    assert live.peak_bytes == step.estimate.peak_live_bytes
    start = steady_step(step.ledger).steady_from
    marks = [i for i, event in enumerate(step.ledger.events) if type(event) is Marked]
    expected = category_bytes(step.ledger.events, start + 1, marks[-1])
    for category in CATEGORIES:
        if category in data["stack"]:
            assert series[category] == expected[category], category
        else:
            assert not any(expected[category]), category
    assert live.events[live.peak] == steady_step(step.ledger).peak_index
    sums = [sum(each) for each in zip(*(series[c] for c in data["stack"]), strict=True)]
    assert max(sums) == sums[live.peak] == step.estimate.peak_live_bytes
    # Each move is by what it says.
    changes = [b - a for a, b in pairwise(sums)]
    assert changes == [each * data["unit_bytes"] for each in data["bytes"]]
    assert [(p["start"], p["stop"]) for p in data["phases"]] == [
        (p.start, p.stop) for p in live.phases
    ]
    assert data["phases"][-1]["stop"] == len(sums) == len(series["reserved"])


@pytest.mark.parametrize("name", SETTINGS)
def test_time_runs_from_the_first_operation_to_the_end_of_the_step(name: str) -> None:
    step, course = swin_step(name), course_of(name)
    times = clock(step, course)
    assert len(times) == len(course.live.total)
    assert times[0] == 0
    assert times == sorted(times)
    predicted = step.estimate.throughput
    assert predicted is not None
    # Of two micro-batches both are recorded; a validation follows the step.
    assert times[-1] / 1e9 <= predicted.step_seconds * 1.001
    assert times[-1] / 1e9 > predicted.step_seconds * 0.7
    decoded_times = list(accumulate(timeline_data(course, times)["nanoseconds"]))
    assert decoded_times == times


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_reserved_is_what_the_estimate_says(name: str) -> None:
    step, course = swin_step(name), course_of(name)
    series = decoded(timeline_data(course))
    assert max(series["reserved"]) == step.estimate.peak_reserved_bytes
    # The step is played twice, and the estimate's is the most of both; what is drawn is one.
    assert 0.99 < max(series["allocated"]) / step.estimate.peak_allocated_bytes <= 1
    for live, allocated, reserved in zip(
        course.live.total, series["allocated"], series["reserved"], strict=True
    ):
        assert live <= allocated <= reserved
    for stream, alive in course.live_of.items():
        assert all(a <= r for a, r in zip(alive, course.reserved_of[stream], strict=True))
    assert [sum(each) for each in zip(*course.live_of.values(), strict=True)] == course.live.total
    assert len(course.live_of) == (3 if name == "fsdp" else 1)


def test_a_limit_and_options_reach_the_line_of_what_is_reserved() -> None:
    for options in ("expandable_segments:True", "max_split_size_mb:64"):
        step = swin_step("plain", "rtx-4090", options)
        assert max(step_course(step).reserved) == step.estimate.peak_reserved_bytes
    options = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.045"
    step = swin_step("plain", "rtx-4090", options)
    assert step.may_reserve is not None
    course = step_course(step)
    assert max(course.reserved) == step.estimate.peak_reserved_bytes
    assert step.estimate.peak_reserved_bytes < swin_step("plain").estimate.peak_reserved_bytes
    assert limit_of(step) == step.may_reserve


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 90), st.randoms())
def test_thinned_points_keep_the_maxima_of_every_column(
    num_layers: int, num_micro_batches: int, num_columns: int, source: random.Random
) -> None:
    setting = TrainSetting(accumulate=num_micro_batches)
    config, _ = choose(SWIN, None, None, {})
    course = step_course(step_of(config, setting, layered_ledger(num_layers, num_micro_batches)))
    count = len(course.live.total)
    # As where garbage is collected: what is reserved rises and falls by itself.
    course = replace(course, reserved_of={"": [source.randrange(GIB) for _ in range(count)]})
    points = thinned(course, num_columns)
    assert {course.live.peak, count - 1} <= set(points)
    bounds = sorted({count * column // num_columns for column in range(num_columns)})
    for start, stop in zip(bounds, [*bounds[1:], count], strict=True):
        for series in (course.live.total, course.reserved):
            kept = [series[point] for point in points if start <= point < stop]
            assert max(kept) == max(series[start:stop])


def recomputed(model: str, **fields: Any) -> dict[str, list[int]]:
    """How many operations the stretches of each kind have."""
    ledger = step_ledger(*choose(model, None, None, {"batch_size": 8, **fields}))
    lengths: dict[str, list[int]] = {}
    for kind, start, stop in find_stretches(list(ledger.operations())):
        lengths.setdefault(kind, []).append(stop - start)
    return lengths


def test_each_checkpointed_block_is_recomputed_once() -> None:
    # Swin-T has 12 blocks, 4 stages.
    assert recomputed(SWIN) == {}
    assert len(recomputed("native:swin_tiny", checkpointing="blocks")[RECOMPUTATION]) == 12
    assert len(recomputed(SWIN, checkpointing="stages")[RECOMPUTATION]) == 4
    # Matrix products and attention are kept, so that what is run again comes in pieces.
    assert len(recomputed("native:swin_tiny", checkpointing="selective")[RECOMPUTATION]) > 12
    assert set(recomputed("native:swin_tiny", optimizer_in_backward=True)) == {UPDATE}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tree_sums_to_the_peak(name: str) -> None:
    step, course = swin_step(name), course_of(name)
    alive = alive_at_peak(step.ledger, course)
    root = alive_tree(alive)
    assert root.amount == step.estimate.peak_live_bytes
    assert root.count == len(alive)
    breakdown = step.estimate.breakdown
    assert root.amounts == {c: breakdown[c] for c in CATEGORIES if breakdown[c]}
    for _, node in root.rows():
        if node.children:
            assert node.amount == sum(inner.amount for inner in node.children.values())
    groups = equal_ones(alive)
    assert sum(group.num_bytes for group in groups) == root.amount
    assert sum(group.num_storages for group in groups) == root.count


@pytest.mark.parametrize("name", SETTINGS)
def test_the_waterfall_ends_at_the_device_total(name: str) -> None:
    estimate = swin_step(name).estimate
    bars = waterfall(estimate)
    height = 0
    for bar in bars:
        if bar.is_sum:
            assert bar.num_bytes == height
        else:
            height += bar.num_bytes
    assert height == estimate.device_total_bytes
    sums = {bar.name: bar.num_bytes for bar in bars if bar.is_sum}
    assert sums == {
        "alive at the peak": estimate.peak_live_bytes,
        "allocated": estimate.peak_allocated_bytes,
        "reserved": estimate.peak_reserved_bytes,
        "device": estimate.device_total_bytes,
    }


def parts_of(group: Group) -> Iterator[Part]:
    def within(whole: Section | Folded) -> Iterator[Part]:
        for part in whole.parts:
            yield part
            if isinstance(part, Folded):
                yield from within(part)

    for section in group.sections:
        yield from within(section)


def test_what_is_drawn_at_first_is_the_thinned_ledger() -> None:
    course = course_of("fsdp")
    charts = {
        p.key: p for p in parts_of(step_group(swin_step("fsdp"), "g1")) if isinstance(p, Chart)
    }
    figure = json.loads(charts["g1-memory-chart"].figure.to_json())
    points = thinned(course)
    traces = {
        trace["meta"]["series"]: trace for trace in figure["data"] if "series" in trace["meta"]
    }
    assert list(traces) == [*shown_categories(course), "live", "allocated", "reserved"]
    scale = timeline_data(course)["scale_bytes"]
    for category in shown_categories(course):
        expected = [course.live.by_category[category][i] / scale for i in points]
        assert (traces[category]["x"], traces[category]["y"]) == (points, expected)


def hostile_step() -> Step:
    """A traced model's ledger as a stranger may have named its modules."""
    path = "<img src=x onerror=alert(1)>.0\x1b[31m"
    events = [
        event._replace(path=path, label="<b>mm") if type(event) is Allocated else event
        for event in layered_ledger().events
    ]
    model = FactoryModel(factory="models:build")
    ledger = Ledger(tuple(events), batch_size=2, num_parameters=4)
    return step_of(model, TrainSetting(batch_size=2), ledger)


def test_hostile_paths_are_shown_as_text() -> None:
    group = step_group(hostile_step(), "g1")
    charts = [part for part in parts_of(group) if isinstance(part, Chart)]
    said = json.dumps([chart.data for chart in charts])
    said += "".join(chart.figure.to_json() for chart in charts)
    assert "&lt;img src=x" in said.replace("\\u003c", "<")
    plain = said.replace("\\u003c", "<").replace("\\u003e", ">")
    for raw in ("<img", "<b>mm", "\\u001b"):
        assert raw not in plain, raw
    html = page_html(Page("t", "", [group]))
    assert "<img src=x" not in html


def test_the_command_on_the_page_estimates_the_same() -> None:
    step = replace(swin_step("fsdp"), said=SWIN, fields={"num_classes": "1000"})
    words = shlex.split(said_again(step, "estimate"))
    done = CliRunner().invoke(cli, [*words[1:], "--json"], catch_exceptions=False)
    expected = json.loads(json.dumps(step.estimate.to_json()))
    found = json.loads(done.stdout)
    assert {key: found[key] for key in expected} == expected
