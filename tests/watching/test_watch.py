"""The hook in a plain loop: what it counts, and that nothing of its own ends a training. And its
figures against a plan's: which differences are told."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner.core.errors import PlannerError
from planner.core.files import to_json
from planner.core.units import GIB
from planner.watching import watch
from planner.watching.analysis import judge
from planner.watching.expectation import Expectation, read_expectation
from planner.watching.watch import Watch
from tests.trainers.cases import recommendation
from tests.watching.loops import BATCH, IMAGES, Loop, end, events, lines, loader, of_kind


def run_loop(hook: Watch, epochs: int = 1) -> None:
    loop = Loop()
    with hook as watched:
        for _ in range(epochs):
            for images, targets in watched.batches(loader()):
                watched.step(loss=loop.step(images, targets))


def test_a_plain_loop_leaves_a_log_of_lines_and_a_summary(tmp_path: Path) -> None:
    run_loop(planner.watch(folder=tmp_path, interval_seconds=0), epochs=2)
    kinds = [line["kind"] for line in lines(tmp_path)]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert end(tmp_path)["status"] == "finished"
    intervals = of_kind(tmp_path, "interval")
    assert sum(line["images"] for line in intervals) == 2 * IMAGES
    assert sum(line["steps"] for line in intervals) == end(tmp_path)["step"] == 2 * IMAGES // BATCH
    assert all(0 <= line["wait_share"] <= 1 for line in intervals)
    assert intervals[0]["warm_up"]
    assert end(tmp_path)["steady"]["steps"] == end(tmp_path)["step"] - watch.WARM_UP_STEPS


def test_a_loop_that_waits_for_data_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in its second interval."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slow() -> Iterator[torch.Tensor]:
        for _ in range(12):
            now[0] += 3.0
            yield torch.zeros(BATCH, 3)

    with planner.watch(folder=tmp_path, interval_seconds=30) as watched:
        for _ in watched.batches(slow()):
            now[0] += 1.0
            watched.step()
    assert events(tmp_path) == ["waiting for data"]
    assert end(tmp_path)["steady"]["wait_share"] == 0.75


def test_the_error_of_a_loop_goes_through_with_its_own_traceback(tmp_path: Path) -> None:
    def broken() -> None:
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs") as caught, planner.watch(folder=tmp_path):
        broken()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "broken"
    assert "close" not in frames
    assert end(tmp_path)["status"] == "KeyError"

    def faulty() -> Iterator[int]:
        yield 1
        raise OSError("a picture is broken")

    with planner.watch(folder=tmp_path) as watched:
        batches = iter(watched.batches(faulty()))
        assert next(batches) == 1
        with pytest.raises(OSError, match="a picture is broken"):
            next(batches)


# ------------------------------------------------------------------ faults


def test_a_broken_plan_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recommendation.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        run_loop(planner.watch(tmp_path, interval_seconds=0))
    assert [record.message for record in caplog.records if "plan" in record.message]
    assert len(caplog.records) == 1
    assert "not whole JSON" in end(tmp_path)["faults"][0]
    run_loop(planner.watch(3.5, tmp_path))
    run_loop(planner.watch("no\0path"))


@pytest.mark.parametrize("fails", ["the folder", "each step"])
def test_what_fails_each_time_is_one_warning_and_ends_nothing(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    if fails == "each step":
        monkeypatch.setattr(Watch, "_memory", lambda *_: Path("/no such file").stat())
    folder = tmp_path / ("file/below" if fails == "the folder" else "run")
    run_loop(planner.watch(folder=folder, interval_seconds=0), epochs=4)
    assert len(caplog.records) == 1


def test_a_log_is_bounded_and_the_end_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_LOG_BYTES", 8000)
    hook = planner.watch(folder=tmp_path, interval_seconds=0)
    hook.open()
    for number in range(60):
        hook._event(f"kind {number % 3}", "of something that befell it " * 5)
    run_loop(hook, epochs=4)
    assert (tmp_path / "watch.jsonl").stat().st_size <= 8000
    assert 0 < len(of_kind(tmp_path, "event")) < 60
    assert end(tmp_path)["step"] == 4 * IMAGES // BATCH


def test_copies_are_inert_and_one_process_writes(tmp_path: Path) -> None:
    hook = planner.watch(folder=tmp_path)
    with hook:
        hook.step(4)
        for copied in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
            copied.step(4)
            assert list(copied.batches([1])) == [1]
            with copied.pause():
                copied.close()
        child = os.fork()
        if child == 0:
            hook.step(4)
            hook.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert [line["kind"] for line in lines(tmp_path)] == ["start", "end"]
    assert end(tmp_path)["step"] == 1


def test_a_process_that_dies_of_an_error_writes_its_end(tmp_path: Path) -> None:
    """Trainers that know no errors leave it to the end of the process."""
    code = (
        "import sys, planner\nhook = planner.watch(folder=sys.argv[1])\nhook.step(1)\n"
        "raise MemoryError('no room')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    assert end(tmp_path)["status"] == "MemoryError"
    assert events(tmp_path) == ["out of memory"]


def test_a_torn_line_of_another_run_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    path.write_text('{"kind":"sta')
    run_loop(planner.watch(folder=tmp_path))
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"kind":"sta'
    assert json.loads(whole[0])["kind"] == "start"


PLAN = Expectation(
    source="run/recommendation.json",
    basis="measured",
    device="RTX",
    images_per_step=64,
    images_per_second=1000.0,
    peak_allocated_bytes=8 * GIB,
    peak_reserved_bytes=9 * GIB,
)
AS_PLANNED = {
    "steps": 10,
    "images": 640,
    "images_per_second": 990.0,
    "peak_allocated_bytes": 8 * GIB,
    "peak_reserved_bytes": 9 * GIB,
    "wait_share": 0.02,
    "alloc_retries": 2,
    "ooms": 0,
    "loss": 6.9,
}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, None),
        ({"peak_allocated_bytes": int(8.5 * GIB)}, "more allocated than planned"),
        ({"peak_reserved_bytes": 10 * GIB}, "more reserved than planned"),
        ({"images_per_second": 850.0}, "slower than planned"),
        ({"images_per_second": 10.0, "wait_share": 0.9, "warm_up": True}, None),
        ({"wait_share": 0.3}, "waiting for data"),
        ({"alloc_retries": 4}, "allocator retries"),
        ({"alloc_retries": 2}, None),  # they were told of before
        ({"scale": 32768.0}, "skipped steps"),
        ({"scale": 131072.0}, None),
        ({"ooms": 1}, "out of memory caught"),
        ({"loss": float("nan")}, "non-finite loss"),
        ({"clocks": {"slowed_by": ["hw_thermal_slowdown"], "temperature_c": 91}}, "throttled"),
        ({"images": 320}, "other batch"),
    ],
)
def test_each_difference_has_its_event(changed: dict[str, Any], name: str | None) -> None:
    before = {"alloc_retries": 2, "scale": 65536.0}
    found = judge({**AS_PLANNED, **changed}, before, PLAN, "RTX")
    assert [event.name for event in found] == [name] * (name is not None)
    assert all(event.message.endswith(".") for event in found)


def test_rates_of_another_device_are_not_compared() -> None:
    line = {**AS_PLANNED, "images_per_second": 10.0}
    (event,) = judge(line, {"alloc_retries": 2}, PLAN, "T4")
    assert event.name == "other device"


def test_plans_are_read_from_all_that_planner_writes(tmp_path: Path) -> None:
    assert read_expectation(None) is None
    found = recommendation()
    (tmp_path / "recommendation.json").write_text(found.model_dump_json())
    said = read_expectation(tmp_path)
    assert said is not None
    assert said.basis == "measured"
    assert said.images_per_second == found.evidence.images_per_second  # type: ignore[union-attr]
    estimate = planner.estimate("native:swin_tiny", batch_size=8, accumulate=2, gpu="rtx 3090")
    (tmp_path / "estimate.json").write_text(json.dumps([to_json(estimate)]))
    for plan in (estimate, tmp_path / "estimate.json", str(tmp_path / "estimate.json")):
        said = read_expectation(plan)
        assert said is not None
        assert said.basis == "estimated"
        assert said.images_per_step == 16
        assert said.peak_allocated_bytes == estimate.peak_allocated_bytes
    for broken in (7, tmp_path / "none", {"a": 1}):
        with pytest.raises(PlannerError):
            read_expectation(broken)
