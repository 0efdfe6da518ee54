"""`profile` end to end: a real probe in its own process, and what is left where it fails."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from planner.advice.levers import LEVERS
from planner.core.errors import PlannerError
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.profile import ProfiledPart, ProfileRecord
from planner.core.schema.record import ProbeStatus
from planner.report.profile import profile_text, sums
from planner.throughput.prediction import DeviceRates
from planner.throughput.timeline import WAITING
from search.probe.evidence import OTHERS_RAN
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from search.probe.protocol import SNAPSHOT_FILE, TRACE_FILE
from search.tuning.profiling import profiling
from search.tuning.profiling.attribution import Attribution, Key
from search.tuning.profiling.comparing import (
    FUSED_KINDS,
    gap_notes,
    parts_of,
    predict,
    treatment_of,
)
from search.tuning.profiling.trace import read_trace
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.search.profiling.test_kinds import profile_cpu_step
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
    """No measuring of the machine, and one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(profiling, "device_rates", lambda *_: RATES)


def profile(output: Path, setting: TrainSetting = SETTING) -> ProfileRecord:
    return profiling.profile(
        MODEL, setting, output, device="cpu", steps=2, deadline_seconds=AMPLE_SECONDS,
        measure_seconds=0.5,
    )  # fmt: skip


def test_a_profile_is_measured_predicted_and_kept(quick: None, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / TRACE_FILE).write_text("of an earlier profile")
    found = profile(output)
    assert sorted(file.name for file in output.iterdir()) == ["profile.json", TRACE_FILE]
    assert ProfileRecord.model_validate_json((output / "profile.json").read_text()) == found
    assert found.probe.status == "measured"
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
    assert "No memory.pickle" in text
    assert max(map(len, text.splitlines())) <= 116
    assert_opens_elsewhere(output / TRACE_FILE)
    assert_no_kernel_is_no_host_time(found, output)


def assert_opens_elsewhere(file: Path) -> None:
    """Phases are spans of the main thread, and the file is the format that Perfetto opens."""
    data = json.loads(gzip.decompress(file.read_bytes()))
    names = [e["name"] for e in data["traceEvents"] if str(e.get("name")).startswith("planner: ")]
    step = ["planner: forward", "planner: backward", "planner: optimizer", "planner: zero_grad"]
    assert names == [*step, *step, "planner: wait"]


def assert_no_kernel_is_no_host_time(on_cpu: ProfileRecord, folder: Path) -> None:
    """Where a GPU's trace has no kernel, the host's time is not passed off as its own."""
    probe = on_cpu.probe
    gpu = probe.model_copy(update={"device": probe.device.model_copy(update={"kind": "cuda"})})
    found = profiling._record(gpu, folder, RATES, None)
    assert not found.parts
    assert not found.top
    said = profile_text(found)
    assert "The trace holds no kernel" in said
    assert "part most" not in said
    assert "its own time" not in said


def test_a_step_that_fails_leaves_one_line_and_no_folder(
    quick: None, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "run_probe", partial(run_probe, fork_server=fork_server))
    failing = request_of("raises")
    with pytest.raises(PlannerError, match="ValueError: the checkpoint is not there") as error:
        profiling.profile(
            failing.model, failing.setting, tmp_path / "out", device="cpu",
            deadline_seconds=AMPLE_SECONDS,
        )  # fmt: skip
    assert "\n" not in error.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(quick: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match=r"file/out cannot be written: Not a directory"):
        profile(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("status", "message", "said", "way_out"),
    [
        ("timed_out", "not done after 1 s, in import", ": not done after 1 s, in import.", "30m"),
        ("out_of_memory", "tried 2 GiB", "out of memory in import. tried 2 GiB.", "smaller batch"),
        ("crashed", "", ": crashed in import.", ""),
        ("unsupported", "it has no loss\nof its own", ": it has no loss.", ""),
    ],
)
def test_why_there_is_no_profile(
    status: ProbeStatus, message: str, said: str, way_out: str
) -> None:
    evidence = recommendation(MODEL).evidence
    probe = evidence.model_copy(update={"status": status, "message": message, "phase": "import"})
    with pytest.raises(PlannerError) as error:
        profiling._refuse_failed(probe, MODEL)
    assert error.value.message.endswith(said)
    assert way_out in error.value.way_out


def test_a_full_disk_is_said_by_the_worker(tmp_path: Path) -> None:
    (tmp_path / TRACE_FILE).symlink_to("/dev/full")
    with pytest.raises(PlannerError, match=r"trace.json.gz cannot be written: No space left"):
        profile_cpu_step(tmp_path, MODEL, SETTING)


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


def test_a_compiler_s_kernels_are_one_row() -> None:
    seconds = {
        Key("forward", "fused", False): 2.0, Key("forward", "copy", False): 1.0,
        Key("backward", "matmul", False): 4.0, Key("backward", WAITING, False): 1.0,
    }  # fmt: skip
    compiled = SETTING.model_copy(update={"compile": "default", "checkpointing": "none"})
    parts = parts_of(attribution(seconds), predict(MODEL, compiled, RATES), compiled)
    by_kind = sums(parts, lambda part: part.kind)
    assert by_kind[FUSED_KINDS][0] == 1.5, "of a step, where two were profiled"
    assert not by_kind.keys() & {"fused", "copy", "reduction", "pointwise"}
    plain = parts_of(attribution(seconds), None, SETTING)
    assert {part.kind: part.measured_seconds for part in plain}["fused"] == 1.0
    assert all(part.predicted_seconds is None for part in plain)


def test_a_convolution_in_groups_is_one_to_the_profiler() -> None:
    seconds = {Key("forward", "conv", False): 2.0}
    one = predict(MODEL, SETTING, RATES)
    grouped = one.parts[0]._replace(phase="forward", kind="grouped conv", seconds=0.5)
    (part,) = parts_of(attribution(seconds), replace(one, parts=(grouped,)), SETTING)
    assert (part.kind, part.measured_seconds, part.predicted_seconds) == ("conv", 1.0, 0.5)


def test_the_widest_gap_is_named_with_what_treats_it() -> None:
    parts = (
        ProfiledPart(phase="forward", kind="copy", measured_seconds=0.09, predicted_seconds=0.01),
        ProfiledPart(phase="forward", kind="matmul", measured_seconds=0.2, predicted_seconds=0.19),
    )
    notes = gap_notes(parts, MODEL, SETTING, RATES, None)
    assert notes[0] == (
        "Measured and predicted part most in copy: 90 ms against 10 ms, 80 ms more than expected."
    )
    assert notes[1].startswith("What treats pointwise, reduction, copy: compile default")


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


def test_a_treatment_is_a_lever_that_keeps_the_recipe() -> None:
    said = treatment_of("pointwise", MODEL, SETTING, RATES, None)
    assert any(f"({lever.says})" in said for lever in LEVERS if lever.effect != "recipe")
    other = request_of("tiny").model
    assert treatment_of("pointwise", other, SETTING, RATES, None) == "", "none is traced for it"


def test_on_a_gpu_the_allocator_s_history_of_a_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that only CUDA has, with its history in a stand-in: no GPU is here."""
    pytest.importorskip("torch")
    from search.probe.worker import profiling as worker

    def history(device: object, call: Callable[[], object], stacks: str) -> dict[str, object]:
        call()
        return {"segments": [], "stacks": stacks}

    monkeypatch.setattr(worker, "record_history", history)
    profile_cpu_step(tmp_path, MODEL, SETTING, device_type="cuda")
    kept = pickle.loads((tmp_path / SNAPSHOT_FILE).read_bytes())
    assert kept == {"segments": [], "stacks": "python"}
    assert not read_trace(tmp_path / TRACE_FILE).kernels
