"""Real fed trainings in workers: what they measure, and how they end on data that are no good."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.loading import DataSource, FedRecord, LoaderSetting
from planner.machine.host import read_host
from planner.throughput.feeding import Loading, Stepping, fed_rate
from planner.training.loading.sources import find_source
from search.loop.study.records import append_records
from search.probe.parent.fork_server import ForkServer
from search.probe.protocol import FedRequest
from search.probe.worker.fed import named
from search.tuning.feeding.proving import find_kept, prove
from tests.search.feeding.pictures import (
    CLASSES,
    LOAD_SECONDS,
    SIDE,
    STEP_SECONDS,
    make_folder,
    own,
)
from tests.search.probes import AMPLE_SECONDS

HERE = "tests.search.feeding.pictures"


def request_of(
    source: DataSource | str,
    workers: int = 0,
    model: str = "tiny",
    accumulate: int = 1,
    **more: Any,
) -> FedRequest:  # fmt: skip
    if isinstance(source, str):
        source = DataSource(kind="factory", location=f"{HERE}:{source}")
    loader = LoaderSetting(
        pipeline="own" if source.kind == "factory" else "torchvision", workers=workers,
        batch_size=4, image_size=(SIDE, SIDE), pin_memory=False,
    )  # fmt: skip
    setting = TrainSetting(batch_size=4, accumulate=accumulate, precision="fp32")
    where = "tests.search.factories" if model == "tiny" else HERE
    factory = FactoryModel(factory=f"{where}:{model}", image_size=(SIDE, SIDE), num_classes=CLASSES)
    return FedRequest(
        model=factory, setting=setting, source=source, loader=loader,
        **{"max_steps": 8, "fed_seconds": 0.2, **more},
    )  # fmt: skip


def run(request: FedRequest, server: ForkServer, seconds: float = AMPLE_SECONDS) -> FedRecord:
    return prove(request, predicted=None, deadline_seconds=seconds, fork_server=server)


def test_a_folder_of_pictures_is_trained_on(tmp_path: Path, fork_server: ForkServer) -> None:
    source = find_source(str(make_folder(tmp_path)))
    found = run(request_of(source, workers=1), fork_server)
    assert found.status == "measured", found.message
    assert len(found.wait_seconds) == len(found.step_seconds) >= 8
    assert all(w < s for w, s in zip(found.wait_seconds, found.step_seconds, strict=True))
    assert found.images_per_second == pytest.approx(
        4 * len(found.step_seconds) / sum(found.step_seconds)
    )
    assert found.resident_seconds
    assert found.step_cpu_seconds
    assert found.fed_cpu_seconds
    assert found.fed_cpu_seconds > 0
    assert not any("left" in flag for flag in found.flags), "its workers have ended by themselves"


@pytest.mark.release
@pytest.mark.parametrize(
    ("model", "workers", "accumulate", "waits"),
    [("quick", 2, 2, True), ("steady", 2, 1, False), ("quick", 0, 1, True)],
)  # fmt: skip
def test_a_training_is_fed_by_the_law(
    model: str, workers: int, accumulate: int, waits: bool, fork_server: ForkServer
) -> None:
    """An item takes 20 ms of no processor: 50 images/s for each worker. A step takes 5 or 25 ms an
    image, and what the machine adds."""
    found = run(request_of("slow", workers, model, accumulate), fork_server)
    assert found.status == "measured", found.message
    images = 4 * accumulate * len(found.resident_seconds)
    step = Stepping(images / sum(found.resident_seconds))
    law = fed_rate(Loading(50.0 * max(workers, 1), workers), step, 1)
    assert found.images_per_second == pytest.approx(law, rel=0.35)
    waiting = sum(found.wait_seconds) / sum(found.step_seconds)
    assert waiting > 0.4 if waits else waiting < 0.3


def test_on_shared_processors_an_image_takes_what_loading_and_stepping_take(
    fork_server: ForkServer,
) -> None:
    """The law of shared processors rests on it: 10 ms to load and 20 ms to step are 30 ms of
    processor time for an image, whoever else runs. Where one step by itself would keep one of two
    processors busy, and two workers both, no more than 2 / 0.03 images/s are trained."""
    found = run(request_of("burning", 2, "working", fed_seconds=1.0), fork_server)
    assert found.status == "measured", found.message
    assert found.step_cpu_seconds == pytest.approx(STEP_SECONDS, rel=0.25)
    assert found.fed_cpu_seconds == pytest.approx(LOAD_SECONDS + STEP_SECONDS, rel=0.25)
    processors = read_host().cpus
    loading = Loading(2 / LOAD_SECONDS, 2, LOAD_SECONDS)
    law = fed_rate(loading, Stepping(1 / STEP_SECONDS, STEP_SECONDS), processors)
    assert (found.images_per_second or 0.0) < 1.1 * law


@pytest.mark.parametrize(
    ("data", "workers", "item", "said"),
    [
        ("raising", 0, "index ", "ValueError: the label is missing"),
        ("raising", 2, "index ", "ValueError: the label is missing"),
        ("misshapen", 0, "the data", "images are [3, 17, 17], and the model takes [3, 16, 16]"),
        ("mislabelled", 0, "the data", "a label is 10, and the model has 10 classes"),
        ("vectors", 0, "the data", "a batch is a tensor [4, 4], and the model takes images and"),
    ],
)
def test_bad_data_are_named(
    data: str, workers: int, item: str, said: str, fork_server: ForkServer
) -> None:
    found = run(request_of(data, workers), fork_server)
    assert found.status == "faulty", found.message
    assert found.fault.item.startswith(item)
    assert said in found.fault.message


@pytest.mark.release
def test_data_that_hang_end_at_the_deadline(fork_server: ForkServer) -> None:
    found = run(request_of("hanging", workers=1), fork_server, seconds=12.0)
    assert found.status == "timed_out"
    assert "in loader" in found.message
    assert found.images_per_second is None


def test_a_data_set_that_names_its_items_goes_to_a_worker_that_is_not_forked() -> None:
    """Python 3.14 pickles it for its workers (forkserver)."""
    sent = pickle.loads(pickle.dumps(named(own())))
    assert len(sent) == len(own())


def test_a_task_is_fed_by_a_data_set_of_its_items(fork_server: ForkServer) -> None:
    found = run(request_of("vectors", workers=0, model="task"), fork_server)
    assert found.status == "measured", found.message


def test_the_same_run_is_not_made_twice(tmp_path: Path) -> None:
    request = request_of("own")
    path = tmp_path / "fed.jsonl"
    assert find_kept(path, request) is None
    done = FedRecord(
        model=request.model, setting=request.setting, loader=request.loader, data=request.source,
        status="measured", step_seconds=(0.1,), images_per_second=40.0,
    )  # fmt: skip
    append_records(path, [done.model_copy(update={"status": "faulty", "images_per_second": None})])
    assert find_kept(path, request) is None, "what failed is tried again"
    append_records(path, [done])
    with path.open("ab") as file:
        file.write(b'{"torn')
    assert find_kept(path, request) == done
    changed = request.source.model_copy(update={"fingerprint": "changed"})
    assert find_kept(path, request.model_copy(update={"source": changed})) is None
