"""Every operation of the libraries' steps has a kind: what has none would be shown as "other"."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.core.schema import SwinConfig, TrainSetting
from search.probe.protocol import TRACE_FILE, ProbeRequest, ProfileOrder
from search.tuning.profiling.attribution import Attribution, attribute
from search.tuning.profiling.kinds import FUSED, OTHER, kernel_kind
from search.tuning.profiling.trace import read_trace

TINY = {
    "image_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2),
    "num_classes": 10, "drop_path_rate": 0.2,
}  # fmt: skip


def profile_cpu_steps(
    folder: Path, model: SwinConfig, setting: TrainSetting, steps: int = 1
) -> None:
    """Steps of a real module on the CPU, by the worker's own code."""
    pytest.importorskip("torch")
    from search.probe.worker.meter import make_meter
    from search.probe.worker.phases import StepPhases
    from search.probe.worker.profiling import profile_steps
    from search.probe.worker.subject import build_training

    training = build_training(ProbeRequest(model=model, setting=setting))
    order = ProfileOrder(folder=str(folder), steps=steps)
    profile_steps(training, make_meter("cpu"), StepPhases(setting.accumulate), order)


def profiled(folder: Path, library: str, version: int = 1, **fields: object) -> Attribution:
    model = SwinConfig.model_validate({**TINY, "library": library, "version": version})
    setting = TrainSetting.model_validate({"batch_size": 2, "precision": "fp32", **fields})
    try:
        profile_cpu_steps(folder, model, setting)
    except PlannerError as error:
        pytest.skip(error.message)
    return attribute(read_trace(folder / TRACE_FILE))


@pytest.mark.parametrize(("library", "version"), [("native", 1), ("timm", 2)])
def test_every_operation_of_a_library_has_a_kind(
    library: str, version: int, tmp_path: Path
) -> None:
    found = profiled(tmp_path, library, version, precision="bf16")
    assert found.unknown == ()
    kinds = {kind for _, kind in found.names}
    assert {"matmul", "conv", "pointwise", "reduction", "copy"} <= kinds
    assert {key.phase for key in found.seconds} >= {"forward", "backward", "optimizer"}


def test_a_kernel_s_own_name_counts_where_no_operation_launched_it() -> None:
    for name, launched_by, kind in (
        ("ampere_sgemm_128x64_tn", "conv", "conv"),
        ("ampere_bf16_s16816gemm_bf16_128x64", None, "matmul"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", None, "attention"),
        ("void cudnn::detail::dgrad_engine<float>", None, "conv"),
        ("void at::native::vectorized_elementwise_kernel<4>", None, "pointwise"),
        ("triton_red_fused_native_layer_norm_3", None, FUSED),
        ("triton_tem_fused_addmm_1", FUSED, "matmul"),
        ("Memcpy DtoH (Device -> Pinned)", "copy", "transfer"),
        ("Memcpy DtoD (Device -> Device)", None, "copy"),
        ("what_is_this", None, OTHER),
    ):
        assert kernel_kind(name, launched_by) == kind, name
