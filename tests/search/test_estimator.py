"""What stands for a setting in a search's prior, against the setting's own estimate."""

from __future__ import annotations

import pytest

from planner.estimate import estimate
from planner.hardware import recognise_gpu
from planner.libraries.resolve import resolve_model
from planner.schema import DeviceInfo, SwinConfig, TrainSetting
from planner.units import GIB
from search.estimator import DeviceEstimator

H100 = DeviceInfo(
    kind="cuda", name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, capability=(9, 0)
)


@pytest.fixture(scope="module")
def model() -> SwinConfig:
    found = resolve_model("native:swin_tiny")
    assert isinstance(found, SwinConfig)
    return found


@pytest.mark.parametrize("batch_size", [8, 64])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_eager_settings_are_close_to_their_own_estimates(
    model: SwinConfig, batch_size: int, precision: str, optimizer: str, checkpointing: str
) -> None:
    setting = TrainSetting(
        batch_size=batch_size, precision=precision, optimizer=optimizer, checkpointing=checkpointing
    )
    own = estimate(model, setting, gpu=recognise_gpu(H100.name, H100.total_bytes))
    shared = DeviceEstimator(H100)(model, setting)
    assert shared is not None
    assert own.throughput is not None
    assert shared.throughput is not None
    assert shared.device_total_bytes == pytest.approx(own.device_total_bytes, rel=0.05)
    assert shared.throughput.step_seconds == pytest.approx(own.throughput.step_seconds, rel=0.07)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_settings_have_the_eager_ones_memory_and_their_own_time(
    model: SwinConfig, mode: str
) -> None:
    estimator = DeviceEstimator(H100)
    eager = estimator(model, TrainSetting(batch_size=64))
    compiled = estimator(model, TrainSetting(batch_size=64, compile=mode))
    assert eager is not None
    assert compiled is not None
    assert eager.throughput is not None
    assert compiled.throughput is not None
    assert compiled.device_total_bytes == eager.device_total_bytes
    assert compiled.throughput.step_seconds < eager.throughput.step_seconds


def test_a_device_without_rates_is_given_no_time(model: SwinConfig) -> None:
    unknown = DeviceInfo(kind="cuda", name="Unheard-of GPU", total_bytes=16 * GIB)
    found = DeviceEstimator(unknown)(model, TrainSetting(batch_size=8, precision="tf32"))
    assert found is not None
    assert found.throughput is None
