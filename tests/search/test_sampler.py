"""The sampler over invented tables: they find the best, in few probes, and repeat nothing."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import Expected
from search.loop.sampler import MAX_FAILURES, PlannerSampler
from search.loop.search import find_plain_arm
from search.loop.space import Pick, candidate, make_space, setting_id, space_of
from search.loop.study import SpaceParams
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import (
    Prior,
    ProbeCosts,
    compilation_of,
    generic_prior,
    guess_compile_seconds,
)
from search.probe.evidence import FROM_CACHE, STOPPED_EARLY
from tests.search.replays import Replay, search_table
from tests.search.tables import (
    BUDGET,
    GPU,
    MODEL,
    SMALL,
    failed,
    invented_table,
    make_record,
    slowed,
    true_bytes,
    true_prior,
)

TABLE = invented_table()
ALL_MODES = ("off", "default", "max-autotune")


Ended = Callable[[list[TrainSetting], MeasurementRecord], MeasurementRecord]


class LoneSampler(PlannerSampler):
    """A sampler without a study, with `left` seconds of the budget."""

    left: float | None = None

    def __init__(self, replay: Replay, prior: Prior, tolerance: float = 0.01) -> None:
        posterior, params = Posterior(replay.space, prior, BUDGET), SpaceParams(replay.space)
        arm = find_plain_arm(replay.space, MODEL)
        super().__init__(posterior, params, tolerance, arm, lambda: self.left)
        self.replay = replay

    def choose_within(self, left: float | None = None) -> Pick | None:
        self.left = left
        return self.choose()

    def first_setting(self, left: float | None = None) -> TrainSetting:
        return self.choose_within(left).candidate.setting

    def search(
        self, seconds: float = 1e9, ended: Ended = lambda before, record: record
    ) -> list[TrainSetting]:
        """The settings of a whole search. `ended` gives the record with which a probe ends, from
        the settings before it and the table's record."""
        probed: list[TrainSetting] = []
        while (pick := self.choose_within(seconds)) is not None:
            record = ended(probed, self.replay.probe(pick.candidate))
            probed.append(record.setting)
            self.posterior.tell(pick.candidate, record)
            seconds -= record.probe_seconds
        return probed


def probes_until(replay: Replay, prior: Prior, share: float) -> int:
    """How many probes a whole search makes until one is within a share of the best."""
    search, _ = search_table(replay, prior, BUDGET)
    true = replay.rates(BUDGET)
    rates = [true.get(setting_id(r.setting), 0.0) for r in search.records]
    return next(i for i, r in enumerate(rates, 1) if r >= (1 - share) * max(true.values()))


@pytest.mark.parametrize(("seconds", "num_bytes"), [(1.0, 1.0), (3.0, 1.0), (0.4, 1.08)])
def test_a_prior_of_the_right_shape_needs_few_probes(seconds: float, num_bytes: float) -> None:
    replay = Replay(TABLE)
    assert probes_until(replay, true_prior(replay, seconds, num_bytes), 0.01) <= 5


def test_without_an_estimate_it_still_arrives_before_random() -> None:
    replay = Replay(TABLE)
    assert probes_until(replay, generic_prior(replay.space, GPU), 0.02) < len(replay.space) / 4


def test_the_first_probe_is_safe_and_leaves_time_for_others() -> None:
    replay = Replay(TABLE)
    prior = true_prior(replay)
    pick = LoneSampler(replay, prior).choose_within()
    assert pick.stage == "calibrate"
    index = replay.space.index(pick.candidate.setting)
    assert prior.guesses[index].num_bytes < 0.95 * BUDGET
    assert pick.candidate.setting.compile == "default", "which takes 45 s"
    assert LoneSampler(replay, prior).first_setting(120.0).compile == "off"
    guessed = LoneSampler(replay, generic_prior(replay.space, GPU)).first_setting()
    assert guessed.compile == "off"
    assert guessed.batch_size <= 8


def test_where_time_is_guessed_no_checkpointing_is_probed_while_all_fits() -> None:
    """What it costs is guessed too loosely to leave it out for that: half of the probes were it."""
    replay = Replay([r for r in TABLE if r.setting.batch_size <= 64])
    search, _ = search_table(replay, generic_prior(replay.space, GPU), 1000 * BUDGET)
    assert {r.setting.checkpointing for r in search.records} == {"none"}


def test_checkpointing_is_not_probed_where_the_same_without_it_fits() -> None:
    replay = Replay(TABLE)
    search, _ = search_table(replay, true_prior(replay), BUDGET)
    for index, records in search.sampler.posterior.records.items():
        if records[0].setting.checkpointing != "none":
            twin = records[0].setting.model_copy(update={"checkpointing": "none"})
            assert true_bytes(twin) > 0.9 * BUDGET, replay.space.candidates[index]


def test_checkpointing_is_probed_where_the_same_without_it_fails() -> None:
    replay = Replay([r for r in TABLE if r.setting.batch_size <= 64])  # all of which would fit
    sampler = LoneSampler(replay, true_prior(replay))
    sampler.search(
        ended=lambda _, record: (
            failed(record, "non_finite") if record.setting.checkpointing == "none" else record
        )
    )
    rates = replay.rates(BUDGET)
    checkpointed = (c for c in replay.space.candidates if c.setting.checkpointing != "none")
    best = max(rates[c.id] for c in checkpointed if c.id in rates)
    assert sampler.posterior.best()[1] >= 0.98 * best


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 2.0), st.floats(0.7, 1.4))
def test_no_setting_is_probed_twice_and_all_laws_hold(
    seed: int, seconds: float, num_bytes: float
) -> None:
    """Whatever the table says: it ends, repeats nothing, and after an out-of-memory tries nothing
    as large in the same arm."""
    replay = Replay(invented_table(wobble=0.05 * (seed % 5)))
    sampler = LoneSampler(replay, true_prior(replay, seconds, num_bytes))
    limits: dict[str, int] = {}

    def heard(before: list[TrainSetting], record: MeasurementRecord) -> MeasurementRecord:
        arm, batch = candidate(record.setting).arm, record.setting.batch_size
        assert record.setting not in before
        assert batch < limits.get(arm, 10**9)
        if record.status == "out_of_memory":
            limits[arm] = batch
        return record

    sampler.search(ended=heard)
    assert sampler.stopped_because


def test_no_probe_is_begun_that_the_budget_would_cut() -> None:
    replay = Replay(TABLE)
    sampler = LoneSampler(replay, true_prior(replay))
    assert sampler.choose_within(1.0) is None
    assert "budget" in sampler.stopped_because


def test_a_gain_that_the_budget_does_not_allow_is_said() -> None:
    replay = Replay(TABLE)
    sampler = LoneSampler(replay, true_prior(replay))
    while (pick := sampler.choose_within(30.0)) is not None:
        assert pick.candidate.setting.compile == "off", "compiling takes 45 s"
        sampler.posterior.tell(pick.candidate, replay.probe(pick.candidate))
    assert sampler.stopped_because == "what could gain more takes longer than the budget has left"


def test_one_compilation_says_what_the_other_modes_cost() -> None:
    costs = ProbeCosts(make_space(MODEL, GPU, batch_sizes=(8,)), guess_compile_seconds("cuda", 12))

    def seconds(mode: str) -> float:
        return costs.compile_seconds(compilation_of(compiled(mode)))

    before = {mode: seconds(mode) for mode in ("default", "max-autotune")}
    ratio = seconds("reduce-overhead") / before["default"]
    costs.observe(compile_record(compiled("default"), 100.0))
    assert seconds("default") == 100.0
    assert seconds("reduce-overhead") == pytest.approx(100.0 * ratio)
    # Autotuning passes on the device: a slow host says nothing of it.
    tuning = before["max-autotune"] - before["default"]
    assert seconds("max-autotune") == pytest.approx(100.0 + tuning)
    assert seconds("off") == 0.0


@pytest.mark.parametrize("seconds", [300.0, 150.0])
def test_another_precision_is_looked_at_once_and_eagerly(seconds: float) -> None:
    """However little of the time a compilation would leave after it."""
    replay = Replay(TABLE)
    first, second, *later = LoneSampler(replay, true_prior(replay), tolerance=0.0).search(seconds)
    assert (first.precision, second.precision, second.compile) == ("bf16", "fp32", "off")
    assert all(s.precision == "bf16" for s in later)
    probed = LoneSampler(replay, true_prior(replay), tolerance=0.0).search(
        seconds, lambda _, r: failed(r) if r.setting.precision == "fp32" else r
    )
    assert sum(s.precision == "fp32" for s in probed) == MAX_FAILURES


def slower_bf16(times: float) -> Ended:
    return lambda _, r: slowed(r, "", times) if r.setting.precision == "bf16" else r


def test_each_attention_is_looked_at_eagerly_in_each_precision_that_is_fast() -> None:
    """bf16 is hardly faster than fp32, in which sdpa should be slow, and is not."""
    replay = Replay(invented_table(0.0, {**SMALL, "attention": ("eager", "sdpa")}))
    slow = ("fp32", "sdpa")
    prior = true_prior(replay, share=lambda s: 2.0 if (s.precision, s.attention) == slow else 1.0)
    looks = LoneSampler(replay, prior).search(600.0, slower_bf16(2.2))[1:5]
    assert len({(s.precision, s.attention) for s in looks if s.compile == "off"}) == 4


def test_the_plain_default_is_measured_at_its_best_batch_where_the_search_has_ended() -> None:
    """Its time is kept until then. A gain over another batch would be told too high."""
    replay = Replay(TABLE)
    search, _ = search_table(replay, true_prior(replay), BUDGET, budget_seconds=1000.0)
    rates = replay.rates(BUDGET)
    ladder = [c for c, of in zip(replay.space.candidates, search.sampler.plain, strict=True) if of]
    best = max(ladder, key=lambda c: rates.get(c.id, 0.0))
    assert best.setting in [r.setting for r in search.records]
    assert search.sampler.plain_is_at_its_best
    short, _ = search_table(replay, true_prior(replay), BUDGET, budget_seconds=20.0)
    assert not short.sampler.plain_is_at_its_best, "there was no time for it"


def expecting(share: float, *modes: str, precision: str = "") -> tuple[LoneSampler, np.ndarray]:
    """Among `modes`, of steps of the last (in a precision) that share of their seconds; and which
    settings those are."""
    replay = Replay(invented_table(0.0, {**SMALL, "compile": modes}))

    def is_one(s: TrainSetting) -> bool:
        return s.compile == modes[-1] and precision in ("", s.precision)

    prior = true_prior(replay, share=lambda s: share if is_one(s) else 1.0)
    those = np.array([is_one(c.setting) for c in replay.space.candidates])
    return LoneSampler(replay, prior, tolerance=0.0), those


def test_one_unlucky_probe_closes_no_branch_that_should_be_much_better() -> None:
    """It is tried once more, smaller: the one probe of a mode had crashed, and the mode was nearly
    twice as fast."""

    def unlucky(before: list[TrainSetting], record: MeasurementRecord) -> MeasurementRecord:
        modes = [s.compile for s in (*before, record.setting)]
        is_first = modes[-1] == "max-autotune" and modes.count("max-autotune") == 1
        return failed(record) if is_first else record

    probed = expecting(1 / 1.8, *ALL_MODES)[0].search(3000.0, unlucky)
    first, second, *_ = (s for s in probed if s.compile == "max-autotune")
    assert second.batch_size <= first.batch_size / 2


def test_the_precision_of_the_fastest_eager_setting_is_compiled_too() -> None:
    """However little that should gain: bf16 is emulated, and only it was compiled."""
    sampler, _ = expecting(2.0, "off", "default", precision="fp32")
    sampler.tolerance = 0.01
    probed = sampler.search(3000.0, slower_bf16(4.0))
    assert "default" in [s.compile for s in probed if s.precision == "fp32"]


def test_what_promises_far_more_is_probed_while_there_is_time_for_it() -> None:
    """An eager step would gain a little more per second, and compiling ten times as much."""
    sampler, compiled = expecting(1.1, "off", "default")
    pick = sampler.choose_within(60.0)
    sampler.posterior.tell(pick.candidate, sampler.replay.probe(pick.candidate))
    price = sampler.posterior.probe_seconds(sampler.posterior.predict())[compiled].min()
    modes = [sampler.first_setting(price + more).compile for more in (200.0, 20.0)]
    assert modes == ["off", "default"]


def test_a_graph_that_was_compiled_costs_little_again() -> None:
    """Whatever its optimizer; at another batch it is another."""
    static = compiled("default")
    larger = static.model_copy(update={"batch_size": 16})
    space = space_of([static, static.model_copy(update={"optimizer": "adamw-fused"}), larger])
    costs = ProbeCosts(space, guess_compile_seconds("cuda", 12))
    costs.observe(compile_record(static, 100.0))
    seconds = costs.probing(np.zeros(len(space)))
    dear = [c.setting for c, s in zip(space.candidates, seconds, strict=True) if s > 90]
    assert dear == [larger]


def test_a_warm_compilation_says_nothing_of_a_first_one() -> None:
    setting, larger = compiled("default"), compiled("default", batch_size=16)
    costs = ProbeCosts(space_of([setting]), guess_compile_seconds("cuda", 12))
    before = costs.compile_seconds(compilation_of(setting))
    costs.observe(compile_record(setting, 5.0).model_copy(update={"flags": (FROM_CACHE,)}))
    assert costs.compile_seconds(compilation_of(setting)) == before
    for seconds in (100.0, 5.0):
        costs.observe(compile_record(larger, seconds))
    assert costs.compile_seconds(compilation_of(setting)) == 100.0


def test_a_probe_that_was_stopped_early_makes_no_other_short() -> None:
    setting = TrainSetting(batch_size=8)
    costs = ProbeCosts(space_of([setting]), guess_compile_seconds("cuda", 12))
    flags = (f"{STOPPED_EARLY} at best 1 a second",)
    found = []
    for samples, seconds, told in (((1.0,) * 4, 10.0, ()), ((0.1,) * 3, 6.3, flags)):
        probed = {"step_seconds": samples, "probe_seconds": seconds, "flags": told}
        costs.observe(make_record(setting).model_copy(update=probed))
        found.append(float(costs.probing(np.zeros(1))[0]))
    assert found[0] == pytest.approx(found[1])


def compiled(mode: str, **fields: object) -> TrainSetting:
    return TrainSetting.model_validate({"batch_size": 8, "compile": mode, **fields})


def compile_record(setting: TrainSetting, seconds: float) -> MeasurementRecord:
    return make_record(setting).model_copy(update={"compile_seconds": seconds})


STALE = Expected(stage="search", basis="probes", images_per_second=(1.0, 2.0, 3.0))
REPLAY = Replay([r.model_copy(update={"expected": STALE}) for r in invented_table()])


def test_it_stamps_what_this_search_expected_and_not_what_another_did() -> None:
    """Over a table whose own records hold another's expectation."""
    prior = true_prior(REPLAY, seconds=1.3, num_bytes=1.05)
    records = search_table(REPLAY, prior, BUDGET, trials=12)[0].records
    assert len(records) >= 3
    assert all(r.expected is not None and r.expected != STALE for r in records)
    first, *others = (r.expected for r in records if r.expected)
    assert (first.stage, first.basis) == ("calibrate", "prior")
    assert {e.basis for e in others} == {"probes"}
    assert {e.stage for e in others} <= {"search", "repeat", "baseline"}
    for expected in (first, *others):
        for low, middle, high in (expected.images_per_second, expected.used_bytes):
            assert low < middle < high
        assert 0 <= expected.fits <= 1
    # The prior is 30% too slow: after one probe the search knows.
    ran = [r for r in records if r.status == "measured"]
    shares = [r.expected.images_per_second[1] / r.images_per_second for r in (ran[0], ran[-1])]
    assert shares == [pytest.approx(1 / 1.3, rel=0.05), pytest.approx(1, rel=0.05)]
