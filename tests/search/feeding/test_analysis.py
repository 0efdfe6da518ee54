"""Which of step and loader bounds, and what is said of it: over made records, by hand."""

from __future__ import annotations

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.loading import (
    DataRecommendation,
    DataSource,
    FedRecord,
    Feeding,
    LoaderBound,
    LoaderRecord,
    LoaderSetting,
)
from planner.core.units import GIB
from search.loop.contenders import Contender
from search.tuning.feeding.analysis import Machine, judge, make_feeding, predicted_rate
from tests.search.tables import GPU, MODEL

DATA = DataSource(kind="folder", location="/data/pictures", num_items=2000, num_classes=10)
CARD = Machine(processors=8, steps_on_cpu=False)
CPU = Machine(processors=2, steps_on_cpu=True)


def step_of(rate: float, batch_size: int = 64, num_bytes: int = 8 * GIB) -> MeasurementRecord:
    seconds = batch_size / rate
    return MeasurementRecord(
        model=MODEL, setting=TrainSetting(batch_size=batch_size), device=GPU, versions={}, date="",
        status="measured", step_seconds=(seconds,) * 5, images_per_second=rate,
        device_bytes=num_bytes,
    )  # fmt: skip


def loader_of(
    rate: float, workers: int = 8, cpu_seconds: float = 0.011, bound: LoaderBound | None = "decode"
) -> LoaderRecord:
    return LoaderRecord(
        data=DATA, setting=LoaderSetting(workers=workers, batch_size=64), status="measured",
        images_per_second=rate, cpu_seconds_per_image=cpu_seconds, bound=bound,
    )  # fmt: skip


def fed_of(
    step: MeasurementRecord, loader: LoaderRecord, rate: float, waiting: float = 0.0,
    resident: float | None = None, **more: object,
) -> FedRecord:  # fmt: skip
    """A fed run of ten steps at `rate`, which waited for a share of its time."""
    seconds = step.setting.batch_size / rate
    alone = step.setting.batch_size / (resident or step.images_per_second or 1.0)
    return FedRecord.model_validate(
        {
            "model": MODEL, "setting": step.setting, "loader": loader.setting, "data": DATA,
            "status": "measured", "step_seconds": (seconds,) * 10, "images_per_second": rate,
            "wait_seconds": (waiting * seconds,) * 10, "resident_seconds": (alone,) * 5,
            "predicted": min(loader.images_per_second or 0.0, step.images_per_second or 0.0),
            **more,
        }
    )  # fmt: skip


def contender(record: MeasurementRecord) -> Contender:
    return Contender(record.setting, (record,))


def feeding(
    step: MeasurementRecord, loader: LoaderRecord, fed: FedRecord | None = None,
    *others: MeasurementRecord, machine: Machine = CARD,
) -> Feeding:  # fmt: skip
    found = sorted(map(contender, (step, *others)), key=lambda c: -c.rate)
    data = DataRecommendation(
        data=DATA, date="", setting=loader.setting, evidence=loader,
        ways_out=("Resize the pictures once to 256 px.",),
    )  # fmt: skip
    return make_feeding(step, data, fed, found, machine)


def test_a_loader_that_bounds_says_what_it_costs_and_what_would_help() -> None:
    step, loader = step_of(1000.0), loader_of(620.0)
    found = feeding(step, loader, fed_of(step, loader, 620.0, 0.37))
    assert found.bound == "loader"
    assert found.waiting_share == 0.38
    assert found.needed_workers is None, "as many processors are not there"
    said = " ".join(found.notes)
    # One of 8 workers brings 77.5 images/s: 1,000 take 13, of 11 ms of processor time an image.
    assert "the device waits 38% of the time" in said
    assert "13 workers would be needed, and 8 processors are there" in said
    assert "256 px" in said


def test_a_step_that_bounds_says_how_many_workers_are_enough() -> None:
    step, loader = step_of(300.0), loader_of(700.0)
    found = feeding(step, loader, fed_of(step, loader, 298.0))
    assert (found.bound, found.needed_workers) == ("step", 4)
    assert "4 workers would be enough" in found.notes[0]
    assert len(found.notes) == 1


def test_on_the_cpu_min_does_not_hold_and_the_law_says_what_does() -> None:
    # Loading alone keeps both processors busy at 100 images/s, the step alone at 100: 50 together.
    step, loader = step_of(100.0), loader_of(100.0, workers=2, cpu_seconds=0.02)
    assert round(predicted_rate(step, loader, CPU)) == 50
    assert round(predicted_rate(step, loader, CARD)) == 100
    judged = judge(step, loader, fed_of(step, loader, 50.0, waiting=0.02), CPU)
    assert judged.bound == "step", "it never waited: its processors were shared"
    found = feeding(step, loader, fed_of(step, loader, 50.0, waiting=0.02), machine=CPU)
    assert "share 2 processors: a step takes 1.96 × as long" in " ".join(found.notes)
