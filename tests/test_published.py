"""The estimate is held to what others measured and published: tests/truth/public.jsonl.

Memory to every row of torch 2; rates to the quarter of the rows that never entered the fit. Rows
that miss a condition, or ran another torch, are listed by `python -m tests.truth.published` and
prove nothing here.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest

from planner.core.schema import TrainSetting
from planner.throughput import rates
from planner.throughput.result import MIN_RATIO
from tests.benchmarks import fit_rates, model_rates
from tests.benchmarks.fit_rates import COMMITTED
from tests.steps import needs
from tests.truth.compare import accuracy_of
from tests.truth.published import (
    PublishedRow,
    compare_published,
    predicted_rate,
    read_published,
    show_models,
    show_published,
)

DOCS = Path(__file__).parent / "truth/TABLES.md"


def test_each_row_says_where_it_stands_and_what_was_assumed() -> None:
    assert len({r.id for r in read_published()}) == len(read_published())
    for r in read_published():
        assert re.search(r"@[0-9a-f]{7} |pull request \d+", r.source), r.id
        assert r.quoted, r.id
        assert r.assumed, r.id
        assert isinstance(r.resolved[1], TrainSetting)
        measured = (r.allocated_mib, r.reserved_gb, r.device_gib, r.images_per_second)
        assert r.figures or any(figure is not None for figure in measured), r.id


@pytest.mark.truth
@needs("timm", "torchvision", "transformers")
def test_memory_is_within_half_a_percent_of_every_row_of_torch_2() -> None:
    held = [p for p in compare_published() if p.row.why_memory_is_only_listed is None]
    errors = accuracy_of([p.memory_error for p in held if p.memory_error is not None])
    assert errors is not None
    assert errors.count == len(held) >= 17
    assert errors.median <= 0.005
    assert errors.worst <= 0.015


@pytest.mark.truth
@needs("timm")
@pytest.mark.parametrize("spans", [("forward", "forward+backward", "step"),
                                   ("forward+backward", "step")])  # fmt: skip
def test_rates_of_the_rows_held_out_of_the_fit(spans: tuple[str, ...]) -> None:
    held_out = [
        p for p in compare_published()
        if p.row.why_time_is_only_listed is None and p.row.is_held_out and p.row.span in spans
    ]  # fmt: skip
    errors = accuracy_of([p.time_error for p in held_out if p.time_error is not None])
    assert errors is not None
    assert errors.count == len(held_out) >= 9
    assert errors.median <= 0.07
    assert errors.worst <= 0.15


def test_a_quarter_is_held_out_by_what_was_measured_not_by_what_came_of_it() -> None:
    judged = [r for r in read_published() if not r.is_traced and r.why_time_is_only_listed is None]
    held_out = [r for r in judged if r.is_held_out]
    assert 0.2 < len(held_out) / len(judged) < 0.4
    for r in judged:
        other = r.model_copy(update={"images_per_second": 1.0, "id": "x", "assumed": []})
        assert other.is_held_out == r.is_held_out


@pytest.mark.truth
@needs("timm")
def test_a_cards_uncertainty_is_the_worst_of_its_rows_and_only_of_those_that_train() -> None:
    worst: dict[str, float] = {}
    trains: set[str] = set()
    for p in compare_published():
        if p.row.why_time_is_only_listed is None and p.time_error is not None:
            assert p.row.gpu is not None
            worst[p.row.gpu] = max(worst.get(p.row.gpu, 0.0), abs(p.time_error))
            if p.row.span != "forward":
                trains.add(p.row.gpu)
    for timed, error in fit_rates.errors(fit_rates.measured_rows()):
        worst[timed.gpu.name] = max(worst.get(timed.gpu.name, 0.0), abs(error))
        trains.add(timed.gpu.name)
    supported = {gpu: math.ceil(worst[gpu] * 20) / 20 for gpu in trains}
    assert dict(rates.MEASURED_CARDS) == pytest.approx(supported)


@pytest.mark.release
@needs("timm", "scipy")
def test_the_committed_shares_meet_the_rows_nearly_as_well_as_the_best() -> None:
    """Within 3% of the least loss: rows are too few to tell such shares apart."""
    rows = [t for t in fit_rates.timed_rows() + fit_rates.measured_rows() if not t.is_held_out]
    assert fit_rates.loss(rows, COMMITTED) < 1.03 * fit_rates.loss(rows, fit_rates.fit(rows))


@pytest.mark.truth
@needs("timm", "torchvision", "transformers")
@pytest.mark.parametrize(
    ("options", "show"),
    [("", show_published), pytest.param(" --models", show_models, marks=pytest.mark.release)],
)
def test_the_docs_show_what_the_command_prints(options: str, show: Callable[[], str]) -> None:
    shown = DOCS.read_text(encoding="utf-8").split(
        f"<!-- python -m tests.truth.published{options} -->\n```\n"
    )[1]
    assert shown.split("\n```\n")[0].strip() == show()


@needs("timm")
@pytest.mark.release
@pytest.mark.parametrize(
    ("model", "is_fitted"),
    [("timm:resnet18", True), ("timm:vit_small_patch16_224", True), ("timm:resnet50", False),
     ("timm:resnet34", False), ("timm:regnetx_008", False)],
)  # fmt: skip
def test_rates_of_other_models_are_within_what_is_said_of_them(model: str, is_fitted: bool) -> None:
    """Of kinds in no fit too: channels last and in fp32, on an RTX 3090, an A100 and V100s; all
    rows, not nine of ten (`python -m tests.benchmarks.model_rates`)."""
    found = [r for r in model_rates.rows() if r.model == model and is_fitted >= r.is_fitted_kind]
    assert found
    assert not is_fitted or {row.span for row in found} == {"step", "forward"}
    assert all(row.is_within for row in found)


@pytest.mark.truth
@needs("timm")
def test_a_step_of_another_model_is_within_what_is_said_of_it_on_an_h200() -> None:
    """Of all models: `python -m tests.benchmarks.model_rates`."""
    found = list(model_rates.measured_steps("h200", "timm:mobilenetv3_large_100"))
    assert len(found) == 1
    assert all(abs(error) <= said / 2 for _, error, said, _ in found)


@needs("torchvision")
@pytest.mark.release
def test_memory_of_other_models_is_within_a_fifth_of_a_percent() -> None:
    found = [p for p in compare_published(recorded=True) if p.row.unmodelled is None]
    errors = [p.reserved_error if p.memory_error is None else p.memory_error for p in found]
    assert len(found) == 26
    assert all(error is not None and abs(error) < 0.002 for error in errors)
    rates = accuracy_of([p.judged_time_error for p in found if p.judged_time_error is not None])
    assert rates is not None
    assert rates.median < 0.08
    assert rates.worst < 0.15


# How far each rate is off is held above; that rates are in the order that others timed, below.

CARDS = (
    *(pytest.param(card, marks=pytest.mark.truth) for card in ("a100-sxm-80gb", "rtx-3090")),
    "rtx-4090", "rtx-5090",
)  # fmt: skip


@cache
def rows() -> dict[str, PublishedRow]:
    return {row.id: row for row in read_published() if not row.is_traced}


@cache
def predicted(row_id: str) -> float:
    return predicted_rate(rows()[row_id])


@needs("timm")
@pytest.mark.parametrize("card", CARDS)
def test_what_is_faster_by_a_tenth_is_predicted_to_be_faster(card: str) -> None:
    timed = [r for r in rows().values() if r.gpu == card and r.why_time_is_only_listed is None]
    pairs = [(a, b) for a, b in permutations(timed, 2) if a.span == b.span]
    faster = [
        (a.id, b.id) for a, b in pairs if a.images_per_second > MIN_RATIO * b.images_per_second
    ]
    assert len(faster) > 10
    wrong = [(a, b) for a, b in faster if predicted(a) <= predicted(b)]
    assert not wrong


@needs("timm")
def test_what_16_bits_gain_on_an_a100_is_predicted() -> None:
    """Swin-T 2.70, Swin-S 3.06, Swin-B 3.69 times fp32, forward and backward, at batch 128."""
    for size in ("tiny", "small", "base"):
        half, full = (f"vmamba-{size}-{p}-forward-backward" for p in ("fp16", "fp32"))
        gained = rows()[half].images_per_second / rows()[full].images_per_second
        assert predicted(half) / predicted(full) == pytest.approx(gained, rel=0.1)
