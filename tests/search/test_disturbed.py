"""What was throttled or disturbed is probed again where it matters, and then does not count."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import Recommendation
from planner.core.units import GIB
from search.loop.contenders import choose, contenders
from search.loop.recommend import Summary, recommend
from search.loop.sampler import PlannerSampler
from search.loop.space import Candidate, setting_id
from search.loop.study import SpaceParams
from search.loop.surrogate.posterior import Posterior
from tests.search.replays import Replay, search_table
from tests.search.tables import (
    BUDGET,
    GPU,
    MODEL,
    failed,
    invented_table,
    told,
    true_bytes,
    true_prior,
)

TABLE = invented_table(wobble=0.0)


def slowed(
    record: MeasurementRecord, flag: str = "throttled: hw_thermal_slowdown", factor: float = 1.2
) -> MeasurementRecord:
    seconds = tuple(s * factor for s in record.step_seconds)
    rate = (record.images_per_second or 0.0) / factor
    return record.model_copy(
        update={"step_seconds": seconds, "images_per_second": rate, "flags": (flag,)}
    )


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
    prior = true_prior(replay)
    guesses = [
        replace(guess, seconds=guess.seconds * (prior_of_compiled if c.setting.compiles else 1.0))
        for guess, c in zip(prior.guesses, replay.space.candidates, strict=True)
    ]
    posterior = Posterior(replay.space, replace(prior, guesses=tuple(guesses)), BUDGET)
    plain = TrainSetting(precision="bf16", attention="sdpa").with_recipe(of_swin=True)
    for (batch, mode), factor in WARMING.items():
        candidate = replay.space.find(
            plain.model_copy(update={"batch_size": batch, "compile": mode})
        )
        record = replay.probe(candidate)
        told(posterior, slowed(record, factor=factor) if factor > 1 else record)
    return posterior


def recommended(posterior: Posterior) -> Recommendation:
    ran = tuple(posterior.ran().values())
    records = [record for contender in ran for record in contender.records]
    return recommend(records, Summary(MODEL, GPU, {}, BUDGET, TrainSetting(), ran=ran))


@pytest.mark.parametrize("prior_of_compiled", [1.0, 1.25])
def test_settings_are_compared_at_one_heat(prior_of_compiled: float) -> None:
    """The compiled one is fastest, was probed when the device was hottest, and measured slower than
    two that were probed before; the prior may even hold that compiling gains nothing."""
    posterior = warming(prior_of_compiled)
    ran = {(c.setting.batch_size, c.setting.compile): c for c in posterior.ran().values()}
    measured = {which: c.measured_rate for which, c in ran.items()}
    compiled = measured.pop((128, "default"))
    assert sum(rate > compiled for rate in measured.values()) == 2
    index, rate = posterior.best() or (-1, 0.0)
    assert posterior.space.candidates[index].setting.compile == "default"
    assert rate == ran[128, "default"].rate == max(c.rate for c in ran.values())
    low, high = ran[128, "default"].interval
    assert low < rate < high
    found = recommended(posterior)
    assert found.evidence is not None
    assert found.evidence.setting.compile == "default"
    assert found.evidence.images_per_second == pytest.approx(compiled), "as it was measured"


def test_the_recommendation_says_why_what_measured_faster_is_not_it() -> None:
    notes = recommended(warming(1.0)).notes
    (said,) = [note for note in notes if note.startswith("Most probes found the device throttled")]
    assert "Measured faster, while it was cooler: batch 256, compile off; compile off." in said
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
    rates = {c.setting.batch_size: c.rate for c in posterior.ran().values()}
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
    winner = contenders(search.records, BUDGET)[0]
    assert winner.rate == pytest.approx(best[1], rel=1e-3)
    assert not winner.evidence.flags


def test_records_alone_are_compared_on_a_device_that_is_as_hot_for_both() -> None:
    """As a page of a search that goes on shows them: where most probes were throttled, what was
    probed on the cool device only comes last."""
    replay = Replay(TABLE)
    ranked = sorted(replay.rates(BUDGET).items(), key=lambda pair: -pair[1])
    best, second, *others = [next(r for r in TABLE if setting_id(r.setting) == name)
                             for name, _ in ranked[:4]]  # fmt: skip
    records = [second, *map(slowed, (best, *others))]
    assert max(records, key=lambda r: r.images_per_second or 0.0) is second
    for first in (contenders(records, BUDGET)[0], choose(contenders(records, BUDGET))):
        assert first.setting == best.setting
    only = contenders([second, slowed(second), slowed(best)], BUDGET)
    assert only[-1].rate == pytest.approx(ranked[1][1] / 1.2), "the one that was throttled counts"


def test_a_setting_that_was_killed_once_is_not_recommended_though_it_ran_later() -> None:
    """It had no samples, and the search ended in a traceback of a median of none."""
    replay = Replay(TABLE)
    posterior = Posterior(replay.space, true_prior(replay), BUDGET)
    best = max(replay.rates(BUDGET).items(), key=lambda pair: pair[1])[0]
    candidate = next(c for c in replay.space.candidates if c.id == best)
    ran = replay.probe(candidate)
    told(posterior, failed(ran), slowed(ran))
    assert PlannerSampler(posterior, SpaceParams(replay.space)).choose() is not None
    assert not posterior.ran(), "nor is it recommended"
