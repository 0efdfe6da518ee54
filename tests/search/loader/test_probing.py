"""Probes of loaders over real pictures and Datasets of a user's, carried out in this process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from planner.core.schema.loading import LoaderRecord, LoaderSetting
from planner.training.loading.sources import find_source
from search.loader import measure, probing
from search.loader.probing import probe_loader
from search.loader.protocol import LoaderOutcome
from search.loader.verdict import classify_loader
from search.loader.watching import Watch
from search.probe.protocol import AnswerReader
from search.probe.worker.report import Report
from tests.loading.made import BROKEN, UNUSUAL, folder_of, listing

AMPLE_SECONDS = 300.0


class InThisProcess:
    """In place of what starts a worker and listens to it."""

    def __init__(self, orders: Any, outcome: Any, hear: Any, *_: Any, answers: Any, **__: Any):
        (self.order,), self.hear, self.answers = orders, hear, answers

    def run(self) -> LoaderOutcome:
        request = self.order.request
        reading, writing = os.pipe()
        report = Report(writing, request.probe_id)
        measure.answer(request, time.monotonic() + AMPLE_SECONDS, report)
        os.close(writing)
        with os.fdopen(reading, "rb") as channel:
            *told, outcome = AnswerReader(request.probe_id, self.answers).feed(channel.read())
        for message in told:
            self.hear(message)
        assert isinstance(outcome, LoaderOutcome)
        return outcome


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "Attendance", InThisProcess)


def probe(data: str, **how: Any) -> LoaderRecord:
    """A short probe: of a folder, or of a Dataset of `faulty_data` by its name."""
    own = "/" not in data
    source = find_source(f"tests.search.loader.faulty_data:{data}" if own else data)
    given = {name: how.pop(name) for name in list(how) if name in LoaderSetting.model_fields}
    setting = LoaderSetting.model_validate({
        "batch_size": 4, "workers": 0, "image_size": (8, 8), "pin_memory": False,
        "pipeline": "own" if own else "torchvision", **given,
    })  # fmt: skip
    timing = {"min_steps": 3, "median_precision": 10.0, "min_measure_seconds": 0.0, **how}
    return probe_loader(source, setting, deadline_seconds=AMPLE_SECONDS, device="cpu", **timing)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_is_measured(tmp_path: Path, workers: int) -> None:
    folder = folder_of(tmp_path / "data", 24)
    before = listing(folder)
    record = probe(str(folder), workers=workers)
    assert (record.status, record.faults) == ("measured", ()), record.message
    assert record.images_per_second == pytest.approx(4 / median(record.batch_seconds))
    assert record.cpu_seconds_per_image
    assert (record.worker_bytes is None) == (record.shared_memory_bytes is None) == (workers == 0)
    assert set(record.stage_seconds) == {"read", "decode", "transform", "collate"}
    assert record.bound in {"disk", "decode", "transform", "collate", "main process"}
    assert {"torch", "pillow"} <= set(record.versions)
    assert listing(folder) == before, "nothing is written into the data"


def test_unusual_pictures_load_and_broken_ones_are_counted(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data", 80)
    for name, make in UNUSUAL.items():
        (root / "cat" / name).write_bytes(make())
    for name, (make, _) in BROKEN.items():
        (root / "dog" / name).write_bytes(make())
    record = probe(str(root), min_steps=30, max_measure_seconds=60.0)
    assert record.status == "measured"
    said = {fault.item: fault.message for fault in record.faults}
    assert set(said) == {f"dog/{name}" for name in BROKEN}
    assert all(text in said[f"dog/{name}"] for name, (_, text) in BROKEN.items())


def test_each_kind_of_data_is_measured_or_says_why_not() -> None:
    odd = "item 9 is (a tensor [3, 7, 8] float32, int), others are (a tensor [3, 8, 8] float32, int"
    for data, status, said in (
        ("Stream", "measured", ""),
        ("loader", "measured", ""),
        ("Raising", "crashed", "KeyError: 'no caption for "),
        ("OddShape", "faulty", odd),
        ("Empty", "crashed", "without items"),
        ("no_dataset", "crashed", "returned int, not a torch.utils.data.Dataset"),
        ("failing", "crashed", "FileNotFoundError: /data/captions.json"),
        ("Rasing", "crashed", "Did you mean"),
    ):
        record = probe(data, min_steps=20, max_measure_seconds=60.0)
        assert record.status == status, data
        assert said in record.message
    once = probe("RaisingOnce", min_steps=20, max_measure_seconds=60.0)
    assert once.status == "measured"
    assert [(f.item, f.message) for f in once.faults] == [("item 5", "KeyError: 'no caption'")]


def test_a_worker_s_end_is_named() -> None:
    """The kernel's count of kills has risen since the probe began; a bus error is shared memory."""
    full = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    for text, endings, kills, status, said in (
        ("gone", {signal.SIGKILL}, -1, "out_of_memory", "the kernel killed a worker"),
        ("gone", {signal.SIGSEGV}, -1, "crashed", "a worker ended: SIGSEGV"),
        ("gone", {signal.SIGBUS}, -1, "out_of_memory", "--shm-size"),
        (full, set(), -1, "out_of_memory", "/dev/shm"),
        ("OSError: [Errno 24] Too many open files: '/a.jpg'", set(), -1, "crashed", "ulimit -n"),
    ):  # fmt: skip
        found = classify_loader(RuntimeError(text), Watch(1, "p"), endings, kills)
        assert found[0] == status, text
        assert said in found[1]
