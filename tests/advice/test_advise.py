"""Advice says what estimates say: of every row, and of the wish."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner import advise
from planner.advice.advice import Advice
from planner.advice.table import Table
from planner.advice.wish import ALLOWED, FAITHFUL, LEVERS, Choice, Wish, read_wish
from planner.cli import cli, main
from planner.core.errors import UnsupportedError, UsageError
from planner.estimation.arguments import read_target
from tests.answers import advice_text
from tests.steps import TINY, TINY_FIELDS

BATCH = 512


@pytest.fixture(scope="module")
def advice() -> Advice:
    """A wish that does not fit as it stands."""
    return advise(TINY, gpu="rtx 3090", memory_bytes="700MiB", batch_size=BATCH)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return main(["advise", *arguments]), *capsys.readouterr()


def wish_for(
    model: Any, gpu: str = "rtx 4090", memory_bytes: str | None = None, batch_size: int = 64,
    keep: Any = (), **overrides: Any,
) -> Wish:  # fmt: skip
    return read_wish(
        model, None, read_target(gpu, memory_bytes), batch_size=batch_size,
        global_batch=None, keep=keep, allow=(), overrides=overrides,
    )  # fmt: skip


def test_every_row_is_the_estimate_of_its_own_command(advice: Advice) -> None:
    """The flags are typed, and bytes and rate come out the same."""
    from planner.cli.estimate import command

    rows = [advice.as_asked, advice.recommended, *advice.ways, *advice.front]
    unique = {row.flags: row for row in rows if row is not None}
    assert len(unique) > 5
    for row in unique.values():
        device = ["--gpu", "rtx 3090", "--memory", "700MiB", "--json"]
        fields = [part for k in TINY_FIELDS for part in ("--set", f"{k}={_text(TINY_FIELDS[k])}")]
        ran = CliRunner().invoke(command, ["native:swin_tiny", *fields, *row.flags, *device])
        found = json.loads(ran.stdout)
        assert found["device_total_bytes"] == row.estimate.device_total_bytes
        assert found["throughput"]["images_per_second"] == row.images_per_second


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def test_the_recommended_comes_first_and_then_the_fastest(advice: Advice) -> None:
    rates = [way.images_per_second for way in advice.ways[1:]]
    assert rates == sorted(rates, reverse=True)
    assert all(way.setting.global_batch == BATCH for way in (*advice.ways, *advice.front))
    assert advice.recommended == advice.ways[0]
    assert (advice.fastest or advice.recommended).flags == advice.front[0].flags


def test_where_the_wish_may_not_fit_a_batch_that_surely_does_comes_first() -> None:
    kept = ("checkpointing", "offload", "attention", "memory_format", "optimizer", "allocator",
            "compile", "activation_memory_budget")  # fmt: skip
    found = advise("native:swin_tiny", gpu="rtx 3090", memory_bytes="5200MiB", keep=kept)
    assert found.as_asked.estimate.fits
    assert not found.as_asked.estimate.fits_surely
    assert found.fastest is not None
    assert found.fastest.setting.batch_size == 64
    assert found.recommended is not None
    assert found.recommended.setting.batch_size == 48
    assert found.recommended.estimate.fits_surely


def test_ways_that_share_their_rates_are_told_apart_by_what_differs() -> None:
    """As long on the same bound, so that no rate of the card turns the order; or not."""
    estimates = Table(wish_for("native:swin_tiny"))

    def choice(**changes: Any) -> Choice:
        return Choice(estimates.wish.asked).updated(changes)

    again = choice(checkpointing="blocks")
    assert estimates.is_slower(again, choice())
    fused = choice(compile="default", attention="sdpa")
    assert estimates.rate(fused) > 1.1 * estimates.rate(choice(attention="eager"))
    assert not estimates.is_slower(choice(optimizer="adamw-fused"), choice())
    again = choice(compile="default", attention="sdpa", precision="fp32", checkpointing="stages")
    other = choice(attention="eager", checkpointing="stages")
    assert 1.1 < estimates.rate(again) / estimates.rate(other) < 2
    assert not estimates.is_slower(other, again)  # more bandwidth, faster matrix products


@pytest.mark.parametrize(
    "wish",
    [{"memory_bytes": "470MiB"}, {"allow": ["recipe"]}, {"keep": ["rounding"]}],
    ids=str,
)
def test_no_reason_against_a_lever_holds_for_the_recommended_too(wish: dict[str, Any]) -> None:
    """adamw-fused was rejected since it changes rounding, as the recommended did."""
    found = advise(TINY, gpu="rtx 3090", batch_size=16, **wish)
    best = found.recommended or found.nearest
    assert best is not None
    allowed = {*FAITHFUL, *(ALLOWED[name] for name in wish.get("allow", ()))}
    states = {lever.name: lever.state for lever in found.levers}
    assert (best.effects == ("nothing",)) is (states["fused optimizer"] == "kept")
    for treatment in found.bottleneck.treatments:
        effect = next(lever.effect for lever in LEVERS if lever.name == treatment.lever)
        if treatment.why == "does not fit":
            assert not treatment.fits
        elif treatment.why == "may not fit":
            assert best.estimate.fits_surely
        else:
            assert treatment.why == f"changes {effect}{' further' * (effect in best.effects)}"
            assert effect not in allowed
        assert states[treatment.lever] not in ("does not pay", "not needed")


def test_what_rates_cannot_tell_apart_is_ordered_by_what_fits_surely_and_by_the_batch() -> None:
    """A larger batch, 1 or 2% faster by figures of ±35%, came first: it might not fit, and was
    another recipe."""
    kept = ("checkpointing", "offload", "attention", "memory_format", "activation_memory_budget")
    found = advise("timm:swin_base_patch4_window7_224", gpu="rtx 4090", keep=kept)
    best, fastest = found.recommended, found.fastest
    assert best is not None
    assert fastest is not None
    assert 1 < fastest.images_per_second / best.images_per_second < 1.1
    assert best.estimate.fits_surely
    assert not fastest.estimate.fits_surely
    assert best.setting.batch_size == 64
    assert "learning rate" not in best.effects
    said = " ".join(advice_text(found).split())
    assert "(it fits even in the worst case and has a batch nearer to 64, and no way" in said
    assert "Perhaps faster, within the error of the figures:" in said


def test_what_levers_save_and_cost_adds_up(advice: Advice) -> None:
    assert advice.recommended is not None
    plain, best = advice.as_asked.estimate, advice.recommended.estimate
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


def test_what_is_to_be_kept_is_kept() -> None:
    kept = ("optimizer", "compile", "batch-size", "allocator")
    found = advise(TINY, gpu="rtx 3090", memory_bytes="1GiB", batch_size=64, keep=kept)
    for way in (*found.ways, *found.front):
        assert way.setting.optimizer == "adamw"
        assert way.setting.compile == "off"
        assert way.setting.batch_size == 64
        assert "allocator" not in dict(way.changes)
    assert found.recommended is not None
    state = {lever.name: lever.state for lever in found.levers}
    assert state["compile"] == state["fused optimizer"] == state["allocator"] == "kept"


def test_another_recipe_is_tried_only_where_it_is_allowed() -> None:
    wish: dict[str, Any] = {"gpu": "rtx 3090", "batch_size": 64}
    unasked, asked = advise(TINY, **wish), advise(TINY, **wish, allow=["recipe"])
    assert not any("recipe" in way.effects for way in unasked.front)
    assert any("recipe" in way.effects for way in asked.front)
    assert asked.front[0].images_per_second >= unasked.front[0].images_per_second
    state = {lever.name: lever.state for lever in unasked.levers}
    assert state["other optimizers"] == state["adapters"] == "not allowed"


def test_the_lines_that_go_on_from_it_are_taken_as_they_stand(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of a line, one after the other: the file is written, and the search begins from
    that way, or would with a trial to make."""
    monkeypatch.chdir(tmp_path)
    wish = ("--gpu", "rtx 3090", "--memory", "1GiB", "--batch-size", "8", "--keep", "compile")
    status, said, _ = ask(capsys, tiny, *wish, "--detail")
    assert status == 0
    tuning, emitting = (line for line in said.splitlines() if "| planner" in line)
    found = {}
    for line in (tuning, emitting):
        first, second = (shlex.split(part)[1:] for part in line.strip().split(" | "))
        assert main(first) == 0
        told = CliRunner().invoke(
            cli, [*second, *(["--help"] if line is tuning else [])], input=capsys.readouterr().out
        )
        assert told.exit_code == 0, told.output
        found[line] = second
    assert found[tuning][0] == "tune"
    assert "predicted and not measured" in (tmp_path / "train.py").read_text()


def test_a_wish_that_nothing_satisfies_gets_the_nearest(
    capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    wish = {"gpu": "rtx 3090", "batch_size": 64}
    found = advise(TINY, memory_bytes="470MiB", **wish)
    text = advice_text(found)
    assert text.startswith("Probably nothing fits in 470.00 MiB: the nearest way needs ")
    assert "From your setting to the nearest way" in text
    asked = ("--gpu", "rtx 3090", "--memory", "99MiB", "--batch-size", "8", "--keep", "compile")
    status, out, _ = ask(capsys, tiny, *asked, "--json")
    assert status == 1
    told = json.loads(out)
    assert told["recommended"] is None
    assert told["missing_bytes"] == told["nearest"]["device_total_bytes"] - told["budget_bytes"] > 0
    states = {lever.state for lever in found.levers}
    assert {"in the nearest", "not enough"} <= states
    assert not states & {"recommended", "not needed"}


def test_a_free_batch_is_sought() -> None:
    found = advise(TINY, gpu="rtx 3090", memory_bytes="1GiB")
    assert found.recommended is not None
    assert found.recommended.setting.accumulate == 1
    assert len({way.setting.batch_size for way in found.front}) > 2
    assert any("learning rate" in way.effects for way in found.front)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "advice needs a memory to fit into"),
        ({"gpu": "rtx 3090", "keep": ["optimiser"]}, "Did you mean 'optimizer'"),
        ({"gpu": "rtx 3090", "allow": ["recipes"]}, "Did you mean 'recipe'"),
        ({"gpu": "rtx 3090", "batch_size": 2, "global_batch": 2}, "Give one of the two"),
        ({"gpu": "rtx 3090", "global_batch": 7, "world_size": 2}, "cannot be split"),
    ],
)
def test_a_mistake_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        advise(TINY, **arguments)


def test_what_the_card_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="bf16 needs compute capability"):
        advise(TINY, gpu="v100-sxm-16gb", precision="bf16", batch_size=2)
    found = advise(TINY, gpu="v100-sxm-16gb", batch_size=2, allow=["recipe"])
    reasons = {lever.name: (lever.state, lever.reasons) for lever in found.levers}
    state, said = reasons["pure bf16"]
    assert state == "not available"
    assert "needs compute capability 8.0" in said[0]


@pytest.mark.parametrize(("memory", "offload"), [("8GiB", "none"), ("520MiB", "activations")])
def test_last_resorts_are_tried_only_where_nothing_else_surely_fits(
    memory: str, offload: str
) -> None:
    found = advise(
        TINY, gpu="rtx 3090", memory_bytes=memory, batch_size=64,
        keep=["compile", "checkpointing", "accumulate"],
    )  # fmt: skip
    assert {way.setting.offload for way in found.ways} == {offload}
    assert any("ways with offload" in line for line in found.left_out) == (offload == "none")


def test_a_resort_is_tried_where_what_fits_is_slower_than_an_eager_step_without() -> None:
    """Two images at a time surely fitted, and offloading 64 was half as fast again."""
    found = advise(
        "native:swin_small", gpu="rtx 3090", memory_bytes="2GiB", batch_size=64,
        keep=["compile", "checkpointing"],
    )  # fmt: skip
    assert {way.setting.offload for way in found.ways} == {"none", "activations"}
    assert found.recommended is not None
    assert found.recommended.setting.offload == "activations"


def test_a_wish_with_a_resort_is_freed_of_it() -> None:
    found = advise(TINY, gpu="rtx 3090", batch_size=64, offload="activations")
    assert found.recommended is not None
    assert found.recommended.setting.offload == "none"
    assert found.recommended.setting.compile != "off"
    assert next(x.state for x in found.levers if x.name == "compile") == "recommended"
    assert not any("ways with offload" in line for line in found.left_out)


def test_another_attention_is_taken_where_it_costs_nothing() -> None:
    """Fused attention is faster and needs less: no way that fits is to be without."""
    found = advise(TINY, gpu="rtx 3090", batch_size=64, attention="eager")
    assert {way.setting.attention for way in found.ways} == {"sdpa"}
    assert next(x.state for x in found.levers if x.name == "attention") == "recommended"


def test_already_in_a_setting_is_only_what_is_set() -> None:
    """Not what has no change for another reason: no fused lion, no half of one image."""

    def states(**wish: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        found = advise(TINY, gpu="rtx 3090", keep=["compile", "checkpointing"], **wish)
        return {lever.name: (lever.state, lever.reasons) for lever in found.levers}

    already = "already in your setting"
    odd = states(batch_size=1, optimizer="lion", allocator="expandable_segments:True")
    assert odd["allocator"] == odd["precision"] == (already, ())
    assert odd["accumulation"][0] == odd["fused optimizer"][0] == "not available"
    assert "no fused implementation" in odd["fused optimizer"][1][0]
    usual = states(batch_size=9, optimizer="adamw-fused", lora_rank=8, optimizer_in_backward=True)
    assert usual["accumulation"][0] != already
    assert {name for name, (state, _) in usual.items() if state == already} == {
        "precision", "fused optimizer", "optimizer in backward"
    }  # fmt: skip


def test_attention_is_a_lever_of_any_model_that_computes_it_by_operations() -> None:
    lever = next(lever for lever in LEVERS if lever.name == "attention")
    for said, changes in {"eager": [{"attention": "sdpa"}], "sdpa": [], "library": []}.items():
        wish = wish_for("timm:vit_tiny_patch16_224", attention=said)
        assert wish.changes(lever, Choice(wish.asked)) == changes


def test_a_lever_whose_step_would_be_recorded_is_named_and_no_recording_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 is recorded even of a Swin, and so are some optimizers: advice began to, to say how fast
    they would be."""
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    found = advise(TINY, gpu="rtx 4090", batch_size=32, allow=["recipe"])
    assert "Recording" not in capsys.readouterr().err
    said = {x.name: x.reasons for x in found.levers if x.state == "not available"}
    assert "recorded" in said["fp8"][0]
    assert "recorded" in said["memory budget"][0]
    text = " ".join(advice_text(found).split())
    assert "Not compared: optimizer=adamw-8bit, optimizer=adafactor, precision=fp8." in text


def test_what_has_no_step_is_named_and_nothing_is_called_the_fastest_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It said "the fastest that fits", and said that of another way once compiled recordings were
    kept."""
    has_step = Table.has_step
    monkeypatch.setattr(
        Table, "has_step", lambda self, c: c.setting.compile == "off" and has_step(self, c)
    )
    found = advise(TINY, gpu="rtx 3090", batch_size=16)
    said = " ".join(advice_text(found).split())
    assert "Recommended, the fastest of what was tried: " in said
    budget = "compile's activation memory budget"
    assert f"Not tried without --record (some minutes, once): compile, {budget}." in said
    monkeypatch.undo()
    assert ", the fastest found: " in advice_text(advise(TINY, gpu="rtx 3090", batch_size=16))


@pytest.mark.compiler
def test_a_trace_that_was_asked_for_narrows_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    wish: dict[str, Any] = {"gpu": "rtx 3090", "batch_size": 16, "keep": ["checkpointing"]}
    before = advise(TINY, **wish).recommended
    after = advise(TINY, **wish, recorded=True).recommended
    assert before is not None
    assert after is not None
    assert before.estimate.as_eager
    assert not after.estimate.as_eager
    assert before.estimate.low_bytes <= after.estimate.device_total_bytes
    assert after.estimate.device_total_bytes <= before.estimate.high_bytes


def test_under_deepspeed_no_lever_compiles() -> None:
    pytest.importorskip("deepspeed")
    found = advise(TINY, gpu="rtx 3090", batch_size=16, world_size=2, parallelism="zero2")
    assert found.recommended is not None
    assert found.recommended.setting.compile == "off"
    compiling = next(lever for lever in found.levers if lever.name == "compile")
    assert compiling.state == "not available"
    assert all("under DeepSpeed is not estimated" in reason for reason in compiling.reasons)


def test_where_nothing_fits_an_optimizer_on_the_host_is_named_with_what_it_needs() -> None:
    """And is no way: its time is not predicted."""
    found = advise(TINY, gpu="rtx 3090", memory_bytes="450MiB", batch_size=32, allow=["recipe"])
    assert found.recommended is None
    (said,) = (line for line in found.left_out if "optimizer on the host" in line)
    assert "--set offload_optimizer=state" in said
    assert "ask 'planner estimate'" in said
    fitting = advise(TINY, gpu="rtx 3090", batch_size=32)
    assert not any("on the host" in line for line in fitting.left_out)


NET = """
from torch import nn

def build():
    layers = []
    for before, after in ((3, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(before, after, 3), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
"""


def test_batch_norm_sees_another_micro_batch_and_every_lever_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "same result"; and it ended where an optimizer in backward was to accumulate."""
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    wish: dict[str, Any] = {"gpu": "rtx 3090", "memory_bytes": "1500MiB", "batch_size": 1024}
    kept = ["compile", "checkpointing", "offload"]
    found = advise("net:build", **wish, keep=kept, recorded=True, image_size=64, num_classes=10)
    assert found.recommended is not None
    assert found.recommended.setting.batch_size < 1024
    assert "batch norm" in found.recommended.effects
    assert "affects batch norm" in advice_text(found)
    assert not any("--record" in reason for lever in found.levers for reason in lever.reasons)


def test_what_cannot_be_estimated_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    refuses = "layers[0].register_forward_hook(lambda m, i, o: 1 // (o.shape[0] <= 100) and None)"
    (tmp_path / "few.py").write_text(NET.replace("    return", f"    {refuses}\n    return"))
    found = advise("few:build", gpu="rtx 3090", keep=["offload"], image_size=64, num_classes=10)
    assert found.recommended is not None
    (said,) = (line for line in found.left_out if "cannot be estimated" in line)
    assert "ZeroDivisionError" in said


def test_each_change_of_a_lever_has_its_effect_and_no_other() -> None:
    """Also where several levers share a field. A larger batch is no other rounding."""
    wish = wish_for("native:swin_tiny", precision="fp32")
    for lever in LEVERS:
        for change in wish.changes(lever, wish.sample):
            assert wish.effects(wish.sample.updated(change)) == (lever.effect,), lever.name
    assert wish.effects(wish.sample.updated({"batch_size": 128})) == ("learning rate",)
