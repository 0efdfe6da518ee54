"""What is recommended: measured, within the budget, the plainest among equals."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import Recommendation
from planner.core.units import GIB
from search.loop.options import read_options
from search.loop.recommendation import Summary, recommend
from search.loop.signals import ENDINGS
from search.loop.space import candidate
from search.loop.study import StudyIdentity
from tests.answers import recommendation_text
from tests.search.tables import GPU, MODEL, failed, make_record, ran

PLAIN = TrainSetting(precision="fp32", batch_size=16, attention="eager")


def at(rate: float, setting: TrainSetting = PLAIN, num_bytes: int = GIB, **update: object
       ) -> MeasurementRecord:  # fmt: skip
    """A measured record with samples within ±0.1% of a rate."""
    seconds = setting.images_per_device_step / rate
    samples = tuple(seconds * (1 + k / 5000) for k in range(-5, 6))
    fields = {"step_seconds": samples, "images_per_second": rate, "device_bytes": num_bytes,
              "peak_allocated_bytes": num_bytes,
              "compile_seconds": 60.0 if setting.compile != "off" else None}  # fmt: skip
    return make_record(setting).model_copy(update={**fields, **update})


def recommended(records: Sequence[MeasurementRecord], **update: object) -> Recommendation:
    fields: dict[str, object] = {
        "identity": StudyIdentity(model=MODEL, device=GPU, versions={}), "budget_bytes": 16 * GIB,
        "asked": PLAIN, "ran": ran(records) if records else (),
        "plain_arm": candidate(PLAIN).arm,
    }  # fmt: skip
    return recommend(records, Summary(**{**fields, **update}))  # type: ignore[arg-type]


def change(**update: object) -> TrainSetting:
    return PLAIN.model_copy(update=update)


def test_the_fastest_wins_and_says_how_much() -> None:
    found = recommended([at(100), at(250, change(precision="bf16"))])
    assert found.setting == change(precision="bf16")
    assert found.gain == pytest.approx(2.5)
    assert found.baseline.setting == PLAIN
    assert [r.setting for r in found.runners_up] == [PLAIN]


def test_the_fastest_is_recommended_and_a_simpler_one_within_noise_is_a_note() -> None:
    compiled = change(compile="default")
    found = recommended([at(100), at(100.5, compiled)])
    assert found.setting == compiled
    (note,) = [n for n in found.notes if "simpler" in n]
    assert note == "compile off is simpler, and measured 0.5% slower, which is within the noise."
    alone = recommended([at(100), at(105, compiled)])
    assert not any("simpler" in n for n in alone.notes)


def test_what_disturbed_the_recommended_comes_first_among_the_notes() -> None:
    best = at(250, change(precision="bf16"), flags=("other programs kept 1 of 2",))
    found = recommended([best, at(100)], notes=("said",))
    assert found.notes[0].startswith("Noted while the recommended was measured: other programs")
    assert found.notes[1] == "said"


def test_a_gain_is_told_over_the_plain_default_at_its_best_batch_or_not_at_all() -> None:
    records = [at(100), at(250, change(precision="bf16"))]
    found = recommended(records, plain_is_at_its_best=False)
    assert found.gain is None
    assert found.baseline is not None
    assert any("measured at batch 16 only" in note for note in found.notes)
    without = recommended(records, plain_arm=None)
    assert (without.gain, without.baseline) == (None, None)
    assert any("excluded" in note for note in without.notes)


def test_a_repeat_from_the_cache_does_not_lower_what_compiling_costs() -> None:
    """Its second probe finds the first's kernels in the compiler's cache, a training elsewhere does
    not."""
    compiled = change(compile="default")
    records = [
        at(105, compiled, compile_seconds=seconds, probe_id=str(seconds))
        for seconds in (100.0, 2.0, 2.0)
    ]
    assert ran(records)[0].compile_seconds == 100


def test_what_exceeds_the_budget_or_failed_once_is_not_recommended() -> None:
    big = at(900, change(batch_size=512), num_bytes=17 * GIB)
    assert recommended([at(100), big]).setting == PLAIN
    assert recommended([at(100), failed(at(1), "out_of_memory")]).status == "nothing_fits"
    crashed = recommended([failed(at(1))], stopped_because="the budget has ended")
    assert "longer --budget" not in recommendation_text(crashed), "more time is no way out"


def test_an_interrupted_search_without_a_probe_is_told_to_go_on() -> None:
    advice = recommended([], stopped_because=ENDINGS[signal.SIGINT]).advice
    assert "run the same command again" in advice
    assert "--budget" not in advice
    assert "--budget" in recommended([], stopped_because="the budget ends").advice


def test_it_is_said_when_compiling_has_paid() -> None:
    """60 s of compiling pay after 60 / (1/100 − 1/120) = 36,000 images."""
    notes = recommended([at(100), at(120, change(compile="default"))]).notes
    assert any("pays after 2250 optimizer steps" in note for note in notes)


def test_a_changed_global_batch_says_what_it_means() -> None:
    found = recommended([at(100, change(batch_size=64))], asked=PLAIN)
    note = next(n for n in found.notes if "learning rate" in n)
    assert "64, not the 16 of your setting" in note
    assert "4 (linear" in note
    assert not any("learning rate" in n for n in recommended([at(100)]).notes)
    (note,) = (n for n in recommended([at(100)], asked=None).notes if "learning rate" in n)
    assert note.startswith("The global batch is 16: scale a learning rate")
    assert "16/B" in note


@pytest.mark.parametrize(
    ("given", "is_one"),
    [({}, False), ({"batch_size": 16}, True), ({"batch_size": (16, 32)}, False),
     ({"global_batch": 64}, True), ({"base": {"batch_size": 8}}, True)],
)  # fmt: skip
def test_a_batch_is_chosen_where_one_is_named(given: dict[str, Any], is_one: bool) -> None:
    assert read_options(given).chose_batch == is_one


def test_nothing_is_said_not_to_fit_where_the_budget_kept_it_from_being_tried() -> None:
    why = "the budget ends before another probe could"
    found = recommended([], stopped_because=why, least_bytes=32 * GIB)
    assert found.advice == "No probe was made: allow more time with --budget."
    advice = recommended([], least_bytes=32 * GIB).advice
    assert advice.startswith("Nothing fits in 16.00 GiB")
    assert "checkpointing" in advice
    assert "the least that any setting needs is about 32.00 GiB" in advice


def test_rows_that_cannot_be_told_apart_are_named() -> None:
    slower = at(100.0, change(checkpointing="blocks"))
    alike = recommended([at(100.5), slower, at(100.2, change(compile="default"))])
    assert "Rows 1, 2 and 3 overlap: take" in recommendation_text(alike)
    far = recommended([at(200), slower])
    assert "Rows" not in recommendation_text(far)
