"""Answers say what an estimate holds, and nothing it does not; the first screen what decides."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import advise
from planner.core.schema import TrainSetting
from planner.core.units import format_bytes, format_range
from planner.estimation.estimate import Estimate, estimate
from planner.estimation.scaling import scaled
from planner.machine.hardware import find_gpu
from planner.report.estimates import estimate_answer, verdict_text
from planner.report.page.contents import Folded, Table, Text
from planner.report.text import parts_text
from planner.throughput.result import Throughput
from tests.answers import advice_text, estimate_text, rows_text

MIB, GIB = 1024**2, 1024**3


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))


def make(**changes: Any) -> Estimate:
    """An estimate of 1000 MiB, as likely 950 to 1100."""
    found = estimate("native:swin_tiny", batch_size=2, gpu="rtx-3090")
    values: dict[str, Any] = {
        "fits": None, "budget_bytes": None, "throughput": None, "device_total_bytes": 1000 * MIB,
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
    def said(fits: bool, budget_bytes: int) -> str:
        return verdict_text(make(fits=fits, budget_bytes=budget_bytes))

    needs = "needs 1000.00 MiB (950.00 MiB–1.07 GiB) of"
    assert said(True, 2 * GIB) == f"Fits: {needs} 2.00 GiB."
    assert said(True, 1050 * MIB) == f"Probably fits: {needs} 1.03 GiB."
    assert said(False, 960 * MIB) == f"Probably does not fit: {needs} 960.00 MiB."
    assert said(False, 900 * MIB) == f"Does not fit: {needs} 900.00 MiB."
    assert "--gpu" in verdict_text(make())
    like = verdict_text(make(gpu=None, fits=True, budget_bytes=2 * GIB))
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
    several = rows_text(found, scaled(found, find_gpu("rtx 3090")))
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
