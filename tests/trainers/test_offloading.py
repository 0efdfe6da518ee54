"""Saved activations in the host's memory, in the files of those trainers that hold a forward."""

from __future__ import annotations

import pytest

from planner.core.schema import TrainSetting
from planner.trainers.emission import emit_setting
from tests.trainers.cases import FakeEstimator, tiny

SETTING = TrainSetting(batch_size=2, precision="fp32", offload="activations", attention="eager")


@pytest.mark.parametrize("target", ["pytorch", "lightning", "accelerate", "deepspeed"])
def test_the_context_is_written_out(target: str) -> None:
    """A copy of the planner's own, around forward and loss."""
    found = emit_setting(tiny("torchvision"), SETTING, target, estimator=FakeEstimator())
    text = found.text + found.code
    assert "\ndef offload_activations(" in text
    assert "with offload_activations(kept):" in text
    assert "planner.training.offloading" not in text
    plain = SETTING.model_copy(update={"offload": "none"})
    without = emit_setting(tiny("torchvision"), plain, target, estimator=FakeEstimator())
    assert "offload" not in without.text + without.code
