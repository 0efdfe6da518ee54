"""How long a probe may take before it is taken for hung."""

from __future__ import annotations

from planner.schema import TrainSetting
from search.limits import Limits, probe_deadline
from search.session import Session
from search.space import Candidate, make_space
from search.strategies.strategy import Choice
from search.strategies.walks import ListStrategy
from search.study.study import MemoryStudy
from search.surrogate.prior import KernelScales, Prior
from search.surrogate.probe_cost import EIGHT_BIT_SECONDS
from tests.search.tables import GPU, MODEL, SMALL, make_record


def test_an_8bit_optimizer_may_compile_where_nothing_else_does() -> None:
    kernel = KernelScales.__new__(KernelScales)  # no scale is read here
    deadline = probe_deadline(Prior((), kernel, kernel, "a guess"))

    def seconds(optimizer: str) -> float:
        return deadline(Choice(Candidate("a", TrainSetting(optimizer=optimizer), "arm")))

    assert seconds("adamw-8bit") - seconds("adamw") == 5 * EIGHT_BIT_SECONDS


def test_a_budget_counts_what_others_probe_once() -> None:
    limits = Limits(budget_seconds=60.0, clock=lambda: 0.0)
    record = make_record(TrainSetting(), probe_id="theirs").model_copy(
        update={"probe_seconds": 20.0}
    )
    limits.charge([record])
    limits.charge([record])
    assert limits.seconds_left() == 40.0


def test_a_session_charges_what_it_hears_of_and_not_its_own() -> None:
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8,))
    study: MemoryStudy = MemoryStudy()
    limits = Limits(trials=2, budget_seconds=60.0, clock=lambda: 0.0)
    session = Session(
        space, study, lambda choice, *_: make_record(choice.candidate.setting), limits,
        lambda choice: 60.0, None,
    )  # fmt: skip
    theirs = make_record(space.candidates[0].setting, probe_id="theirs")
    study.kept.append(theirs)
    session.run(ListStrategy(space.candidates))
    assert len(session.records) == 2
    assert limits.spent_seconds == theirs.probe_seconds
