"""`profile` with the worker's steps in this process, and what is left where it fails."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from planner.core.errors import PlannerError
from planner.core.schema import MeasurementRecord, SwinConfig, TrainSetting
from planner.core.schema.record import ProfileRecord
from planner.report.time import profile_text
from planner.throughput.prediction import DeviceRates
from search.probe.device import describe_device
from search.probe.protocol import TRACE_FILE, ProbeRequest
from search.probe.worker.meter import make_meter
from search.probe.worker.profiling import operations, profile_steps, profiled_kind
from search.probe.worker.subject import StepPhases, build_training
from search.tuning import profiling
from tests.trainers.cases import recommendation

MODEL = SwinConfig(
    image_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=10
)
SETTING = TrainSetting(batch_size=2, precision="fp32", checkpointing="blocks", attention="eager")
RATES = DeviceRates(
    name="a test's", basis="made up", matmul_flops={"float32": 1e11}, bandwidth=1e10,
    asynchronous=False,
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's steps run in this process, and the device's rates are made up."""

    def run_probe(request: ProbeRequest, **_: object) -> MeasurementRecord:
        assert request.profile is not None
        training = build_training(request)
        phases = StepPhases(request.setting.accumulate)
        profile_steps(training, make_meter("cpu"), phases, request.profile)
        found = recommendation(request.model, request.setting).evidence
        assert found is not None
        return found.model_copy(update={"device": describe_device("cpu")})

    monkeypatch.setattr(profiling, "run_probe", run_probe)
    make_record = profiling.make_record
    monkeypatch.setattr(profiling, "make_record", lambda *given: make_record(*given[:3], RATES))


def test_a_profile_is_measured_predicted_and_kept(quick: None, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / TRACE_FILE).write_text("of an earlier profile")
    found = profiling.profile(MODEL, SETTING, output, device="cpu", steps=2)
    assert sorted(file.name for file in output.iterdir()) == ["profile.json", TRACE_FILE]
    assert ProfileRecord.model_validate_json((output / "profile.json").read_text()) == found
    measured = sum(row.measured_seconds for row in found.kinds)
    assert measured == pytest.approx(found.profiled_step_seconds)
    predicted = sum(row.predicted_seconds or 0.0 for row in found.kinds)
    assert predicted == pytest.approx(found.predicted_step_seconds)
    seen = {row.kind for row in found.kinds if row.measured_seconds}
    assert {"matmul", "pointwise", "reduction", "copy", "conv"} <= seen
    assert "measured /" in profile_text(found)
    data = json.loads(gzip.decompress((output / TRACE_FILE).read_bytes()))
    names = [e["name"] for e in data["traceEvents"] if str(e.get("name")).startswith("planner: ")]
    step = ["planner: forward", "planner: backward", "planner: optimizer", "planner: zero_grad"]
    assert names == step * 2


def test_a_folder_that_cannot_be_written_is_named(quick: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match=r"file/out cannot be written: Not a directory"):
        profiling.profile(MODEL, SETTING, tmp_path / "file" / "out", device="cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"), ("aten::linear", "host"), ("aten::view", "host"),
        ("aten::empty", "host"), ("aten::copy_", "copy"), ("aten::add_", "pointwise"),
        ("aten::native_layer_norm", "reduction"), ("aten::cudnn_batch_norm", "reduction"),
        ("aten::mkldnn_convolution", "conv"), ("Memcpy HtoD", "copy"),
        ("aten::_scaled_dot_product_flash_attention", "attention"), ("MmBackward0", "host"),
        ("triton_poi_fused_add_0", "fused"), ("Optimizer.step#AdamW.step", "host"),
    ],
)  # fmt: skip
def test_each_operation_has_a_kind(name: str, kind: str) -> None:
    assert profiled_kind(name) == kind


def test_on_a_gpu_an_operation_has_the_seconds_of_its_kernels() -> None:
    def event(key: str, on: Any, device: float, cpu: float) -> SimpleNamespace:
        return SimpleNamespace(
            key=key, device_type=on, self_device_time_total=device, self_cpu_time_total=cpu, count=2
        )

    found = operations([
        event("aten::mm", DeviceType.CPU, 40.0, 9.0),
        event("sm90_xmma_gemm", DeviceType.CUDA, 40.0, 0.0),  # the same seconds, by kernel
        event("aten::view", DeviceType.CPU, 0.0, 5.0),
    ], is_cuda=True)  # fmt: skip
    assert found == [("aten::mm", "matmul", pytest.approx(40e-6), 2)]
