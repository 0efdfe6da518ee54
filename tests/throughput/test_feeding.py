"""The law of loader and step, derived above each figure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.schema.loading import LoaderBound
from planner.throughput.feeding import (
    Loading,
    Stepping,
    bound_of,
    fed_rate,
    needed_workers,
    serial_rate,
    waiting_share,
    worker_rate,
)

RATES = st.floats(0.1, 1e5)
SECONDS = st.floats(0.0, 1.0)


def test_the_slower_of_two_stages_sets_the_pace() -> None:
    gpu = Stepping(1000.0)
    assert fed_rate(Loading(620.0, 8), gpu, 8) == 620.0
    assert fed_rate(Loading(2000.0, 8), gpu, 8) == 1000.0


def test_no_workers_are_one_after_the_other() -> None:
    # 1/600 s to load and 1/300 s to step: 3/600 s for an image.
    assert fed_rate(Loading(600.0, 0), Stepping(300.0), 8) == pytest.approx(200.0)


def test_shared_processors_are_divided_by_what_an_image_takes() -> None:
    # Loading takes 10 ms of a processor and the step 30 ms: two processors give 2 / 0.04 s.
    loader, step = Loading(200.0, 2, cpu_seconds=0.01), Stepping(66.0, cpu_seconds=0.03)
    assert fed_rate(loader, step, 2) == pytest.approx(50.0)
    # Where the step leaves processors free, min() holds again.
    assert fed_rate(loader, step, 8) == 66.0


@given(loader=RATES, step=RATES, processors=st.integers(1, 128))
def test_two_that_each_use_the_whole_machine_get_what_no_workers_get(
    loader: float, step: float, processors: int
) -> None:
    whole = Loading(loader, processors, cpu_seconds=processors / loader)
    both = fed_rate(whole, Stepping(step, cpu_seconds=processors / step), processors)
    assert both == pytest.approx(serial_rate(loader, step))
    assert both < min(loader, step)


@given(loader=RATES, workers=st.integers(0, 64), cpu=SECONDS, step=RATES, step_cpu=SECONDS,
       processors=st.integers(1, 128))  # fmt: skip
def test_no_feeding_is_faster_than_either_stage(
    loader: float, workers: int, cpu: float, step: float, step_cpu: float, processors: int
) -> None:
    stage = Stepping(step, step_cpu)
    fed = fed_rate(Loading(loader, workers, cpu), stage, processors)
    assert 0 < fed <= min(loader, step)
    assert 0 <= waiting_share(fed, stage) < 1
    assert fed <= fed_rate(Loading(2 * loader, workers, cpu), stage, processors)


def test_the_device_waits_for_what_it_could_have_stepped() -> None:
    assert waiting_share(620.0, Stepping(1000.0)) == pytest.approx(0.38)
    assert bound_of(620.0, Stepping(1000.0)) == "loader"
    assert bound_of(990.0, Stepping(1000.0)) == "step"


def test_workers_are_needed_as_the_step_is_faster_than_one() -> None:
    # 8 workers bring 727 images/s, one 91: 1,000 images/s take 11, and 11 ms of processor time an
    # image are 11 processors.
    loader = Loading(727.3, 8, cpu_seconds=0.011)
    need = needed_workers(loader, Stepping(1000.0), 8)
    assert (need.workers, need.limit) == (11, "processors")
    assert need.processors == pytest.approx(11.0)
    assert needed_workers(loader, Stepping(1000.0), 16).limit is None


def test_workers_that_wait_and_do_not_compute_are_not_limited_by_processors() -> None:
    # Four that wait for a far disk bring 40 images/s and take 1% of a processor.
    need = needed_workers(Loading(40.0, 4, cpu_seconds=0.00025), Stepping(200.0), 2)
    assert (need.workers, need.limit) == (20, None)


def test_workers_that_outnumber_the_processors_bring_no_more_together() -> None:
    # Eight on two processors bring what two would.
    crowded = Loading(200.0, 8, cpu_seconds=0.01)
    assert worker_rate(crowded, 2) == pytest.approx(100.0)
    assert worker_rate(Loading(200.0, 8, cpu_seconds=0.001), 2) == pytest.approx(25.0)


def test_no_number_of_workers_helps_what_is_not_theirs() -> None:
    limits: dict[LoaderBound, str] = {
        "disk": "disk", "copy": "main process", "main process": "main process",
    }  # fmt: skip
    for bound, limit in limits.items():
        need = needed_workers(Loading(100.0, 4, bound=bound), Stepping(200.0), 64)
        assert need.limit == limit
