"""The prior of a model that is no Swin of ours: recorded in another process, kept, and never sought
in vain twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.core.schema import DeviceInfo, FactoryModel, TrainSetting
from planner.core.units import GIB
from planner.estimation.device_estimator import DeviceEstimator
from planner.libraries.resolve import resolve_model
from search.loop.space import make_space
from search.tuning.device_prior import device_prior, recording_seconds
from tests.search.tables import H100, MODEL

CPU = DeviceInfo(kind="cpu", name="Test CPU", total_bytes=16 * GIB)


def factory(name: str) -> FactoryModel:
    factory = f"tests.recorded_models:{name}"  # not imported here: it imports torch
    return FactoryModel(factory=factory, image_size=(32, 32), num_classes=10)


@pytest.mark.parametrize(
    ("left", "recording"), [(8.0, 4.0), (20.0, 10.0), (60.0, 15.0), (600.0, 150.0)]
)
def test_a_short_budget_has_time_to_record_and_to_probe(left: float, recording: float) -> None:
    assert recording_seconds(left) == recording


def test_recording_ends_with_its_share_of_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    model = factory("Convolutional")
    axes = {"precision": ("fp32",), "compile": ("off",), "checkpointing": ("none",)}
    space = make_space(model, CPU, restrict=axes, batch_sizes=(1, 4, 8, 16))
    prior, notes = device_prior(space, model, CPU, "auto", 8 * GIB, seconds_left=0.002)
    assert "in the time that was left" in notes[0]
    assert "a generic guess" in prior.basis


def test_a_whole_space_on_a_gpu_needs_few_recordings() -> None:
    """Eager fp32 and bf16 of each checkpointing stand for all; a fused optimizer is seen once."""
    model = factory("Convolutional")
    space = make_space(model, H100)
    estimator = DeviceEstimator(H100)
    steps = estimator.steps_of(model, [c.setting for c in space.candidates])
    kinds = len(space.choices["checkpointing"])
    assert len(space) > 200 * kinds
    assert len(steps) <= 3 * (2 * kinds) + 4


@pytest.mark.parametrize(
    ("checkpointing", "said"),
    [(("none", "stages"), "step with checkpointing stages."), (("stages",), "step.")],
)
def test_only_what_was_not_recorded_is_called_unknown(
    checkpointing: tuple[str, ...], said: str
) -> None:
    """FSDP2 with reentrant checkpointing is followed by no shapes."""
    model = resolve_model("native:swin_tiny")
    axes = {"precision": ("bf16",), "compile": ("off",), "checkpointing": checkpointing}
    ranks = TrainSetting(parallelism="fsdp", world_size=2)
    space = make_space(model, H100, ranks, restrict=axes, batch_sizes=(8, 16))
    (note,) = device_prior(space, model, H100, DeviceEstimator(H100), H100.total_bytes)[1]
    assert f"what fsdp adds to one device's {said}" in note


def test_a_prior_is_kept_for_the_next_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    axes = {"precision": ("fp32",), "compile": ("off",), "attention": ("sdpa",)}
    space = make_space(MODEL, CPU, restrict=axes, batch_sizes=(1, 4))
    first, _ = device_prior(space, MODEL, CPU, "auto", 8 * GIB)

    def never(*_: object) -> None:
        raise AssertionError("estimated anew")

    monkeypatch.setattr("search.tuning.device_prior.estimated_prior", never)
    assert device_prior(space, MODEL, CPU, "auto", 8 * GIB)[0] == first
    for budget, device in ((16 * GIB, CPU), (8 * GIB, H100)):
        with pytest.raises(AssertionError, match="anew"):
            device_prior(space, MODEL, device, "auto", budget)
