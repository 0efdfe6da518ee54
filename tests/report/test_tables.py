"""Tables say what an estimate holds, and nothing it does not."""

from __future__ import annotations

from typing import Any

from planner.estimation import Estimate
from planner.report.settings import describe_changes, describe_setting
from planner.report.tables import breakdown_table, estimate_table, verdict
from planner.schema import SwinConfig, TrainSetting
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
    assert "At the peak, in backward of layers.0.blocks.1.mlp.fc2 (mm)" in text
    assert ["activations", "300.00", "MiB", "30.0%"] in lines
    assert ["device", "total", "1000.00", "MiB", "100.0%"] in lines
    assert not any(line[:1] == ["buffers"] for line in lines)  # there are none
    assert "Assumed:\n- context 200 MiB" in text
    assert "Left out:\n- NCCL" in text
    assert "Predicted" not in text


def test_the_largest_tensors_at_the_peak_are_named() -> None:
    largest = (("layers.0.blocks.0.attn", "aten._softmax", 18 * MIB), ("", "aten.mm", MIB))
    lines = [line.split() for line in breakdown_table(make(largest_at_peak=largest)).splitlines()]
    assert ["layers.0.blocks.0.attn", "_softmax", "18.00", "MiB"] in lines
    assert ["-", "mm", "1.00", "MiB"] in lines
    assert "Largest" not in breakdown_table(make())


def test_totals_say_what_each_adds() -> None:
    lines = breakdown_table(make()).splitlines()
    adds = {
        "peak allocated": "+ 40.00 MiB", "peak reserved": "+ 60.00 MiB",
        "device total": "+ 200.00 MiB",
    }  # fmt: skip
    for start, words in adds.items():
        assert any(line.startswith(start) and words in line for line in lines), start


def test_lines_stay_within_a_terminal() -> None:
    long = "a workspace of 8,519,680 B for each handle and stream, counted as allocated memory " * 3
    thing = Throughput(0.1234, 518.6, "rates measured on an h100-sxm", 0.2)
    for text in (
        breakdown_table(make(assumed=(long,), throughput=thing)),
        estimate_table([make(throughput=thing, fits=True, budget_bytes=GIB)]),
    ):
        assert max(map(len, text.splitlines())) <= 116
    assert "519 images/s, 123 ms a step" in breakdown_table(make(throughput=thing))


def test_a_verdict_says_by_how_much_and_how_surely() -> None:
    sure = verdict(make(fits=True, budget_bytes=2 * GIB))
    assert sure.startswith("Fits in 2.00 GiB with 1.02 GiB to spare.\n")
    assert "between 950.00 MiB and 1.07 GiB" in sure
    likely = verdict(make(fits=True, budget_bytes=1050 * MIB))
    assert likely.startswith("Likely fits in 1.03 GiB, by 50.00 MiB: less than the 100.00 MiB that")
    unlikely = verdict(make(fits=False, budget_bytes=960 * MIB))
    assert unlikely.startswith("Unlikely to fit in 960.00 MiB: it needs 40.00 MiB more, less than")
    assert "the 50.00 MiB by which" in unlikely
    never = verdict(make(fits=False, budget_bytes=900 * MIB))
    assert never.startswith("Does not fit in 900.00 MiB: it needs 100.00 MiB more.\n")
    assert "only 24.00 MiB would be left" in verdict(make(fits=False, budget_bytes=1024 * MIB))
    assert "--gpu" in verdict(make())


def test_what_does_not_fit_gets_the_command_that_finds_ways() -> None:
    advised = "Ways to make it fit: 'planner advise'"
    assert advised in breakdown_table(make(fits=False, budget_bytes=900 * MIB))
    assert advised not in breakdown_table(make(fits=True, budget_bytes=2 * GIB))
    assert advised not in breakdown_table(make())


def test_one_row_for_each_combination_with_the_fields_that_differ() -> None:
    settings = [TrainSetting(batch_size=b, optimizer=o) for b in (32, 64) for o in ("adamw", "sgd")]
    text = estimate_table([make(setting=s) for s in settings])
    header, rows = text.splitlines()[:2], text.splitlines()[3:]
    assert len(rows) == 4
    assert [row.split()[0] for row in rows] == ["32", "32", "64", "64"]
    assert "optimizer" in " ".join(header)
    assert "accumulate" not in " ".join(header)
    assert "model" not in " ".join(header)
    assert "fits" not in " ".join(header)
    assert "images/s" not in " ".join(header)


def test_rows_say_the_model_where_there_are_several_and_doubt_where_there_is_some() -> None:
    other = make(model=SwinConfig(name="swin_small"), fits=False, budget_bytes=GIB // 2)
    unsure = make(fits=True, budget_bytes=1050 * MIB)
    text = estimate_table([unsure, other])
    assert "native:swin_small" in text
    assert "likely" in text
    assert "unlikely" not in text


def test_json_tells_a_sure_yes_from_a_likely_one() -> None:
    given = ((True, 1200 * MIB), (True, 1050 * MIB), (False, 960 * MIB), (None, None))
    told = [make(fits=f, budget_bytes=b).to_json()["fits_surely"] for f, b in given]
    assert told == [True, False, False, None]


def test_a_setting_is_described_by_what_is_not_default() -> None:
    assert describe_setting(TrainSetting()) == "batch 64, bf16, adamw, checkpointing none"
    text = describe_setting(TrainSetting(accumulate=4, ema=True, compile="reduce-overhead"))
    assert text.endswith("accumulate 4, compile reduce-overhead, ema yes")


def test_two_settings_are_told_apart_in_the_same_words() -> None:
    changed = TrainSetting(batch_size=32, compile="default")
    assert describe_changes(changed, TrainSetting()) == "batch 32, compile default"
    assert describe_changes(changed, changed) == "the same setting"
