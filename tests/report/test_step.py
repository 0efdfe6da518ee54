"""What the page draws of a step is what its ledger and its estimate say."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.cli import cli
from planner.core.files import to_json
from planner.core.schema import FactoryModel, TrainSetting
from planner.estimation.arguments import NO_TARGET, Target, read_target
from planner.estimation.estimate import estimate_ledger, read_resolved
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import CATEGORIES, Allocated, Ledger, PhaseEnded
from planner.machine.hardware.overheads import processors_of
from planner.memory.profile import category_bytes, steady_step
from planner.memory.scratch import size_scratch
from planner.report.page.contents import Chart, Number, Page, Table
from planner.report.page.rendering import all_parts, page_html
from planner.report.pages import make_page
from planner.report.step import (
    MemoryTimeline,
    PredictedStep,
    allocator_limit_bytes,
    enclosing_modules,
    operation_costs,
    step_group,
    step_timeline,
    storages_at_peak,
    timeline_data,
)
from planner.throughput.result import COLLECTIVE_WAIT, HOST_WAIT
from tests.page.browser import looking_at, until

SWIN = "timm:swin_tiny_patch4_window7_224"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"checkpointing": "blocks", "accumulate": 2, "compile": "default"},
    "fsdp": {"parallelism": "fsdp", "world_size": 8, "checkpointing": "blocks"},
    "kept": {"zero_grad_to_none": False},
}


@cache
def swin_step(
    name: str, gpu: str | None = "rtx-4090", options: str = "", **fields: Any
) -> PredictedStep:
    target, asked = read_target(gpu, allocator=options or None), {**SETTINGS[name], **fields}
    step = read_resolved(SWIN, {"batch_size": 8}, target.gpu, asked)
    return predicted_step(*step, step_ledger(*step), target)


def predicted_step(
    config: Any, setting: Any, ledger: Ledger, target: Target = NO_TARGET
) -> PredictedStep:
    found = estimate_ledger(config, setting, ledger, target)
    return PredictedStep(found, size_scratch(ledger, processors_of(target.gpu)), target)


@cache
def course_of(name: str) -> MemoryTimeline:
    return step_timeline(swin_step(name))


def parts_of(step: PredictedStep, kind: type) -> list[Any]:
    page = Page("t", [step_group(step, "g1")])
    return [part for part in all_parts(page) if isinstance(part, kind)]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_point_of_the_ledger_is_on_the_page(name: str) -> None:
    step, course = swin_step(name), course_of(name)
    data, live = json.loads(json.dumps(timeline_data(course))), course.live
    series = {n: [v * data["unit_bytes"] for v in accumulate(s)] for n, s in data["series"].items()}
    marks = [i for i, event in enumerate(step.ledger.events) if type(event) is PhaseEnded]
    start = steady_step(step.ledger).steady_event
    expected = category_bytes(step.ledger.events, start + 1, marks[-1])
    for category in CATEGORIES:
        if category in data["stack"]:
            assert series[category] == expected[category], category
        else:
            assert not any(expected[category]), category
    sums = [sum(each) for each in zip(*(series[c] for c in data["stack"]), strict=True)]
    assert max(sums) == sums[live.peak] == step.estimate.peak_live_bytes
    changes = [b - a for a, b in pairwise(sums)]  # each move is by what it says
    assert changes == [each * data["unit_bytes"] for each in data["bytes"]]
    assert data["phases"][-1]["stop"] == len(sums) == len(series["reserved"])
    assert max(series["reserved"]) == step.estimate.peak_reserved_bytes
    # The step is played twice, and the estimate's is the most of both; what is drawn is one.
    assert 0.99 < max(series["allocated"]) / step.estimate.peak_allocated_bytes <= 1
    for alive, given, held in zip(sums, series["allocated"], series["reserved"], strict=True):
        assert alive <= given <= held


def test_options_reach_the_line_of_what_is_reserved() -> None:
    step = swin_step("plain", "rtx-4090", "expandable_segments:True")
    assert max(step_timeline(step).reserved) == step.estimate.peak_reserved_bytes
    assert step.estimate.peak_reserved_bytes < swin_step("plain").estimate.peak_reserved_bytes
    assert allocator_limit_bytes(step) > step.estimate.peak_reserved_bytes


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_alive_sums_to_the_peak(name: str) -> None:
    step, course = swin_step(name), course_of(name)
    alive = storages_at_peak(step.ledger, course.live)
    assert sum(size for _, _, size in alive) == step.estimate.peak_live_bytes
    breakdown = step.estimate.breakdown
    for category in CATEGORIES:
        held = sum(size for _, of, size in alive if of == category)
        assert held == breakdown.get(category, 0)


@pytest.mark.parametrize(
    "fields",
    [{"accumulate": 4, "precision": "fp16"}, {"compile": "default", "compile_scope": "blocks"},
     {"optimizer_in_backward": True, "optimizer": "adamw-foreach"},
     {"world_size": 8, "parallelism": "fsdp"}],
    ids=str,
)  # fmt: skip
def test_every_second_stands_once_by_operation_and_in_the_chart(fields: dict[str, Any]) -> None:
    step = swin_step("plain", "a100-sxm-80gb", **fields)
    time, costs = step.estimate.throughput, operation_costs(step)
    assert time is not None
    assert sum(cost.seconds for cost in costs) == pytest.approx(time.step_seconds)
    assert all(bool(cost.name) == (cost.kind not in (HOST_WAIT, COLLECTIVE_WAIT)) for cost in costs)
    for part in time.parts:
        of_part = [cost.seconds for cost in costs if cost[:3] == part[:3]]
        of_time = [other.seconds for other in time.parts if other[:3] == part[:3]]
        assert sum(of_part) == pytest.approx(sum(of_time))
    (chart,) = [c for c in parts_of(step, Chart) if c.key == "g1-time"]
    assert sum(chart.figure.data[0].x) == pytest.approx(1e3 * time.step_seconds)


def test_a_module_has_what_it_holds() -> None:
    assert enclosing_modules("layers.0.blocks.1.mlp.fc1") == [
        "layers.0", "layers.0.blocks.1", "layers.0.blocks.1.mlp"
    ]  # fmt: skip
    table = next(t for t in parts_of(swin_step("plain"), Table) if "module" in t.headers)
    cells = {str(row[0]): row for row in table.rows}
    for column in (1, 3):
        inner = [r[column] for n, r in cells.items() if n.startswith("layers.2.blocks.")
                 and n.count(".") == 3]  # fmt: skip
        held = sum(cell.value or 0 for cell in inner if isinstance(cell, Number))
        whole = cells["layers.2"][column]
        assert isinstance(whole, Number)
        assert 0 < held <= (whole.value or 0)


def hostile_step() -> PredictedStep:
    """A recorded model's ledger as a stranger may have named its modules."""
    path = "<img src=x onerror=alert(1)>.0\x1b[31m"
    events = [
        event._replace(path=path, label="<b>mm") if type(event) is Allocated else event
        for event in swin_step("plain").ledger.events
    ]
    model = FactoryModel(factory="models:build")
    ledger = Ledger(tuple(events), batch_size=8, num_parameters=4)
    return predicted_step(model, TrainSetting(batch_size=8), ledger)


def test_hostile_paths_are_shown_as_text() -> None:
    charts = parts_of(hostile_step(), Chart)
    said = json.dumps([chart.data for chart in charts])
    said += "".join(chart.figure.to_json() for chart in charts)
    plain = said.replace("\\u003c", "<").replace("\\u003e", ">")
    assert "&lt;img src=x" in plain
    for raw in ("<img", "<b>mm", "\\u001b"):
        assert raw not in plain, raw
    html = page_html(make_page([hostile_step()]))
    assert "<img src=x" not in html
    assert "\x1b" not in html


def test_the_command_on_the_page_estimates_the_same() -> None:
    step = replace(swin_step("fsdp"), model_text=SWIN, fields={"num_classes": "1000"})
    words = shlex.split(step.command("estimate"))
    done = CliRunner().invoke(cli, [*words[1:], "--json"], catch_exceptions=False)
    expected = json.loads(json.dumps(to_json(step.estimate)))
    found = json.loads(done.stdout)
    assert {key: found[key] for key in expected} == expected


def test_a_setting_that_does_not_fit_shows_what_does() -> None:
    html = page_html(make_page([swin_step("plain", batch_size=2048, attention="eager")]))
    assert "What fits instead" in html
    assert "planner advise" in html


FIGURE = "[data-chart=g1-memory-chart]"
CHART = f'document.querySelector("{FIGURE} .drawing")'


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "report.html"
    path.write_text(page_html(Page("t", [step_group(swin_step("fsdp"), "g1")])), "utf-8")
    with looking_at(path) as page:
        page.locator(FIGURE).scroll_into_view_if_needed()
        until(page, f"{CHART}.dataset.resampled >= 1")
        yield page


def drawn(page: Any, series: str) -> tuple[list[float], list[float]]:
    """x and y of a trace of the chart, as they are drawn now."""
    x, y = page.evaluate(
        f"""() => {{
          const trace = {CHART}.data.find((each) => each.meta.series === "{series}");
          return [Array.from(trace.x), Array.from(trace.y)];
        }}"""
    )
    return x, y


def after(page: Any, act: Any) -> None:
    """What an action draws is drawn."""
    before = page.evaluate(f"() => Number({CHART}.dataset.resampled)")
    act()
    until(page, f"Number({CHART}.dataset.resampled) > {before}")


def check_drawn(page: Any, start: int, stop: int) -> None:
    """Each course's maximum from `start` to `stop` is the drawn one, and what is drawn is true."""
    course = course_of("fsdp")
    for series, values in (("live", course.live.total), ("reserved", course.reserved)):
        x, y = drawn(page, series)
        assert y == [values[int(point)] / course.scale[0] for point in x]
        within = [value for point, value in zip(x, y, strict=True) if start <= point <= stop]
        assert max(within) == max(values[start : stop + 1]) / course.scale[0]
        assert x[0] <= start
        assert x[-1] >= stop


@pytest.mark.browser
def test_the_whole_step_is_drawn_and_what_is_zoomed_into_resampled(page: Any) -> None:
    course, live = course_of("fsdp"), course_of("fsdp").live
    check_drawn(page, 0, len(live.total) - 1)
    x, _ = drawn(page, "live")
    width = page.evaluate(f"() => {CHART}._fullLayout._size.w")
    assert 0.5 * width < len(x) <= 2 * width + 2 < len(live.total)
    assert page.evaluate(f"() => {CHART}._context.plotlyServerURL") == "", "it is sent nowhere"
    start, stop = live.peak - 30, live.peak + 30
    zoom = f"() => Plotly.relayout({CHART}, {{'xaxis.range': [{start}, {stop}]}})"
    after(page, lambda: page.evaluate(zoom))
    check_drawn(page, start, stop)
    x, _ = drawn(page, "live")
    assert x == list(range(start - 1, stop + 1)), "so near, every point is drawn"
    place = f"""() => {{
      const chart = {CHART}, box = chart.getBoundingClientRect(), axis = chart._fullLayout.xaxis;
      return [box.x + axis._offset + axis.d2p({live.peak}), box.y + 200];
    }}"""
    page.mouse.move(*page.evaluate(place))
    page.wait_for_selector(f"{FIGURE} .hoverlayer .hovertext")
    said = " ".join(page.locator(f"{FIGURE} .hoverlayer tspan").all_text_contents())
    move = course.moves[live.peak - 1]
    assert f"event {live.peak:,} of {len(course.moves):,}" in said
    for part in (f"of {move.category.replace('_', ' ')}", move.path, move.label, "reserved"):
        assert part in said
    box = page.locator(f"{FIGURE} .nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    after(page, lambda: page.mouse.dblclick(box["x"] + 0.5 * box["width"], middle))
    check_drawn(page, 0, len(live.total) - 1)
