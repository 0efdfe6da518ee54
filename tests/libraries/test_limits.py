"""What cannot run is refused first: in an estimate, in a search and where it is emitted."""

import pytest

from planner import SwinConfig, TrainSetting, estimate, largest_batch
from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, FactoryModel
from planner.core.units import GIB
from planner.estimation.estimate import resolve
from planner.libraries.limits import SDPA_WINDOWS, largest_sdpa_batch, windows_per_image
from planner.libraries.names import find_library
from planner.machine.hardware import all_gpus
from planner.machine.hardware.gpu import precisions_of
from planner.trainers.emission import emit, emit_setting
from tests.trainers.cases import recommendation, tiny

T4 = DeviceInfo(kind="cuda", name="Tesla T4", total_bytes=15 * GIB, capability=(7, 5))
FACTORY = FactoryModel(factory="a:b")


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("reduce-overhead", {"accumulate": 2}), ("max-autotune", {"zero_grad_to_none": False})],
)
def test_cuda_graphs_beside_kept_gradients_are_refused(mode: str, kept: dict[str, object]) -> None:
    setting = TrainSetting.model_validate({"compile": mode, **kept})
    refusal = rf"(?s){mode}.*{next(iter(kept))}.*max-autotune-no-cudagraphs"
    with pytest.raises(UnsupportedError, match=refusal):
        estimate("native:swin_tiny", setting)
    with pytest.raises(UnsupportedError, match=refusal):
        resolve(FACTORY, setting)
    with pytest.raises(UnsupportedError, match=refusal):
        emit_setting(FACTORY, setting, "pytorch")
    for fine in ({"compile": "max-autotune-no-cudagraphs"}, {"compile": "default"}):
        find_library("native").resolve(tiny(), setting.model_copy(update=fine))


# Derived: sides in tokens over sides of a window, rounded up, of the stage that has most.
@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, 64),  # 56 / 7
        ({"image_size": 384, "window_size": 12}, 64),  # 96 / 12
        ({"image_size": 256, "window_size": 8}, 64),
        ({"image_size": 224, "window_size": 12}, 25),  # 56 / 12, padded
        ({"image_size": (224, 448)}, 128),
        ({"image_size": 32, "window_size": (8, 2, 2, 1)}, 4),  # stages of 8, 4, 2, 1
    ],
)
def test_the_largest_batch_with_sdpa_follows_from_the_windows(
    changes: dict[str, object], windows: int
) -> None:
    model = SwinConfig.model_validate(changes)
    spec = find_library("native")
    setting = TrainSetting(attention="sdpa")
    assert windows_per_image(model, setting) == windows
    largest = SDPA_WINDOWS // windows
    assert largest_sdpa_batch(model, setting) == largest
    spec.resolve(model, setting.model_copy(update={"batch_size": largest}))
    over = setting.model_copy(update={"batch_size": largest + 1})
    with pytest.raises(UnsupportedError, match=rf"(?s)65,535.*batch_size {largest} or less"):
        spec.resolve(model, over)
    spec.resolve(model, over.model_copy(update={"attention": "eager"}))
    spec.resolve(model, over.model_copy(update={"lora_rank": 4}))  # no bias is trained
    spec.resolve(model, over.model_copy(update={"frozen_stages": 4}))


def test_the_largest_batch_ends_where_sdpa_does() -> None:
    model = SwinConfig(depths=(1, 1), num_heads=(1, 2), embed_dim=16)
    best = largest_batch(model, TrainSetting(attention="sdpa"), memory_bytes=200 * GIB)
    assert best.setting.batch_size == 1023


def test_a_precision_that_a_card_lacks_is_refused() -> None:
    for gpu, precision in [
        ("v100-sxm-16gb", "bf16"), ("t4", "pure-bf16"), ("t4", "tf32"), ("mi300x", "tf32"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=rf"(?s){precision} needs.*--precision fp16"):
            estimate("native:swin_tiny", gpu=gpu, precision=precision)


def test_what_a_card_has_is_what_the_catalogue_rates() -> None:
    for gpu in all_gpus():
        offered = precisions_of(gpu.vendor, gpu.capability)
        assert ("bf16" in offered) == gpu.has_bf16, gpu.name
        assert ("tf32" in offered) <= (gpu.tf32_flops is not None), gpu.name
        assert ("fp16" in offered) == (gpu.fp16_flops is not None), gpu.name


def test_a_result_s_device_decides_what_may_be_emitted() -> None:
    found = recommendation(
        tiny(), TrainSetting(batch_size=8, precision="fp16", attention="eager"), device=T4
    )
    with pytest.raises(UnsupportedError, match=r"bf16 needs.*Tesla T4"):
        emit(found, "pytorch", changes={"precision": "bf16"})
    emit(found, "pytorch", changes={"precision": "fp32"})


def test_every_fault_of_a_setting_is_said_at_once() -> None:
    setting = TrainSetting(attention="sdpa", checkpointing="stages:7", lora_rank=4)
    with pytest.raises(UnsupportedError) as caught:
        find_library("timm").resolve(SwinConfig(library="timm", version=2), setting)
    for law in ("only eager attention", "checkpointing is stages:7", "lora_rank is 4"):
        assert law in caught.value.message
    assert len(caught.value.way_out.splitlines()) == 3
