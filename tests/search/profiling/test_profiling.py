"""`profile` end to end: a real probe in its own process, and what is left where it fails."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.core.schema import MeasurementRecord, SwinConfig, TrainSetting
from planner.core.schema.profile import ProfileRecord
from planner.report.profile import profile_text, sums
from planner.throughput.prediction import DeviceRates
from search.probe.device import describe_device
from search.probe.evidence import OTHERS_RAN
from search.probe.protocol import TRACE_FILE, ProbeRequest
from search.tuning.profiling import profiling
from search.tuning.profiling.attribution import Attribution, Key
from search.tuning.profiling.comparing import (
    predict,
)
from search.tuning.profiling.trace import read_trace
from tests.search.profiling.test_kinds import profile_cpu_steps
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
    """The worker's steps run in this process, and the machine's rates are made up."""

    def run_probe(request: ProbeRequest, **_: object) -> MeasurementRecord:
        order = request.profile
        assert order is not None
        profile_cpu_steps(Path(order.folder), request.model, request.setting, order.steps)
        found = recommendation(request.model, request.setting).evidence
        return found.model_copy(update={"device": describe_device("cpu")})

    monkeypatch.setattr(profiling, "run_probe", run_probe)
    monkeypatch.setattr(profiling, "device_rates", lambda *_: RATES)


def test_a_profile_is_measured_predicted_and_kept(quick: None, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / TRACE_FILE).write_text("of an earlier profile")
    found = profiling.profile(MODEL, SETTING, output, device="cpu", steps=2)
    assert sorted(file.name for file in output.iterdir()) == ["profile.json", TRACE_FILE]
    assert ProfileRecord.model_validate_json((output / "profile.json").read_text()) == found
    assert found.num_steps == 2
    assert found.overhead == pytest.approx(found.profiled_step_seconds / found.step_seconds)
    measured = sum(part.measured_seconds for part in found.parts)
    assert measured == pytest.approx(found.profiled_step_seconds)
    predicted = sum(part.predicted_seconds or 0.0 for part in found.parts)
    assert predicted == pytest.approx(found.predicted_step_seconds)
    assert {"forward", "backward", "optimizer"} <= set(sums(found.parts, lambda p: p.phase))
    assert found.unknown == ()
    text = profile_text(found)
    assert "Backward computes forward again for" in text
    assert max(map(len, text.splitlines())) <= 116
    assert_opens_elsewhere(output / TRACE_FILE)


def assert_opens_elsewhere(file: Path) -> None:
    """Phases are spans of the main thread, and the file is the format that Perfetto opens."""
    data = json.loads(gzip.decompress(file.read_bytes()))
    names = [e["name"] for e in data["traceEvents"] if str(e.get("name")).startswith("planner: ")]
    step = ["planner: forward", "planner: backward", "planner: optimizer", "planner: zero_grad"]
    assert names == [*step, *step, "planner: wait"]


def test_a_folder_that_cannot_be_written_is_named(quick: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match=r"file/out cannot be written: Not a directory"):
        profiling.profile(MODEL, SETTING, tmp_path / "file" / "out", device="cpu")


def test_a_piece_of_a_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text('{"traceEvents": [{"ph": "X", "na')
    with pytest.raises(PlannerError, match="no whole trace"):
        read_trace(file)
    (tmp_path / "trace.json.gz").write_bytes(b"\x1f\x8b\x08\x00half")
    with pytest.raises(PlannerError, match="no whole trace"):
        read_trace(tmp_path / "trace.json.gz")
    with pytest.raises(PlannerError, match="No such file"):
        read_trace(tmp_path / "gone.json")


def attribution(seconds: dict[Key, float]) -> Attribution:
    return Attribution(2, sum(seconds.values()), seconds, {}, (), on_device=True)


def test_no_advice_comes_from_a_disturbed_measurement() -> None:
    evidence = recommendation(MODEL).evidence
    step = predict(MODEL, SETTING, RATES)
    calm = evidence.model_copy(update={"step_seconds": (step.step_seconds,) * 6, "flags": ()})
    found = attribution({Key("forward", "matmul", False): 2 * step.step_seconds})
    assert profiling._doubts(calm, found, step) == []

    def doubts(factor: float = 1.0, **changes: object) -> str:
        slow = replace(found, wall_seconds=factor * found.wall_seconds)
        return " ".join(profiling._doubts(calm.model_copy(update=changes), slow, step))

    assert "1.8 of 2" in doubts(flags=(f"{OTHERS_RAN} 1.8 of 2 processors busy meanwhile",))
    spread = tuple(step.step_seconds * n for n in (0.5, 0.6, 0.9, 1.0, 1.1, 1.9, 2.0))
    assert "only. So no change is named" in doubts(step_seconds=spread)
    assert "does not cost so much" in doubts(factor=10)
    assert "took 300 × what is predicted" in doubts(
        factor=300, step_seconds=(300 * step.step_seconds,) * 6
    )
