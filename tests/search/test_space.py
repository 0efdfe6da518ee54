"""The candidates: finite, valid, with stable ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.advice.space import batch_ladder, divisors
from planner.core.errors import UnsupportedError, UsageError
from planner.core.schema import DeviceInfo, FactoryModel, SwinConfig, TrainSetting
from search.loop.space import (
    AXES,
    Space,
    Value,
    make_space,
    read_values,
    setting_id,
    simplicity,
)
from search.loop.study import SpaceParams

CPU = DeviceInfo(kind="cpu", name="Test CPU", total_bytes=2**33)
T4 = DeviceInfo(kind="cuda", name="Tesla T4", total_bytes=2**34, capability=(7, 5))
A100 = DeviceInfo(kind="cuda", name="A100", total_bytes=2**36, capability=(8, 0))
MODEL = SwinConfig()
PLAIN = {
    "precision": ("fp32",), "checkpointing": ("none",), "compile": ("off",),
    "attention": ("eager",), "optimizer": ("adamw",),
}  # fmt: skip


def asked(**fields: Value | tuple[Value, ...]) -> Space:
    """The space of what was asked for by name, and all else plain."""
    restrict = {**PLAIN, **{field: read_values(field, given) for field, given in fields.items()}}
    return make_space(MODEL, A100, restrict=restrict, batch_sizes=(8, 16))


def test_precisions_follow_the_device() -> None:
    def precisions(device: DeviceInfo, **asked: tuple[Value, ...]) -> tuple[Value | None, ...]:
        return make_space(MODEL, device, restrict=asked, batch_sizes=(8,)).choices["precision"]

    assert precisions(CPU) == ("fp32", "bf16")
    assert precisions(T4) == ("fp32", "fp16")
    assert precisions(A100) == ("fp32", "tf32", "bf16")
    assert precisions(A100, precision=("bf16", "fp16")) == ("bf16", "fp16")
    with pytest.raises(UnsupportedError, match="bf16"):
        precisions(T4, precision=("bf16",))
    with pytest.raises(UsageError, match=r"'bf16'.*bf17"):
        read_values("precision", "bf17")


def test_a_factory_keeps_its_own_attention_and_its_blocks_may_be_checkpointed() -> None:
    def of(**restrict: tuple[Value, ...]) -> Space:
        own = FactoryModel(factory="a:b")
        return make_space(own, CPU, restrict=restrict, batch_sizes=(8,))

    assert of().choices["attention"] == ("library",)
    assert of().choices["checkpointing"] == ("none", "blocks")
    parts = ("blocks:2", "blocks:every-2", "selective")
    assert set(of(checkpointing=parts).choices["checkpointing"]) == set(parts)
    with pytest.raises(UnsupportedError, match="stages"):
        of(checkpointing=("stages",))
    with pytest.raises(UnsupportedError, match="a:b is none: frozen_stages is 1"):
        of(frozen_stages=(1,))
    plain = {**PLAIN, "attention": ("library",)}
    space = of(**plain, lora_rank=(0, 8))
    assert {c.setting.lora_rank for c in space.candidates} == {0}
    assert space.left_out[0].startswith("1 setting is left out: settings freeze or adapt")


def test_ids_are_unique_and_do_not_change() -> None:
    space = make_space(MODEL, A100)
    assert len({c.id for c in space.candidates}) == len(space)
    # Golden: studies on disk are found by it.
    assert setting_id(TrainSetting(batch_size=32, precision="fp32")) == "62b42faab91d"


@pytest.mark.parametrize(
    ("field", "given", "values"),
    [
        ("lora_rank", ("0", "8"), (0, 8)),
        ("ema", ("false", "true"), (False, True)),
        ("loss", ("cross-entropy", "soft-target"), ("cross-entropy", "soft-target")),
    ],
)
def test_any_field_can_be_an_axis(
    field: str, given: tuple[Value, ...], values: tuple[Value, ...]
) -> None:
    space = asked(**{field: given})
    assert set(space.choices[field]) == set(values)
    assert space.axes == (*AXES, field)
    assert len(space) == 4
    assert len({c.arm for c in space.candidates}) == 2
    params = SpaceParams(space)  # and so Optuna has it
    assert field in params.distributions
    assert all(params.candidate(params.of(c)) == c for c in space.candidates)
    assert params.candidate({"batch_size": 7}) is None


def test_what_excludes_each_other_is_left_out_with_one_line_for_each_law() -> None:
    space = asked(
        ema=("false", "true"), clip_grad=("false", "true"), frozen_stages=(0, 9),
        parallelism="zero3",
    )  # fmt: skip
    assert len(space) == 4
    assert not any(c.setting.ema for c in space.candidates)
    # Of 16 settings half average weights under zero3; half of the others freeze too much.
    first, second = space.left_out
    assert first.startswith("8 settings are left out: ema averages whole weights on each device")
    assert second == "4 settings are left out: the model has 4 stages: frozen_stages is 9."
    # It is refused only where nothing is left.
    with pytest.raises(UnsupportedError, match="9"):
        asked(frozen_stages=9)


@given(st.integers(1, 5000))
def test_the_ladder_is_multiples_of_eight_where_large(largest: int) -> None:
    ladder = batch_ladder(largest)
    assert ladder == tuple(sorted(set(ladder)))
    assert ladder[-1] <= largest < 2 * ladder[-1]
    assert all(b % 8 == 0 for b in ladder if b >= 16)


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8]))
def test_a_global_batch_is_held_exactly(share: int, world: int) -> None:
    base = TrainSetting(world_size=world)
    space = make_space(MODEL, CPU, base, restrict=PLAIN, global_batch=share * world)
    assert all(c.setting.global_batch == share * world for c in space.candidates)
    assert {c.setting.batch_size for c in space.candidates} <= set(divisors(share))
    assert 1 in {c.setting.batch_size for c in space.candidates}


def test_plain_settings_are_simpler() -> None:
    plain = TrainSetting(precision="fp32", batch_size=8)
    for change in (
        {"compile": "default"}, {"checkpointing": "blocks"}, {"precision": "bf16"},
        {"attention": "sdpa"}, {"optimizer": "adamw-fused"}, {"batch_size": 16},
        {"offload": "activations"},
    ):  # fmt: skip
        assert simplicity(plain) < simplicity(plain.model_copy(update=change)), change
    ways = [TrainSetting(world_size=4, parallelism=p) for p in ("none", "ddp", "fsdp", "zero3")]
    assert sorted(ways, key=simplicity) == ways


def test_an_option_of_one_way_makes_no_other_setting_of_the_others() -> None:
    """fsdp with and without resharding, and ddp once: not ddp left out for FSDP's option."""
    ways = {"parallelism": ("ddp", "fsdp"), "fsdp_reshard": (True, False)}
    base = TrainSetting(world_size=4)
    space = make_space(MODEL, A100, base, restrict={**PLAIN, **ways}, batch_sizes=(8,))
    found = [(c.setting.parallelism, c.setting.fsdp_reshard) for c in space.candidates]
    assert found == [("ddp", True), ("fsdp", True), ("fsdp", False)]
