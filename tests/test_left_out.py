"""What an estimate of attention says that it leaves out, by card."""

from __future__ import annotations

import pytest

from planner.core.schema import TrainSetting
from planner.estimation.left_out import FusedAttention, left_out


def said(
    capability: tuple[int, int] | None, *kernels: FusedAttention, precision: str = "fp16"
) -> str:
    setting = TrainSetting.model_validate({"precision": precision})
    return " ".join(left_out(setting, kernels=kernels, capability=capability))


@pytest.mark.parametrize(
    ("capability", "cudnn", "no_flash"),
    [(None, True, False), ((7, 5), False, True), ((8, 6), False, False), ((9, 0), True, False),
     ((10, 0), True, False), ((12, 0), False, False)],
)  # fmt: skip
def test_attention_is_another_kernels_on_some_cards(
    capability: tuple[int, int] | None, cudnn: bool, no_flash: bool
) -> None:
    found = said(capability, "flash")
    assert ("cuDNN's attention" in found) is cudnn
    assert ("does not run on capability 7.5" in found) is no_flash
    assert "attention" not in said(capability)
    assert "attention" not in said(capability, "efficient", precision="fp32")
