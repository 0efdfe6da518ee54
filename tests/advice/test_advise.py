"""Advice says what estimates say: of every row, and of the wish."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner import SwinConfig, advise, estimate
from planner.advice.advising import Advice
from planner.advice.wish import read_wish
from planner.cli import main
from planner.errors import UnsupportedError, UsageError

TINY = {
    "image_size": 56, "depths": [2, 2], "num_heads": [1, 2], "embed_dim": 32, "num_classes": 10,
    "window_size": 7,
}  # fmt: skip
BATCH = 512
MODEL = SwinConfig.model_validate(TINY)


@pytest.fixture(scope="module")
def advice() -> Advice:
    """A wish that does not fit as it stands."""
    return advise(MODEL, gpu="rtx 3090", memory_bytes="700MiB", batch_size=BATCH)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY))
    return str(file)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["advise", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_wish_is_what_a_person_would_run(advice: Advice) -> None:
    setting = advice.plain.setting
    assert (setting.precision, setting.optimizer, setting.checkpointing, setting.compile) == (
        "bf16", "adamw", "none", "off",
    )  # fmt: skip
    assert advice.plain.estimate.fits is False
    assert advice.recommended is not None
    assert advice.recommended.estimate.fits


def test_every_row_is_the_estimate_of_its_own_command(advice: Advice) -> None:
    """The flags are typed, and bytes and rate come out the same."""
    from planner.cli.estimate import command

    rows = [advice.plain, advice.recommended, *advice.ways, *advice.front]
    unique = {row.flags: row for row in rows if row is not None}
    assert len(unique) > 5
    for row in unique.values():
        device = ["--gpu", "rtx 3090", "--memory", "700MiB", "--json"]
        fields = [part for k in TINY for part in ("--set", f"{k}={_text(TINY[k])}")]
        ran = CliRunner().invoke(command, ["native:swin_tiny", *fields, *row.flags, *device])
        found = json.loads(ran.stdout)
        assert found["device_total_bytes"] == row.estimate.device_total_bytes
        assert found["throughput"]["images_per_second"] == row.images_per_second


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def test_the_command_of_a_row_is_a_line_for_a_shell() -> None:
    found = advise("native:swin_tiny", gpu="rtx 3090", batch_size=32, embed_dim=48)
    assert found.recommended is not None
    words = shlex.split(found.recommended.command)
    assert words[:5] == ["planner", "estimate", "native:swin_tiny", "--set", "embed_dim=48"]
    assert main([*words[1:], "--json"]) == 0


def test_the_front_is_a_front(advice: Advice) -> None:
    assert len(advice.front) > 2
    for faster, slower in pairwise(advice.front):
        assert faster.images_per_second >= slower.images_per_second
        assert faster.estimate.device_total_bytes > slower.estimate.device_total_bytes
    for way in advice.front:
        assert way.estimate.fits
        assert not any(
            other.images_per_second > way.images_per_second
            and other.estimate.device_total_bytes < way.estimate.device_total_bytes
            for other in (*advice.ways, *advice.front)
        )


def test_ways_come_fastest_first_and_the_recommended_is_the_first(advice: Advice) -> None:
    rates = [way.images_per_second for way in advice.ways]
    assert rates == sorted(rates, reverse=True)
    assert advice.recommended == advice.ways[0] == advice.front[0]


def test_what_levers_save_and_cost_adds_up(advice: Advice) -> None:
    assert advice.recommended is not None
    plain, best = advice.plain.estimate, advice.recommended.estimate
    assert plain.throughput is not None
    assert best.throughput is not None
    saved = sum(fall.saved_bytes for fall in advice.waterfall)
    assert saved == plain.device_total_bytes - best.device_total_bytes
    assert advice.waterfall[-1].num_bytes == best.device_total_bytes
    added = sum(fall.added_seconds for fall in advice.waterfall)
    there = plain.throughput.step_seconds + added
    assert there == pytest.approx(BATCH / best.throughput.images_per_second)
    changed = dict(change for fall in advice.waterfall for change in fall.changes)
    assert changed == dict(advice.recommended.changes)


def test_every_way_sees_the_same_images(advice: Advice) -> None:
    for way in (*advice.ways, *advice.front):
        assert way.setting.global_batch == BATCH


def test_what_is_to_be_kept_is_kept() -> None:
    kept = ("optimizer", "compile", "batch-size", "allocator")
    found = advise(MODEL, gpu="rtx 3090", memory_bytes="1GiB", batch_size=64, keep=kept)
    for way in (*found.ways, *found.front):
        assert way.setting.optimizer == "adamw"
        assert way.setting.compile == "off"
        assert way.setting.batch_size == 64
        assert "allocator" not in dict(way.changes)
    assert found.recommended is not None
    state = {lever.name: lever.state for lever in found.levers}
    assert state["compile"] == state["fused optimizer"] == state["allocator"] == "kept"


def test_an_effect_that_is_not_wanted_is_not_there() -> None:
    found = advise(MODEL, gpu="rtx 3090", batch_size=32, keep=["rounding"])
    assert all(way.effects == ("nothing",) for way in (*found.ways, *found.front))


def test_another_recipe_is_tried_only_where_it_is_allowed() -> None:
    wish: dict[str, Any] = {"gpu": "rtx 3090", "batch_size": 16}
    unasked, asked = advise(MODEL, **wish), advise(MODEL, **wish, allow=["recipe"])
    assert not any("recipe" in way.effects for way in unasked.front)
    assert any("recipe" in way.effects for way in asked.front)
    assert asked.front[0].images_per_second >= unasked.front[0].images_per_second
    state = {lever.name: lever.state for lever in unasked.levers}
    assert state["other optimizers"] == state["adapters"] == "not allowed"


def test_advice_begins_no_trace_of_8_bits() -> None:
    found = read_wish(
        "native:swin_tiny", None, gpu="h100-sxm-80gb", memory_bytes=None, batch_size=64,
        global_batch=None, keep=(), allow=("recipe",), allocator=None, overrides={},
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="traced for each way"):
        found.apply(found.sample, {"precision": "fp8"})


def test_a_wish_that_nothing_satisfies_gets_the_nearest(
    capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    arguments = (tiny, "--gpu", "rtx 3090", "--memory", "470MiB", "--batch-size", "64")
    status, out, _ = ask(capsys, *arguments)
    assert status == 1
    assert "Nothing fits. The nearest needs" in out
    status, out, _ = ask(capsys, *arguments, "--json")
    found = json.loads(out)
    assert status == 1
    assert found["recommended"] is None
    need = found["nearest"]["device_total_bytes"]
    assert found["missing_bytes"] == need - found["budget_bytes"] > 0
    states = {lever["state"] for lever in found["levers"]}
    assert {"in the nearest", "not enough"} <= states
    assert not states & {"recommended", "not needed"}


def test_a_wish_that_fits_is_told_so(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    status, out, _ = ask(capsys, tiny, "--gpu", "rtx 3090", "--batch-size", "8")
    assert status == 0
    assert "Fits in 23." in out
    for word in ("Recommended", "lever by lever", "What the device does", "Levers:", "Left out:"):
        assert word in out


def test_without_a_gpu_ways_are_ordered_by_a_card_that_is_named() -> None:
    found = advise(MODEL, memory_bytes="1GiB", batch_size=16)
    assert found.gpu is None
    assert found.rated == "a100-sxm-80gb"
    assert found.recommended is not None
    alone = estimate(MODEL, found.recommended.setting, memory_bytes="1GiB")
    if not found.recommended.flags[-1].startswith("expandable"):
        assert alone.device_total_bytes == found.recommended.estimate.device_total_bytes


def test_a_free_batch_is_sought() -> None:
    found = advise(MODEL, gpu="rtx 3090", memory_bytes="1GiB")
    assert found.recommended is not None
    assert found.recommended.setting.accumulate == 1
    assert len({way.setting.batch_size for way in found.front}) > 2
    assert any("learning rate" in way.effects for way in found.front)


def test_a_global_batch_counts_all_devices() -> None:
    found = advise(MODEL, gpu="rtx 3090", global_batch=64, world_size=2)
    assert found.plain.setting.batch_size == 32
    assert all(way.setting.global_batch == 64 for way in found.front)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "advice needs a memory to fit into"),
        ({"gpu": "rtx 3090", "keep": ["optimiser"]}, "Did you mean 'optimizer'"),
        ({"gpu": "rtx 3090", "allow": ["recipes"]}, "Did you mean 'recipe'"),
        ({"gpu": "rtx 3090", "batch_size": 2, "global_batch": 2}, "say the same thing twice"),
        ({"gpu": "rtx 3090", "global_batch": 7, "world_size": 2}, "cannot be split"),
        ({"gpu": "rtx 3091"}, "unknown GPU"),
        ({"gpu": "rtx 3090", "embed_dimm": 3}, "Did you mean 'embed_dim'"),
    ],
)
def test_a_mistake_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        advise(MODEL, **arguments)


def test_what_the_card_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="bf16 needs compute capability"):
        advise(MODEL, gpu="v100-sxm-16gb", precision="bf16", batch_size=2)
    found = advise(MODEL, gpu="v100-sxm-16gb", batch_size=2, allow=["recipe"])
    reasons = {lever.name: (lever.state, lever.reasons) for lever in found.levers}
    state, said = reasons["pure bf16"]
    assert state == "not available"
    assert "needs compute capability 8.0" in said[0]


def test_the_object_says_all_that_the_class_does(advice: Advice) -> None:
    said = json.loads(json.dumps(advice.to_json()))
    assert set(said) - {"fits"} == set(Advice.__dataclass_fields__)
    assert said["waterfall"][-1]["num_bytes"] == said["recommended"]["device_total_bytes"]


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "advice.svg"
    status, out, _ = ask(
        capsys, tiny, "--gpu", "rtx 3090", "--batch-size", "8", "--plot", str(file)
    )
    assert status == 0
    assert f"Drew {file}" in out
    assert file.read_text().startswith("<?xml")


def test_a_lever_whose_step_would_be_traced_is_named_and_no_trace_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 is traced even of a Swin: advice began the trace to say how fast it would be."""
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    found = advise("native:swin_tiny", gpu="rtx 4090", batch_size=32, allow=["recipe"])
    assert "Tracing" not in capsys.readouterr().err
    state, said = next((x.state, x.reasons) for x in found.levers if x.name == "fp8")
    assert state == "not available"
    assert "traced" in said[0]
