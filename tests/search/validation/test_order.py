"""The order of a matrix's rows: what teaches most per second first, whoever is held out."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from pydantic import create_model

from planner.estimation import estimate
from planner.schema import SwinConfig, TrainSetting
from search.validation.matrix import (
    HELD_OUT_ONE_IN,
    Group,
    Row,
    drawn_key,
    expand,
    is_held_out,
)
from search.validation.order import (
    NEW_IN_LIBRARY,
    NEW_SETTING,
    NEW_VALUE,
    REPEAT,
    facets,
    guess_seconds,
    lessons,
    order_rows,
    step_flops,
    worth,
)
from search.validation.reading import read_matrix
from tests.search.validation.measurements import record_of

TRUTH = Path(__file__).parents[2] / "truth"
FILES = sorted(TRUTH.glob("*.yaml"))
LARGE = [file for file in FILES if file.stem != "first"]


def rows_of(**fields: object) -> list[Row]:
    return expand([Group.model_validate({"name": "g", "models": ["native:swin_tiny"], **fields})])


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_order_of_the_files_is_the_rule(file: Path) -> None:
    """No row that comes later would have taught more per second at any place."""
    rows = read_matrix(file).rows
    known: set[tuple[str, object]] = set()
    for at, row in enumerate(rows):
        chosen = worth(lessons(row), known) / guess_seconds(row)
        for later in rows[at + 1 :]:
            assert worth(lessons(later), known) / guess_seconds(later) <= chosen * (1 + 1e-9)
        known |= lessons(row).keys()


@pytest.mark.parametrize("file", LARGE, ids=lambda path: path.stem)
def test_every_kind_of_row_comes_early(file: Path) -> None:
    """All values of all facets are met in the first two thirds of the guessed time (autotuning,
    which takes a third of its file, in the last)."""
    rows = read_matrix(file).rows
    wanted = {value for row in rows for value in facets(row).items()}
    spent, known = 0.0, set()
    for row in rows:
        known |= set(facets(row).items())
        spent += guess_seconds(row)
        if known == wanted:
            break
    assert spent <= sum(map(guess_seconds, rows)) * 2 / 3


def test_a_new_value_comes_before_a_new_batch_and_a_repeat_last() -> None:
    rows = rows_of(grid={"precision": ["bf16", "fp32"], "batch_size": [64, 65]}, repeats=2)
    ordered = order_rows(rows, lambda row: 1.0)
    assert Counter(r.key for r in ordered) == Counter(r.key for r in rows)
    assert [r.repeat for r in ordered] == [0] * 4 + [1] * 4
    assert {r.setting.precision for r in ordered[:2]} == {"bf16", "fp32"}
    assert ordered[0] == rows[0]  # of equals the first that was written


def test_what_takes_long_must_teach_more() -> None:
    rows = rows_of(grid={"compile": ["off", "default"], "batch_size": [64, 256]})
    ordered = order_rows(rows)
    assert [r.setting.compile for r in ordered[:2]] == ["off", "off"]
    same = order_rows(rows, lambda row: 1.0)
    assert {r.setting.compile for r in same[:2]} == {"off", "default"}


def test_the_worth_of_a_row_is_the_sum_of_what_is_new_in_it() -> None:
    first, second = rows_of(grid={"precision": ["bf16", "fp32"]})
    count = len(facets(first))
    assert worth(lessons(first), set()) == pytest.approx(
        REPEAT + NEW_SETTING + count * NEW_VALUE + (count - 1) * NEW_IN_LIBRARY
    )
    known = set(lessons(first))
    assert worth(lessons(second), known) == REPEAT + NEW_SETTING + NEW_VALUE + NEW_IN_LIBRARY
    assert worth(lessons(first), known) == REPEAT


@pytest.mark.parametrize(
    "model", ["native:swin_tiny", "timm:swin_base_patch4_window7_224", "native:swin_base_384"]
)
def test_guessed_flops_are_near_those_of_the_recorded_step(model: str) -> None:
    """The guess is of matmuls only: it may not be far from the time of an estimate by kind."""
    found = estimate(model, batch_size=64, precision="bf16", gpu="a100-sxm-80gb")
    assert isinstance(found.model, SwinConfig)
    assert found.throughput is not None
    guessed = step_flops(found.model, found.setting) / 8.0e13
    assert 1 / 3 < guessed / found.throughput.step_seconds < 3


def test_the_held_out_quarter_is_the_one_that_was_drawn() -> None:
    """Drawn before anything was measured (2026-11-20): the order moves no row across."""
    rows = [row for file in LARGE for row in read_matrix(file).rows]
    keys = {drawn_key(r.model, r.setting): record_of(r.setting, model=r.model) for r in rows}
    held = sorted(key for key, record in keys.items() if is_held_out(record))
    assert len(rows) == 506
    assert len(held) == 92
    assert abs(len(held) / len(keys) - 1 / HELD_OUT_ONE_IN) < 0.05
    digest = hashlib.sha256("\n".join(held).encode()).hexdigest()
    assert digest.startswith("d7323e94e8c5d596")


def test_a_field_that_came_later_moves_no_row_across() -> None:
    later = create_model("Later", __base__=TrainSetting, invented=(int, 0))
    setting = TrainSetting(batch_size=3)
    model = rows_of()[0].model
    same = later.model_validate(setting.model_dump())
    assert drawn_key(model, same) == drawn_key(model, setting)
    other = later.model_validate({**setting.model_dump(), "invented": 1})
    assert drawn_key(model, other) != drawn_key(model, setting)
