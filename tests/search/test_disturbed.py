"""What was throttled or disturbed is probed again where it matters, and then does not count; a
probe that other processes left no memory says nothing of its setting."""

import math
from math import log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.schema import DeviceInfo, MeasurementRecord, TrainSetting
from planner.core.schema.record import BUDGET_ENDED, Recommendation
from planner.core.units import GIB, MIB
from search.loop.recommendation import Summary, recommend
from search.loop.records import read_records
from search.loop.sampler import PlannerSampler
from search.loop.search import MAX_CROWDED, MAX_LOST
from search.loop.space import Candidate, Pick, make_space
from search.loop.study import SpaceParams, StudyIdentity
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import generic_prior
from search.probe.device import MemoryInUse
from search.probe.evidence import is_feasible
from search.tuning import tune as tune_file
from search.tuning.tune import tune
from tests.search.replays import Replay, search_table
from tests.search.tables import (
    BUDGET,
    GPU,
    MODEL,
    SMALL,
    failed,
    invented_table,
    make_record,
    ran,
    slowed,
    told,
    true_bytes,
    true_prior,
)

TABLE = invented_table(wobble=0.0)


def test_where_most_probes_are_disturbed_that_is_how_the_machine_runs() -> None:
    replay = Replay(TABLE)
    posterior = Posterior(replay.space, true_prior(replay), BUDGET)
    good = [c for c in replay.space.candidates if true_bytes(c.setting) < 8 * GIB][:3]
    told(posterior, *(slowed(replay.probe(c)) for c in good))
    assert all(posterior.excluded[replay.space.index(c.setting)] for c in good)


def test_others_slow_a_probe_and_never_make_it_faster() -> None:
    replay = Replay(TABLE)
    posterior = Posterior(replay.space, true_prior(replay), BUDGET)
    candidate = next(c for c in replay.space.candidates if c.setting.batch_size == 8)
    record = replay.probe(candidate)
    told(posterior, slowed(record, "2 other processes on the GPU hold 3.0 GiB", 1.1))
    expected = posterior.predict().log_seconds[replay.space.index(candidate.setting)]
    assert expected == pytest.approx(log(record.step_seconds[0]), abs=0.02)


# Batch and mode of bf16 without checkpointing, and by how much it is slowed: hotter each time.
WARMING = {(128, "off"): 1.0, (256, "off"): 1.1, (192, "off"): 1.15, (96, "off"): 1.2,
           (64, "off"): 1.24, (128, "default"): 1.28}  # fmt: skip


def warming(prior_of_compiled: float) -> Posterior:
    """Was told of these probes; its prior is the truth but for what is compiled."""
    replay = Replay(TABLE)
    prior = true_prior(replay, share=lambda s: prior_of_compiled if s.compiles else 1.0)
    posterior = Posterior(replay.space, prior, BUDGET)
    plain = TrainSetting(precision="bf16", attention="sdpa").with_recipe(of_swin=True)
    for (batch, mode), factor in WARMING.items():
        setting = plain.model_copy(update={"batch_size": batch, "compile": mode})
        candidate = replay.space.find(setting)
        record = replay.probe(candidate)
        told(posterior, slowed(record, factor=factor) if factor > 1 else record)
    return posterior


def recommended(posterior: Posterior) -> Recommendation:
    found = tuple(posterior.contenders().values())
    records = [record for contender in found for record in contender.records]
    identity = StudyIdentity(model=MODEL, device=GPU, versions={})
    return recommend(records, Summary(identity, BUDGET, TrainSetting(), found))


@pytest.mark.parametrize("prior_of_compiled", [1.0, 1.25])
def test_settings_are_compared_at_one_heat(prior_of_compiled: float) -> None:
    """The compiled one is fastest, was probed when the device was hottest, and measured slower than
    two that were probed before; the prior may even hold that compiling gains nothing."""
    posterior = warming(prior_of_compiled)
    found = {(c.setting.batch_size, c.setting.compile): c for c in posterior.contenders().values()}
    measured = {which: c.measured_rate for which, c in found.items()}
    compiled = measured.pop((128, "default"))
    assert sum(rate > compiled for rate in measured.values()) == 2
    index, rate = posterior.best() or (-1, 0.0)
    assert posterior.space.candidates[index].setting.compile == "default"
    assert rate == found[128, "default"].rate == max(c.rate for c in found.values())
    evidence = recommended(posterior).evidence
    assert evidence is not None
    assert evidence.setting.compile == "default"
    assert evidence.images_per_second == pytest.approx(compiled), "as it was measured"


def test_the_recommendation_says_why_what_measured_faster_is_not_it() -> None:
    notes = recommended(warming(1.0)).notes
    assert any(note.startswith("Most probes found the device throttled") for note in notes)
    (compiling,) = [note for note in notes if note.startswith("Compiling takes")]
    assert "pays after" in compiling


def test_what_is_slow_for_a_reason_of_its_own_is_not_taken_for_hot() -> None:
    """A batch within 4% of the budget, where memory is given back and asked for again, took a
    quarter longer than it should at that heat. Its own rate counts, not that of its likes."""
    replay = Replay(TABLE)
    largest, smaller, *others = sorted(
        (c for c in replay.space.candidates
         if (c.setting.precision, c.setting.checkpointing, c.setting.compile)
         == ("bf16", "none", "off")),
        key=lambda c: -c.setting.batch_size,
    )  # fmt: skip
    budget = int(true_bytes(largest.setting) / 0.98)
    posterior = Posterior(replay.space, true_prior(replay), budget)
    for candidate in (*others[:3], smaller, largest):
        factor = 1.2 * (1.25 if candidate is largest else 1.0)
        posterior.tell(candidate, slowed(replay.probe(candidate), factor=factor))
    rates = {c.setting.batch_size: c.rate for c in posterior.contenders().values()}
    assert max(rates, key=lambda batch: rates[batch]) == smaller.setting.batch_size


class OnceSlow:
    """The best setting is slowed in its first probe only."""

    def __init__(self, replay: Replay, best: str) -> None:
        self.replay, self.best, self.probes = replay, best, 0

    def probe(self, candidate: Candidate) -> MeasurementRecord:
        record = self.replay.probe(candidate)
        if candidate.id != self.best:
            return record
        self.probes += 1
        return slowed(record, factor=1.02) if self.probes == 1 else record


def test_the_winner_is_probed_again_where_it_was_throttled() -> None:
    """Its second probe shows it for what it is, and alone counts."""
    replay = Replay(TABLE)
    best = max(replay.rates(BUDGET).items(), key=lambda pair: pair[1])
    device = OnceSlow(replay, best[0])
    search, _ = search_table(replay, true_prior(replay), BUDGET, device)
    assert device.probes == 2
    winner = max(search.sampler.posterior.contenders().values(), key=lambda c: c.rate)
    assert winner.rate == pytest.approx(best[1], rel=1e-3)
    assert not winner.evidence.flags


def test_a_setting_that_was_killed_once_is_not_recommended_though_it_ran_later() -> None:
    """It had no samples, and the search ended in a traceback of a median of none."""
    replay = Replay(TABLE)
    posterior = Posterior(replay.space, true_prior(replay), BUDGET)
    best = max(replay.rates(BUDGET).items(), key=lambda pair: pair[1])[0]
    candidate = next(c for c in replay.space.candidates if c.id == best)
    ran = replay.probe(candidate)
    told(posterior, failed(ran), slowed(ran))
    assert PlannerSampler(posterior, SpaceParams(replay.space)).choose() is not None
    assert not posterior.contenders(), "nor is it recommended"


pytestmark = pytest.mark.usefixtures("free_gpu")
ALLOWED = int(16 * GIB * 0.95)
SETTING = TrainSetting(batch_size=8, precision="fp32")


@pytest.mark.parametrize(
    ("fields", "inconclusive"),
    [
        ({}, False),  # a record of old: nobody said what was free
        ({"free_bytes": 16 * GIB, "allowed_bytes": ALLOWED}, False),
        ({"free_bytes": ALLOWED - 100 * MIB, "allowed_bytes": ALLOWED}, False),  # under 1%
        ({"free_bytes": 16 * GIB, "taken_bytes": 9 * GIB, "allowed_bytes": 6 * GIB}, False),
        ({"free_bytes": 16 * GIB, "taken_bytes": -9 * GIB, "allowed_bytes": ALLOWED}, False),
        ({"taken_bytes": 9 * GIB}, True),
        ({"flags": (BUDGET_ENDED,)}, True),
        ({"status": "timed_out", "free_bytes": 16 * GIB, "taken_bytes": 9 * GIB,
          "allowed_bytes": 6 * GIB}, True),
        ({"status": "crashed", "free_bytes": GIB, "allowed_bytes": ALLOWED}, False),
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
    crowded = failed(good, "out_of_memory", free_bytes=GIB, allowed_bytes=ALLOWED)
    posterior = told(Posterior(space, generic_prior(space, GPU), ALLOWED), crowded)
    assert not posterior.excluded.any()
    assert not posterior.bytes.indices
    assert [c.setting for c in ran([crowded, good])] == [good.setting]


def run(folder: Path, prober: Any, **options: Any) -> Recommendation:
    plain = {"restrict": SMALL, "estimator": None, "output": folder, "budget_seconds": None}
    return tune(MODEL, prober=prober, **{**plain, **options})


def crowded_out(pick: Pick, *_: object) -> MeasurementRecord:
    """A neighbour has come, holds 13 GiB and takes the rest."""
    record = make_record(pick.candidate.setting, total_bytes=1)
    return record.model_copy(update={"free_bytes": 3 * GIB})


def on_a_lost_device(pick: Pick, *_: object) -> MeasurementRecord:
    """The GPU has fallen off the bus: not even a context can be made."""
    words = "AcceleratorError: CUDA error: unknown error\nSearch for it."
    return failed(make_record(pick.candidate.setting), phase="device", message=words)


def test_a_lost_device_ends_the_search_and_no_setting_is_blamed(tmp_path: Path) -> None:
    found = run(tmp_path, on_a_lost_device, batch_size=(8, 16))
    assert found.stopped_because == "the device does not answer any more"
    assert found.advice.startswith("The device failed before anything was on it: AcceleratorError")
    assert "unknown error. See whether nvidia-smi lists it" in found.advice
    assert found.num_probes == MAX_LOST
    well = run(tmp_path, lambda pick, *_: make_record(pick.candidate.setting), batch_size=8)
    assert well.status == "recommended", "it was reset, and the same command goes on"


def test_a_search_ends_where_others_hold_the_device(tmp_path: Path) -> None:
    nothing = run(tmp_path, crowded_out, batch_size=(64, 96, 128))
    assert nothing.status == "nothing_fits"
    assert "other processes took the device's memory" in nothing.stopped_because
    assert "Other processes held" in nothing.advice
    records = read_records(tmp_path / "probes.jsonl").records
    assert len(records) == MAX_CROWDED
    assert all(r.allowed_bytes == ALLOWED for r in records)
    # When they are gone, the same command goes on, and nothing is closed.
    well = run(
        tmp_path, lambda pick, *_: make_record(pick.candidate.setting), batch_size=(64, 96, 128)
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

        def prober(pick: Pick, *_: object, free: int = free) -> MeasurementRecord:
            record = make_record(pick.candidate.setting, total_bytes=free * GIB)
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
        if figure is not None and figure > ALLOWED:
            assert not is_feasible(record, ALLOWED), "no other figure hides it"
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16))
    record = record.model_copy(update={"setting": space.candidates[0].setting})
    posterior = told(Posterior(space, generic_prior(space, GPU), ALLOWED), record)
    assert not math.isnan(float(posterior.bytes.predict()[0].sum()))
