"""Real fed trainings in this process: what they measure, and what is said of bad data."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from planner.core.schema import FactoryModel, MeasurementRecord, TrainSetting
from planner.core.schema.loading import DataSource, FedRecord, LoaderSetting
from planner.training.loading.sources import find_source
from search.probe.device import describe_device
from search.probe.protocol import PROBE_ANSWERS, AnswerReader, FedMessage, FedRequest
from search.probe.worker.fed import measure_fed
from search.probe.worker.report import Report
from search.tuning.feeding.proving import make_fed_record
from tests.search.feeding.pictures import CLASSES, SIDE, make_folder

HERE = "tests.search.feeding.pictures"


def request_of(source: DataSource | str, model: str = "tests.search.factories:tiny") -> FedRequest:
    if isinstance(source, str):
        source = DataSource(kind="factory", location=f"{HERE}:{source}")
    loader = LoaderSetting(
        pipeline="own" if source.kind == "factory" else "torchvision", workers=0, batch_size=4,
        image_size=(SIDE, SIDE), pin_memory=False,
    )  # fmt: skip
    return FedRequest(
        model=FactoryModel(factory=model, image_size=(SIDE, SIDE), num_classes=CLASSES),
        setting=TrainSetting(batch_size=4, precision="fp32"), source=source, loader=loader,
        max_steps=8, fed_seconds=0.01,
    )  # fmt: skip


def run(request: FedRequest) -> FedRecord:
    reading, writing = os.pipe()
    report = Report(writing, request.probe_id)
    outcome = measure_fed(request, time.monotonic() + 300.0, report)
    os.close(writing)
    with os.fdopen(reading, "rb") as channel:
        told = AnswerReader(request.probe_id, PROBE_ANSWERS).feed(channel.read())
    (message,) = [answer for answer in told if isinstance(answer, FedMessage)]
    record = MeasurementRecord(
        model=request.model, setting=request.setting, device=describe_device("cpu"), versions={},
        date="", status=outcome.status, message=outcome.message, step_seconds=outcome.step_seconds,
    )  # fmt: skip
    return make_fed_record(request, record, message, None)


def test_a_folder_of_pictures_is_trained_on(tmp_path: Path) -> None:
    found = run(request_of(find_source(str(make_folder(tmp_path)))))
    assert found.status == "measured", found.message
    assert len(found.wait_seconds) == len(found.step_seconds) >= 8
    assert all(w < s for w, s in zip(found.wait_seconds, found.step_seconds, strict=True))
    assert found.images_per_second == pytest.approx(
        4 * len(found.step_seconds) / sum(found.step_seconds)
    )
    assert found.resident_seconds
    assert found.step_cpu_seconds
    assert found.fed_cpu_seconds


def test_a_task_is_fed_by_a_data_set_of_its_items() -> None:
    found = run(request_of("vectors", f"{HERE}:task"))
    assert found.status == "measured", found.message


def test_bad_data_are_named() -> None:
    for data, item, said in (
        ("raising", "index ", "ValueError: the label is missing"),
        ("misshapen", "the data", "images are [3, 17, 17], and the model takes [3, 16, 16]"),
        ("mislabelled", "the data", "a label is 10, and the model has 10 classes"),
        ("vectors", "the data", "a batch is a tensor [4, 4], and the model takes images and"),
    ):
        found = run(request_of(data))
        assert found.status == "faulty", found.message
        assert found.fault.item.startswith(item)
        assert said in found.fault.message
