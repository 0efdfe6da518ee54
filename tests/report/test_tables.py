"""Tables say what an estimate holds, and nothing it does not."""

from __future__ import annotations

from typing import Any

from planner import advise
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.units import format_bytes, format_range
from planner.estimation.estimate import Estimate, estimate
from planner.estimation.scaling import scaled
from planner.machine.hardware import find_gpu
from planner.report.advice import advice_text
from planner.report.scaling import scaling_table
from planner.report.tables import breakdown_table, estimate_table, verdict
from planner.throughput.result import Throughput

MIB, GIB = 1024**2, 1024**3


def make(**changes: Any) -> Estimate:
    """An estimate whose parts add up: 700 MiB live, 32 workspace, 68 overhead, 200 context."""
    values: dict[str, Any] = {
        "model": SwinConfig(name="swin_tiny"),
        "setting": TrainSetting(),
        "num_parameters": 28_288_354,
        "breakdown": {
            "parameters": 100 * MIB, "buffers": 0, "gradients": 50 * MIB,
            "optimizer_state": 200 * MIB, "activations": 300 * MIB, "temporaries": 50 * MIB,
            "workspace": 32 * MIB, "allocator_overhead": 68 * MIB, "cuda_context": 200 * MIB,
        },
        "saved_activation_bytes": 310 * MIB,
        "peak_live_bytes": 700 * MIB,
        "peak_allocated_bytes": 740 * MIB,
        "peak_reserved_bytes": 800 * MIB,
        "device_total_bytes": 1000 * MIB,
        "peak_at": "backward of layers.0.blocks.1.mlp.fc2 (mm)",
        "fits": None,
        "budget_bytes": None,
        "headroom_bytes": None,
        "low_bytes": 950 * MIB,
        "high_bytes": 1100 * MIB,
    }  # fmt: skip
    return Estimate(**(values | changes))


def test_a_breakdown_shows_each_part_and_where_the_peak_is() -> None:
    text = breakdown_table(make(assumed=("context 200 MiB",), left_out=("NCCL",)))
    lines = [line.split() for line in text.splitlines()]
    assert "native:swin_tiny: 28,288,354 parameters" in text
    assert "Memory at the peak, which is in backward of layers.0.blocks.1.mlp.fc2 (mm)" in text
    assert ["activations", "300.00", "MiB", "30.0%"] in lines
    assert ["device", "total", "1000.00", "MiB", "100.0%"] in lines
    assert not any(line[:1] == ["buffers"] for line in lines)  # there are none
    assert "Assumed:\n- context 200 MiB" in text
    assert "Left out:\n- NCCL" in text
    assert "Predicted" not in text


def test_lines_stay_within_a_terminal() -> None:
    long = "a workspace of 8,519,680 B for each handle and stream, counted as allocated memory " * 3
    thing = Throughput(0.1234, 518.6, "rates measured on an h100-sxm", 0.2)
    for text in (
        breakdown_table(make(assumed=(long,), throughput=thing)),
        estimate_table([make(throughput=thing, fits=True, budget_bytes=GIB)]),
    ):
        assert max(map(len, text.splitlines())) <= 118
    assert "519 images/s, 123 ms a step" in breakdown_table(make(throughput=thing))


def test_a_verdict_says_by_how_much_and_how_surely() -> None:
    sure = verdict(make(fits=True, budget_bytes=2 * GIB))
    assert sure.startswith("Fits: 1.02 GiB of 2.00 GiB are free, ")
    assert "between 950.00 MiB and 1.07 GiB" in sure
    assert verdict(make(fits=True, budget_bytes=1050 * MIB)).startswith(
        "Probably fits: 50.00 MiB of 1.03 GiB are free, but the estimate may be "
    )
    assert verdict(make(fits=False, budget_bytes=960 * MIB)).startswith(
        "Probably does not fit: it needs 40.00 MiB more than the 960.00 MiB available, but the "
        "estimate may be 50.00 MiB high.\n"
    )
    assert verdict(make(fits=False, budget_bytes=900 * MIB)).startswith(
        "Does not fit: it needs 100.00 MiB more than the 900.00 MiB available.\n"
    )
    assert verdict(make(fits=False, budget_bytes=1024 * MIB)).startswith(
        "Probably does not fit: only 24.00 MiB of 1.00 GiB would be free.\n"
    )
    assert "--gpu" in verdict(make())


def test_a_table_says_once_how_sure_it_is_and_what_it_rests_on() -> None:
    settings = [TrainSetting(compile=c) for c in ("off", "default", "max-autotune")]
    shared, own = "context 200 MiB", "tuned by nobody"
    rows = [
        make(setting=s, throughput=Throughput(0.1, 640.0, "rates of a card", 0.35),
             assumed=(shared, own) if s.compile == "max-autotune" else (shared,))
        for s in settings
    ]  # fmt: skip
    text = estimate_table(rows)
    assert text.count("±35%") == text.count("predicted, not measured") == 1
    assert "Images/s: predicted, not measured, within ±35% (rates of a card)." in text
    assert "between 95% and 110% of the figure." in text
    assert text.count(f"- {shared}") == 1
    assert f"- compile max-autotune: {own}" in text


def test_a_compiled_step_that_was_not_traced_is_a_range_in_every_table() -> None:
    """It stood there with the eager step's bytes, as if compiling made no difference."""
    modes = ("off", "default", "max-autotune")
    found = [estimate("native:swin_tiny", compile=mode, gpu="rtx 3090") for mode in modes]
    eager, *compiled = found
    assert [one.as_eager for one in found] == [False, True, True]
    tables = [estimate_table(found), scaling_table(scaled(found, find_gpu("rtx 3090")))]
    for text in tables:
        rows = [line for line in text.splitlines() if line.endswith("backward") or "none  " in line]
        assert sum(format_bytes(eager.device_total_bytes) in row for row in rows) == 1
        for one in compiled:
            assert text.count(format_range(one.low_bytes, one.high_bytes)) == 2
    assert tables[0].count("not traced") == 6
    advice = advise("native:swin_tiny", batch_size=64, gpu="rtx 3090", keep=["checkpointing"])
    assert advice.waterfall[-1].as_eager
    assert "not traced" in advice_text(advice).partition("change by change")[2]
