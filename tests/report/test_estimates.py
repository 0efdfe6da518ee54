"""Answers say what an estimate holds, and nothing it does not; the first screen what decides. Where
the time goes is told by every second once, and what is printed fits its terminal."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import advise
from planner.core.schema import TrainSetting
from planner.core.units import format_bytes, format_range
from planner.estimation.arguments import Target
from planner.estimation.estimate import Estimate, estimate
from planner.estimation.scaling import scaled
from planner.machine.hardware import find_gpu
from planner.report import text as terminal
from planner.report.estimates import estimate_answer, verdict_text
from planner.report.page.contents import Folded, Table, Text
from planner.report.text import parts_text
from planner.report.timing import bound_text, shares_text, time_parts
from planner.throughput.result import Breakdown, Part, Throughput
from tests.answers import advice_text, estimate_text, rows_text

MIB, GIB = 1024**2, 1024**3


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))


def make(**changes: Any) -> Estimate:
    """An estimate of 1000 MiB, as likely 950 to 1100."""
    found = estimate("native:swin_tiny", batch_size=2, gpu="rtx-3090")
    values: dict[str, Any] = {
        "budget_bytes": None, "throughput": None, "device_total_bytes": 1000 * MIB,
        "low_bytes": 950 * MIB, "high_bytes": 1100 * MIB,
    }  # fmt: skip
    return replace(found, **(values | changes))


def test_an_answer_in_full_shows_each_part_and_where_the_peak_is() -> None:
    """The small ones, 50 + 50 + 32 MiB, are one line; what is none has none."""
    parts = {
        "parameters": 100, "buffers": 0, "gradients": 50, "optimizer_state": 200,
        "activations": 300, "temporaries": 50, "workspace": 32, "allocator_overhead": 68,
        "cuda_context": 200,
    }  # fmt: skip
    breakdown = {name: size * MIB for name, size in parts.items()}
    peak = {"peak_at": "backward of layers.0.blocks.1.mlp.fc2 (mm)", "breakdown": breakdown}
    text = estimate_text(make(**peak, assumed=("context 200 MiB",), left_out=("NCCL",)))
    lines = [line.split() for line in text.splitlines()]
    assert "native:swin_tiny, 28,288,354 parameters" in text
    assert "The peak is in backward of layers.0.blocks.1.mlp.fc2, in torch's mm kernel." in text
    assert ["activations", "300.00", "MiB", "30.0%"] in lines
    assert ["everything", "else", "132.00", "MiB", "13.2%"] in lines
    assert not any(line[:1] == ["buffers"] for line in lines)
    assert "Assumed:\n- context 200 MiB" in text
    assert "Left out:\n- NCCL" in text
    assert "Predicted" not in text


def test_a_first_screen_leaves_out_what_is_folded_and_says_how_to_see_it() -> None:
    rows = [[str(number)] for number in range(20)]
    parts = [Table(("n",), rows, first=3), Folded("more of it", [Text("hidden")])]
    first, whole = parts_text(parts), parts_text(parts, detail=True)
    assert "2\nand 17 more: --detail" in first
    assert first.endswith("--detail adds: more of it.")
    assert "hidden" not in first
    assert whole.endswith("19\n\nMore of it:\nhidden")


def test_a_verdict_says_what_is_needed_of_what_there_is() -> None:
    def said(budget_bytes: int) -> str:
        return verdict_text(make(budget_bytes=budget_bytes))

    needs = "needs 1000.00 MiB (950.00 MiB–1.07 GiB) of"
    assert said(2 * GIB) == f"Fits: {needs} 2.00 GiB."
    assert said(1050 * MIB) == f"Probably fits: {needs} 1.03 GiB."
    assert said(960 * MIB) == f"Probably does not fit: {needs} 960.00 MiB."
    assert said(900 * MIB) == f"Does not fit: {needs} 900.00 MiB."
    assert "--gpu" in verdict_text(make())
    like = verdict_text(make(gpu=None, budget_bytes=2 * GIB))
    assert like == f"Fits: {needs} 2.00 GiB; an A100's kernels are assumed."
    assert "GiB); an A100's kernels are assumed. No memory was named: " in verdict_text(
        make(gpu=None)
    )


def test_rows_say_once_how_sure_they_are_and_what_they_rest_on() -> None:
    settings = [TrainSetting(compile=c) for c in ("off", "default", "max-autotune")]
    shared, own = "context 200 MiB", "tuned by nobody"
    rows = [
        make(setting=s, throughput=Throughput(0.1, 640.0, "rates of a card", 0.35),
             assumed=(shared, own) if s.compile == "max-autotune" else (shared,))
        for s in settings
    ]  # fmt: skip
    text = rows_text(rows)
    assert text.count("±35%") == text.count("predicted, not measured") == 1
    assert "- images/s: rates of a card" in text
    assert text.count(f"- {shared}") == 1
    assert f"- some rows: {own}" in text


def test_a_compiled_step_that_was_not_traced_is_a_range_in_every_table() -> None:
    """It stood there with the eager step's bytes, as if compiling made no difference."""
    modes = ("off", "default", "max-autotune")
    found = [estimate("native:swin_tiny", compile=mode, gpu="rtx 3090") for mode in modes]
    eager, *compiled = found
    assert [one.as_eager for one in found] == [False, True, True]
    several = rows_text(found, scaled(found, Target(find_gpu("rtx 3090"))))
    for text in (rows_text(found), several):
        rows = [line for line in text.splitlines() if line.startswith(" ") or line[:1].isdigit()]
        assert sum(format_bytes(eager.device_total_bytes) in row for row in rows) == 1
        for one in compiled:
            between = format_range(one.low_bytes, one.high_bytes)
            assert sum(between in row for row in rows) == 4  # two rows, of two tables
        assert sum("not recorded  " in line for line in text.splitlines()) == 4
    advice = advise("native:swin_tiny", batch_size=64, gpu="rtx 3090", keep=["checkpointing"])
    assert advice.waterfall[-1].as_eager
    assert "not recorded" in advice_text(advice).partition("change by change")[2]


def test_an_answer_that_rests_on_no_trace_says_how_to_make_one() -> None:
    found = estimate("native:swin_tiny", compile="default", gpu="rtx 3090")
    first = parts_text(estimate_answer(found, lambda _: ""))
    assert f"needs {format_range(found.low_bytes, found.high_bytes)} of" in first
    assert "--record narrows the range" in " ".join(first.split())


# Where the time goes, as text: every second once, the largest first, each kind with its bounds.


class Step(Breakdown):
    parts = (
        Part("forward", "matmul", "matrix units", 0.010),
        Part("backward", "matmul", "bandwidth", 0.005),
        Part("backward", "matmul", "matrix units", 0.015),
        Part("backward", "copy", "bandwidth", 0.060),
        Part("optimizer", "pointwise", "kernel starts", 0.0101),
    )


def test_a_line_names_the_largest_first_and_leaves_out_what_is_tiny() -> None:
    assert bound_text("the step", Step().bound_seconds) == (
        "What limits the step, in shares of its time: bandwidth 65%, matrix units 25%, kernel "
        "starts 10%"
    )
    assert shares_text({"a": 1.0, "b": 0.004}) == "a 100%"


def test_tables_say_what_bounds_each_kind_over_all_phases() -> None:
    rows = [line.split(maxsplit=4) for line in parts_text(time_parts(Step())).splitlines()]
    assert ["backward", "80", "ms", "79.9%"] in rows
    assert ["matmul", "30", "ms", "30.0%", "matrix units 83%, bandwidth 17%"] in rows


# What is printed fits the terminal it is printed on, and is whole where there is none.

COMMAND = (
    "planner estimate timm:swin_large_patch4_window7_224 --batch-size 64 --compile reduce-overhead "
    "--set memory_format=channels_last --gpu rtx-3090 --json | planner tune --from - --trials 3"
)
ROWS = [["1", "183", "9.11–20.71 GiB", "checkpointing selective, compile reduce-overhead"]] * 2
HEADERS = ("way", "images/s", "device\ntotal", "check-\npointing")


@pytest.fixture(params=[60, 80, 100, 200])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def test_a_broken_command_is_the_command(columns: int) -> None:
    text = terminal.command_text(COMMAND)
    assert shlex.split(text.replace("\\\n", " ")) == shlex.split(COMMAND)


def test_a_table_that_is_too_wide_breaks_its_longest_text(columns: int) -> None:
    lines = terminal.table_text(ROWS, HEADERS).splitlines()
    rows = lines[3:]  # below two lines of headers and the rule
    assert len(rows) == len(ROWS) * (2 if columns < 80 else 1)
    assert all("9.11–20.71 GiB" in row for row in rows[:: len(rows) // len(ROWS)])


def test_without_a_terminal_everything_is_whole() -> None:
    assert terminal.line_width() == terminal.WIDTH
    assert terminal.command_text(COMMAND) == f"  {COMMAND}"
    assert "---" in terminal.table_text([["x" * 300]], ["name"])
