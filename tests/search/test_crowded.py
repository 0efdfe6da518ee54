"""A probe that other processes left no memory says nothing of its setting: one verdict for all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.schema import DeviceInfo, MeasurementRecord, TrainSetting
from planner.core.schema.record import BUDGET_ENDED, Recommendation
from planner.core.units import GIB, MIB
from search.loop.contenders import contenders
from search.loop.records import read_records
from search.loop.search import MAX_CROWDED, MAX_LOST
from search.loop.space import Choice, make_space
from search.loop.study import constraint
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import generic_prior
from search.probe.device import MemoryInUse
from search.probe.evidence import is_feasible
from search.tuning import tune as tune_file
from search.tuning.tune import tune
from tests.search.tables import GPU, MODEL, SMALL, failed, make_record, told

pytestmark = pytest.mark.usefixtures("free_gpu")
BUDGET = int(16 * GIB * 0.95)
SETTING = TrainSetting(batch_size=8, precision="fp32")


@pytest.mark.parametrize(
    ("fields", "inconclusive"),
    [
        ({}, False),  # a record of old: nobody said what was free
        ({"free_bytes": 16 * GIB, "allowed_bytes": BUDGET}, False),
        ({"free_bytes": BUDGET - 100 * MIB, "allowed_bytes": BUDGET}, False),  # under 1% of 16 GiB
        ({"free_bytes": 16 * GIB, "taken_bytes": 9 * GIB, "allowed_bytes": 6 * GIB}, False),
        ({"free_bytes": 16 * GIB, "taken_bytes": -9 * GIB, "allowed_bytes": BUDGET}, False),
        ({"taken_bytes": 9 * GIB}, True),
        ({"flags": (BUDGET_ENDED,)}, True),
        ({"status": "timed_out", "free_bytes": 16 * GIB, "taken_bytes": 9 * GIB,
          "allowed_bytes": 6 * GIB}, True),
        ({"status": "crashed", "free_bytes": GIB, "allowed_bytes": BUDGET}, False),
    ],
)  # fmt: skip
def test_what_others_took_is_not_the_settings_fault(
    fields: dict[str, object], inconclusive: bool
) -> None:
    fields = {"status": "out_of_memory", **fields}
    assert failed(make_record(SETTING), **fields).inconclusive == inconclusive


def test_no_reader_of_records_holds_it_against_the_setting() -> None:
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16))
    good = make_record(space.candidates[0].setting)
    crowded = failed(good, "out_of_memory", free_bytes=GIB, allowed_bytes=BUDGET)
    posterior = told(Posterior(space, generic_prior(space, GPU), BUDGET), crowded)
    assert not posterior.excluded.any()
    assert not posterior.bytes.indices
    assert [c.setting for c in contenders([crowded, good], BUDGET)] == [good.setting]


def run(folder: Path, prober: Any, **options: Any) -> Recommendation:
    plain = {"restrict": SMALL, "estimator": None, "output": folder, "budget_seconds": None}
    return tune(MODEL, prober=prober, **{**plain, **options})


def crowded_out(choice: Choice, *_: object) -> MeasurementRecord:
    """A neighbour has come, holds 13 GiB and takes the rest."""
    record = make_record(choice.candidate.setting, total_bytes=1)
    return record.model_copy(update={"free_bytes": 3 * GIB})


def on_a_lost_device(choice: Choice, *_: object) -> MeasurementRecord:
    """The GPU has fallen off the bus: not even a context can be made."""
    words = "AcceleratorError: CUDA error: unknown error\nSearch for it."
    return failed(make_record(choice.candidate.setting), phase="device", message=words)


def test_a_lost_device_ends_the_search_and_no_setting_is_blamed(tmp_path: Path) -> None:
    found = run(tmp_path, on_a_lost_device, batch_size=(8, 16))
    assert found.stopped_because == "the device does not answer any more"
    assert found.advice.startswith("The device failed before anything was on it: AcceleratorError")
    assert "unknown error. See whether nvidia-smi lists it" in found.advice
    assert found.num_probes == MAX_LOST
    assert not found.ruled_out


def test_a_search_ends_where_others_hold_the_device(tmp_path: Path) -> None:
    nothing = run(tmp_path, crowded_out, batch_size=(64, 96, 128))
    assert nothing.status == "nothing_fits"
    assert "other processes took the device's memory" in nothing.stopped_because
    assert "Other processes held" in nothing.advice
    records = read_records(tmp_path / "probes.jsonl").records
    assert len(records) == MAX_CROWDED
    assert all(r.allowed_bytes == BUDGET for r in records)
    # When they are gone, the same command goes on, and nothing is closed.
    well = run(
        tmp_path, lambda choice, *_: make_record(choice.candidate.setting), batch_size=(64, 96, 128)
    )
    assert well.status == "recommended"


def test_a_study_resumed_with_more_memory_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun with 4 GiB free, where batch 64 in fp32 runs out of memory; gone on with 16 GiB."""
    one = {axis: values[:1] for axis, values in SMALL.items()}
    for free, status in ((4, "nothing_fits"), (4, "nothing_fits"), (16, "recommended")):
        left = MemoryInUse(16 * GIB, (16 - free) * GIB, free * GIB)
        monkeypatch.setattr(tune_file, "least_free", lambda wanted, left=left: left)

        def prober(choice: Choice, *_: object, free: int = free) -> MeasurementRecord:
            record = make_record(choice.candidate.setting, total_bytes=free * GIB)
            return record.model_copy(update={"free_bytes": free * GIB})

        assert run(tmp_path, prober, batch_size=64, restrict=one).status == status
    records = read_records(tmp_path / "probes.jsonl").records
    assert [r.status for r in records] == ["out_of_memory", "measured"], "with 4 GiB asked once"


def whole(n: int) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(-n, n), st.sampled_from((0, -1, 2**64 - 1, 1)))


@settings(max_examples=40)
@given(device=whole(2**65), reserved=whole(2**41), allocated=whole(2**41), kind=st.booleans())
def test_no_figure_of_a_driver_ends_a_search_or_passes_a_budget(
    device: int | None, reserved: int | None, allocated: int | None, kind: bool
) -> None:
    where = GPU if kind else DeviceInfo(kind="cpu", name="a CPU", total_bytes=16 * GIB)
    names = ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes")
    figures = dict(zip(names, (device, reserved, allocated), strict=True))
    record = make_record(SETTING, device=where).model_copy(update=figures)
    num_bytes = record.used_bytes
    assert num_bytes is None or num_bytes >= max(1, reserved or 0, allocated or 0)
    for figure in (device, reserved, allocated):
        if figure is not None and figure > BUDGET:
            assert not is_feasible(record, BUDGET), "no other figure hides it"
    assert math.isfinite(constraint(record, BUDGET))
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16))
    record = record.model_copy(update={"setting": space.candidates[0].setting})
    posterior = told(Posterior(space, generic_prior(space, GPU), BUDGET), record)
    assert not math.isnan(float(posterior.predict().log_bytes.sum()))
