"""What is seen beside measurements: each sight in a process of its own, on the CPU for a GPU.

What a driver, a caching allocator or a GPU's kernels answer can only be seen on a device; here it
is shown that everything runs, is told as it is seen, and is written down.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.cli import main
from planner.errors import UnsupportedError, UsageError
from planner.libraries.registry import find_library
from planner.memory.snapshot import load_snapshot, replay_snapshot
from planner.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.schema.observation import Observation, ObservationRecord
from planner.step.attention import backward_scratch
from planner.units import MIB
from search.probe.device import describe_device, worker_environment
from search.probe.nvml import NvmlDevice, NvmlMemory
from search.probe.observation import history, steps, view
from search.probe.observation.attention import first_stage
from search.probe.observation.driver import driver_answers
from search.probe.observation.order import Hearer, Order, Teller
from search.probe.observation.steps import whole_text
from search.probe.observation.subject import Subject
from search.probe.observation.view import requests_in
from search.probe.observation.worker import SIGHTS
from search.study.records import append_records, parse_records, read_records
from search.validation.matrix import Matrix
from search.validation.observe import observe, remaining_observations
from search.validation.reading import read_matrix
from search.validation.rehearsal import TINY, rehearse
from search.validation.survey import Seen, carry_out, snapshot_folder, unexplained
from tests.memory.histories import recorded_history
from tests.search.processes import carrying, remaining
from tests.search.validation.measurements import exact_record

TRUTH = Path(__file__).parents[2] / "truth"
FIRST = TRUTH / "first.yaml"
AMPLE_SECONDS = 300.0
SMALL = {"image_size": "28", "embed_dim": "16", "depths": "1", "num_heads": "1"}


def small(see: str, **fields: Any) -> Observation:
    """An observation of a Swin of one block."""
    setting = {"batch_size": 2, "precision": "fp32", **fields.pop("setting", {})}
    return Observation.model_validate(
        {
            "name": see, "see": see, "what": "A sight", "model": "native:swin_tiny",
            "overrides": SMALL, "setting": setting, **fields,
        }
    )  # fmt: skip


def look(observation: Observation, tmp_path: Path, seconds: float = AMPLE_SECONDS) -> Any:
    return observe(observation, "cpu", seconds, tmp_path)


def test_first_yaml_sees_what_no_cpu_can_show_in_order() -> None:
    matrix = read_matrix(FIRST)
    assert [o.see for o in matrix.observations] == [
        "driver", "memory-return", "one-step", "attention-memory", "one-step", "near-limit",
        "near-limit", "near-limit", "timing", "compile-cache", "context", "attention-kernels",
        "attention-rate",
    ]  # fmt: skip
    assert {o.see for o in matrix.observations} | {"snapshot"} == set(SIGHTS)
    assert matrix.budget_seconds == 600
    by_name = {o.name: o for o in matrix.observations}
    assert by_name["settling"].seconds == (0.5, 3, 10, 30)
    assert by_name["autotune-cache"].shortened().setting["compile"] == "default"
    assert {(r.model.title, r.setting.precision) for r in matrix.rows} == {
        (model, precision)
        for model in ("native:swin_tiny", "timm:swin_base_patch4_window7_224")
        for precision in ("bf16", "fp32")
    }


def test_the_list_is_printed_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    arguments = ["validate", "--matrix", str(FIRST), "--list", "--device", "cpu"]
    assert main([*arguments, "--record", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("   What the driver answers about our own process")
    assert lines[-2:] == [
        f"13 things to see, 0 of them in {file}.",
        f"8 rows, 0 of them in {file}.",
    ]
    assert not file.exists()


def test_an_unknown_sight_or_a_name_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    entry = "{name: a, see: driver, what: w}"
    file.write_text(f"observations: [{entry}, {entry}]\n")
    with pytest.raises(UsageError, match="two observations are called 'a'"):
        read_matrix(file)
    file.write_text("observations: [{name: a, see: nothing, what: w}]\n")
    with pytest.raises(UsageError, match="see"):
        read_matrix(file)


def seen_record(**fields: Any) -> ObservationRecord:
    return ObservationRecord.model_validate(
        {
            "observation": "context", "see": "context", "what": "A sight",
            "device": DeviceInfo(kind="cuda", name="a GPU", total_bytes=1), "versions": {},
            "date": "2026-11-21T00:00:00+00:00", "status": "seen", **fields,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "is_done"),
    [
        ([{"status": "seen"}], True),
        ([{"status": "not_here"}], True),
        ([{"status": "failed"}], False),
        ([{"status": "crashed"}, {"status": "timed_out"}], True),
        ([{"status": "timed_out", "cut_short": True}] * 3, False),
        ([{"status": "seen", "rehearsal": True}], False),
        ([{"status": "seen", "device": DeviceInfo(kind="cpu", name="b", total_bytes=1)}], False),
        ([{"status": "seen", "observation": "another"}], False),
    ],
)
def test_a_run_goes_on_with_what_was_not_seen(found: list[dict[str, Any]], is_done: bool) -> None:
    records = [seen_record(**fields) for fields in found]
    assert (remaining_observations([small("context")], records, "a GPU") == []) is is_done


def test_observations_and_measurements_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    figures = {"a_bytes": 3, "list": [1, None], "inner": {"x": None, "y": 0.5}, "b": False}
    observation = seen_record(figures=figures, message="zwei\nlines")
    measurement = exact_record(2)
    append_records(file, [measurement, observation, measurement])
    found = read_records(file)
    assert found.records == (measurement, measurement)
    assert found.observations == (observation,)
    assert not found.fault


def test_files_without_observations_read_as_before_and_torn_ones_are_mended(tmp_path: Path) -> None:
    kept = TRUTH / "cpu_grid_2026-11-20.jsonl"
    assert len(read_records(kept).records) == len(kept.read_bytes().splitlines())
    file = tmp_path / "r.jsonl"
    append_records(file, [seen_record()])
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])
    assert "torn" in read_records(file).fault
    append_records(file, [exact_record(2)])
    assert len(read_records(file).observations) == 1
    newer = whole.replace(b'"format":1', b'"format":99')
    assert "newer" in parse_records(newer, "f").fault


def test_figures_that_were_told_survive_a_worker_that_is_ended() -> None:
    hearer = Hearer()
    hearer.hear(b'{"figures": {"a_bytes": 1}}\n{"not_here": {"b": "no"}}\nnoise\n[1]\n{"figu')
    hearer.hear(b'res": {"c": 2}}\n{"status": "se')
    assert hearer.figures == {"a_bytes": 1, "c": 2}
    assert hearer.not_here == {"b": "no"}
    assert hearer.status == ""


def test_a_sight_is_seen_in_a_process_and_an_environment_of_its_own(tmp_path: Path) -> None:
    options = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    bf16 = {"precision": "bf16"}
    record = look(small("attention-memory", setting=bf16, environment=options), tmp_path)
    assert record.status == "seen", record.message
    assert record.versions["allocator_config"] == "expandable_segments:True"
    # 2 images of one 7 × 7 window, one head of 16, bf16
    assert record.figures["query_bytes"] == 2 * 49 * 16 * 2
    assert record.figures["expected_workspace_bytes"] == 2 * 16_400
    assert len(record.figures["backward_requests_bytes"]) >= 4
    assert "CPU" in record.not_here["workspace_is_as_expected"]
    assert record.device == describe_device("cpu")


def test_expected_workspace_is_that_of_the_first_stage() -> None:
    """64 images of 64 windows, 3 heads, 49 tokens of 32: what docs/devices.md says."""
    wanted = next(o for o in read_matrix(FIRST).observations if o.see == "attention-memory")
    attend = first_stage(Order(observation=wanted, device="cpu"))
    assert attend.q.shape == (4096, 3, 49, 32)
    assert backward_scratch(tuple(attend.q.shape), is_half=True).workspace == 201_523_200


def test_failures_deadlines_and_crashes_are_records_and_leave_nothing(
    tmp_path: Path, token: str
) -> None:
    before = carrying(token)  # other tests' fork server
    failed = look(small("one-step", setting={"optimizer": "lion-fused"}), tmp_path)
    assert failed.status == "failed"
    assert "fused" in failed.message
    late = look(small("timing", seconds=[1000]), tmp_path, seconds=0.2)
    assert (late.status, late.message) == ("timed_out", "not done after 0.2 s")
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    broken = os.pathsep.join([str(tmp_path), worker_environment()["PYTHONPATH"]])
    crashed = look(small("context", environment={"PYTHONPATH": broken}), tmp_path)
    assert crashed.status == "crashed"
    assert "this torch is broken" in crashed.message
    assert remaining(token, before) == set()


@pytest.mark.parametrize("name", ["sdpa-65536-windows", "graphs-and-accumulation"])
def test_what_the_planner_refuses_can_be_seen(name: str) -> None:
    """Fields go in unchecked and unresolved, but for the attention that the library would run."""
    wanted = next(o for o in read_matrix(FIRST).observations if o.name == name)
    subject = Subject(wanted, "cpu")
    with pytest.raises(UnsupportedError):
        find_library("native").resolve(subject.model, subject.setting)
    assert subject.setting.attention == "sdpa"
    small_model = subject.model.model_copy(update=TINY)
    few_images = subject.setting.model_copy(update={"batch_size": 1})
    subject.model, subject.setting = small_model, few_images
    assert sum(p.numel() for p in subject.training().parameters) > 0


def test_error_texts_are_kept_whole_up_to_a_sensible_length() -> None:
    assert whole_text(RuntimeError("short")) == "builtins.RuntimeError: short"
    text = whole_text(RuntimeError("begin" + "x" * 50_000 + "end"))
    assert len(text) < 7000
    assert text.startswith("builtins.RuntimeError: begin")
    assert text.endswith("end")


def test_the_driver_is_quoted_as_it_answers(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(driver))
    gpu = NvmlDevice(ctypes.c_void_p(1), library)
    found = driver_answers(gpu, own_pid=1)
    assert found["own_pid_answer"] == "ours"
    assert found["total_by_driver_bytes"] > 0
    assert found["mig"] in ("on", "off", "no answer")
    assert found["processes"][0]["pid"] == 1
    stranger = driver_answers(gpu, own_pid=999_999)
    assert stranger["own_pid_answer"] == "another's"
    assert "own_used" not in stranger
    assert driver_answers(NvmlDevice(ctypes.c_void_p(2), library), 1)["own_pid_answer"] == "none"


def test_a_history_is_stripped_kept_small_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = recorded_history([1000, 5 * 2**20, 12 * 2**20, ~1, 3 * 2**20, ~2])
    snapshot["device_traces"][0][0]["frames"] = [{"filename": "/home/somebody/train.py"}]
    snapshot["segments"].append({**snapshot["segments"][0], "device": 1})
    assert requests_in(snapshot["device_traces"][0]) == [1000, 5 * 2**20, 12 * 2**20, 3 * 2**20]
    kept = history.stripped(snapshot, 0)
    path = tmp_path / "inner" / "step.pickle.gz"
    assert history.keep_snapshot(kept, path) == path.stat().st_size
    assert b"somebody" not in path.read_bytes()
    loaded = load_snapshot(path)
    assert loaded == kept
    assert replay_snapshot(loaded).difference == ""
    assert history.replayed(kept)["replay"] == "equal"
    monkeypatch.setattr(history, "MAX_FILE_BYTES", 10)
    with pytest.raises(Exception, match="over 10"):
        history.keep_snapshot(kept, path)


def test_rows_that_were_predicted_badly_want_their_history(tmp_path: Path) -> None:
    good, bad, worse = exact_record(2), exact_record(8), exact_record(32)

    def off(record: MeasurementRecord, share: float) -> MeasurementRecord:
        assert record.peak_reserved_bytes
        reserved = int(record.peak_reserved_bytes * share)
        return record.model_copy(update={"peak_reserved_bytes": reserved})

    compiled = off(bad, 2).model_copy(update={"setting": TrainSetting(compile="default")})
    found = list(unexplained([good, off(bad, 1.05), off(worse, 1.2), compiled], tmp_path / "s"))
    assert [o.setting["batch_size"] for o in found] == [32, 8]
    assert "16.7% off" in found[0].what
    # the model has no published name, so the process that looks reads it from a file
    assert SwinConfig.model_validate_json(Path(found[0].model).read_text()) == bad.model
    assert len({o.name for o in found}) == 2


@pytest.mark.workers
def test_a_survey_passes_over_what_there_is_no_time_for_and_goes_on_after_failures(
    tmp_path: Path,
) -> None:
    file = tmp_path / "r.jsonl"
    seen: list[Seen] = []

    def names() -> list[str]:
        return [s.record.observation for s in seen]

    short = {"deadline": 0.1, "what": "A shorter sight"}
    timing = small("timing", seconds=[1000], deadline=200, when_short=short)
    matrix = Matrix((), (small("context", deadline=100), timing))
    carry_out(matrix, "cpu", file, on_seen=seen.append, budget_seconds=29)
    # 29 s are too few for the first; the second's short form is over after 0.1 s
    assert names() == ["timing"]
    assert seen[0].record.status == "timed_out"
    assert seen[0].record.what == "A shorter sight"
    assert not seen[0].record.cut_short
    seen.clear()
    failing = small("one-step", setting={"optimizer": "lion-fused"})
    matrix = Matrix((), (failing, small("driver", model="")))
    carry_out(matrix, "cpu", file, on_seen=seen.append)
    assert [(s.record.observation, s.record.status) for s in seen] == [
        ("one-step", "failed"), ("driver", "not_here"),
    ]  # fmt: skip
    assert [o.observation for o in read_records(file).observations] == ["timing", *names()]


class FakeCuda:
    """As much of `torch.cuda` as a view asks for; `free` are the answers to come, in bytes."""

    memory = NvmlMemory(total=100 * MIB, used=50 * MIB, free=50 * MIB)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
        self.free = free
        self.recording: list[str | None] = []
        trace = [{"action": "alloc", "size": 512}, {"action": "free_completed", "size": 512}]
        answers = {
            "mem_get_info": lambda device: (self.free.pop(0), 100 * MIB),
            "memory_allocated": lambda device: 3,
            "memory_reserved": lambda device: 20 * MIB,
            "max_memory_allocated": lambda device: 5,
            "max_memory_reserved": lambda device: 6,
            "synchronize": lambda device: None,
        }
        for name, answer in answers.items():
            assert callable(getattr(torch.cuda, name))
            monkeypatch.setattr(torch.cuda, name, answer)
        record = inspect.signature(torch.cuda.memory._record_memory_history)

        def remember(**given: Any) -> None:
            self.recording.append(record.bind(**given).arguments.get("enabled", "all"))

        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", remember)
        monkeypatch.setattr(
            torch.cuda.memory, "_snapshot", lambda device: {"device_traces": [[], trace]}
        )
        monkeypatch.setattr(view, "nvml_device", lambda device: self)
        monkeypatch.setattr(view, "_SETTLING_SECONDS", 0.0)


def test_a_ballast_waits_for_memory_that_is_still_being_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCuda(monkeypatch, free=[30 * MIB, 40 * MIB, 60 * MIB, 60 * MIB, 99 * MIB])
    made: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, **options: made.append(size))
    seen = view.CudaView("cuda:1")
    seen.leave_room(9 * MIB)
    assert made == [50 * MIB]  # 51 MiB in whole pages of 2 MiB
    FakeCuda(monkeypatch, free=[8 * MIB, 8 * MIB])
    with pytest.raises(view.NotHereError, match="only"):
        seen.leave_room(9 * MIB)


def test_what_lies_outside_the_allocator_is_the_driver_s_growth_less_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda(monkeypatch, free=[70 * MIB])
    seen = view.CudaView("cuda:1")
    fake.memory = NvmlMemory(total=100 * MIB, used=80 * MIB, free=20 * MIB)
    found = seen.memory()
    assert found["outside_reserved_bytes"] == 10 * MIB
    assert found["used_by_runtime_bytes"] == 30 * MIB
    assert (found["allocated_bytes"], found["peak_reserved_bytes"]) == (3, 6)


def test_a_history_is_recorded_for_the_call_only_even_where_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda(monkeypatch, free=[])
    seen = view.CudaView("cuda:1")
    assert seen.requests(lambda: None) == [512]
    with pytest.raises(ZeroDivisionError):
        seen.requests(lambda: 1 // 0)
    assert fake.recording == ["all", None, "all", None]


def test_a_context_that_answers_no_more_does_not_hide_the_error() -> None:
    class Broken(view.CpuView):
        def held_peak(self) -> int:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    reader, writer = os.pipe()
    steps._see_memory(Broken(), Teller(writer))
    os.close(writer)
    with open(reader, "rb") as channel:  # noqa: PTH123
        hearer = Hearer()
        hearer.hear(channel.read())
    assert "illegal memory access" in hearer.not_here["held_peak_bytes"]


@pytest.mark.workers
def test_the_whole_of_first_yaml_runs_on_a_stand_in(
    tmp_path: Path, token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiny models and short times on the CPU: every sight is told, nothing is left behind, and the
    same command then has nothing to do but what a rehearsal never settles."""
    before = carrying(token)  # other tests' fork server
    file = tmp_path / "first.jsonl"
    arguments = ["validate", "--matrix", str(FIRST), "--rehearse", "--device", "cpu"]
    assert main([*arguments, "--record", str(file)]) == 0
    found = read_records(file)
    assert not found.fault
    by_name = {o.observation: o for o in found.observations}
    wanted = read_matrix(FIRST).observations
    assert list(by_name) == [o.name for o in wanted]
    assert {name: o.message for name, o in by_name.items() if o.status not in
            ("seen", "not_here")} == {}  # fmt: skip
    assert {name for name, o in by_name.items() if o.status == "not_here"} == {"driver", "context"}
    for name in ("limit-eager", "limit-compiled", "limit-expandable"):
        # a compiled step may find spec where an eager one does not
        figures = by_name[name].figures
        assert figures["failed"] == bool(by_name[name].message)
        assert figures["failed"] or name == "limit-compiled", by_name[name]
        assert figures.get("classified_as", "out_of_memory") == "out_of_memory", by_name[name]
    rates = by_name["attention-rate"].figures
    assert rates["learned_bias"] != rates["frozen_bias"]
    assert by_name["settling"].figures["after_0.6_s"]["num_steps"] >= 2  # type: ignore[index,call-overload]
    assert [r.status for r in found.records] == ["measured"] * len(rehearse(
        read_matrix(FIRST)).rows)  # fmt: skip
    assert remaining(token, before) == set()
    printed = capsys.readouterr().out
    assert all(o.what in printed for o in wanted)
    assert not snapshot_folder(file).exists()
