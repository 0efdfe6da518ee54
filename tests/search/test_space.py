"""The candidates: finite, valid, with stable ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import UnsupportedError, UsageError
from planner.schema import DeviceInfo, FactoryModel, SwinConfig, TrainSetting
from search.space import batch_ladder, divisors, make_space, setting_id, simplicity

CPU = DeviceInfo(kind="cpu", name="Test CPU", total_bytes=2**33)
T4 = DeviceInfo(kind="cuda", name="Tesla T4", total_bytes=2**34, capability=(7, 5))
A100 = DeviceInfo(kind="cuda", name="A100", total_bytes=2**36, capability=(8, 0))
MODEL = SwinConfig()


def test_precisions_follow_the_device() -> None:
    assert make_space(MODEL, CPU).choices["precision"] == ("fp32", "bf16")
    assert make_space(MODEL, T4).choices["precision"] == ("fp32", "fp16")
    assert make_space(MODEL, A100).choices["precision"] == ("fp32", "tf32", "bf16")
    asked = make_space(MODEL, A100, restrict={"precision": ("bf16", "fp16")})
    assert asked.choices["precision"] == ("bf16", "fp16")


def test_an_axis_can_be_fixed_or_restricted() -> None:
    space = make_space(MODEL, CPU, restrict={"precision": ("bf16",), "compile": ("off",)})
    assert {c.setting.precision for c in space.candidates} == {"bf16"}
    assert {c.setting.compile for c in space.candidates} == {"off"}


def test_what_the_device_lacks_is_refused_and_what_nobody_knows_too() -> None:
    with pytest.raises(UnsupportedError, match="bf16"):
        make_space(MODEL, T4, restrict={"precision": ("bf16",)})
    with pytest.raises(UsageError, match=r"bf17.*bf16"):
        make_space(MODEL, CPU, restrict={"precision": ("bf17",)})


def test_a_library_without_fused_attention_refuses_it() -> None:
    with pytest.raises(UnsupportedError, match="sdpa"):
        make_space(SwinConfig(library="torchvision"), CPU, restrict={"attention": ("sdpa",)})


def test_a_factory_keeps_its_own_attention_and_its_blocks_may_be_checkpointed() -> None:
    space = make_space(FactoryModel(factory="a:b"), CPU)
    assert space.choices["attention"] == ("library",)
    assert space.choices["checkpointing"] == ("none", "blocks")
    parts = ("blocks:2", "blocks:every-2")
    asked = make_space(FactoryModel(factory="a:b"), CPU, restrict={"checkpointing": parts})
    assert asked.choices["checkpointing"] == parts
    with pytest.raises(UnsupportedError, match="stages"):
        make_space(FactoryModel(factory="a:b"), CPU, restrict={"checkpointing": ("stages",)})


def test_ids_are_unique_and_do_not_change() -> None:
    space = make_space(MODEL, A100)
    assert len({c.id for c in space.candidates}) == len(space)
    # Golden: studies on disk are found by it.
    assert setting_id(TrainSetting(batch_size=32, precision="fp32")) == "62b42faab91d"


def test_an_arm_differs_in_batch_alone() -> None:
    space = make_space(MODEL, CPU)
    for c in space.candidates:
        arm = {o.setting.model_copy(update={"batch_size": 1}) for o in space.candidates
               if o.arm == c.arm}  # fmt: skip
        assert len(arm) == 1
        break


@given(st.integers(1, 5000))
def test_the_ladder_is_multiples_of_eight_where_large(largest: int) -> None:
    ladder = batch_ladder(largest)
    assert ladder == tuple(sorted(set(ladder)))
    assert ladder[-1] <= largest < 2 * ladder[-1]
    assert all(b % 8 == 0 for b in ladder if b >= 16)


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8]))
def test_a_global_batch_is_held_exactly(share: int, world: int) -> None:
    base = TrainSetting(world_size=world)
    only = {"precision": ("fp32",), "checkpointing": ("none",), "compile": ("off",),
            "attention": ("eager",), "optimizer": ("adamw",)}  # fmt: skip
    space = make_space(MODEL, CPU, base, restrict=only, global_batch=share * world)
    assert all(c.setting.global_batch == share * world for c in space.candidates)
    assert {c.setting.batch_size for c in space.candidates} <= set(divisors(share))
    assert 1 in space.rungs


def test_a_global_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 4"):
        make_space(MODEL, CPU, TrainSetting(world_size=4), global_batch=30)
    with pytest.raises(UsageError, match="divides 30"):
        make_space(MODEL, CPU, batch_sizes=(7,), global_batch=30)


def test_plain_settings_are_simpler() -> None:
    plain = TrainSetting(precision="fp32", batch_size=8)
    for change in (
        {"compile": "default"}, {"checkpointing": "blocks"}, {"precision": "bf16"},
        {"attention": "sdpa"}, {"optimizer": "adamw-fused"}, {"batch_size": 16},
    ):  # fmt: skip
        assert simplicity(plain) < simplicity(plain.model_copy(update=change)), change
