"""A matrix measured and resumed, and what records say of the estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.core.schema import TrainSetting
from planner.core.schema.record import BUDGET_ENDED
from search.loop.records import append_records
from tests.truth.matrix import Group, Row, expand
from tests.truth.measurements import H200, TINY, record_of
from tests.truth.record import measure, remaining_rows


def test_a_group_is_every_combination_that_its_library_can_do() -> None:
    group = Group(
        name="g",
        models=["native:swin_tiny", "torchvision:swin_t"],
        grid={"attention": ["eager", "sdpa"], "batch_size": [1, 2]},
    )
    rows = expand([group, group])
    # torchvision has no fused attention; naming a row twice does not measure it twice
    assert [(r.model.title, r.setting.attention, r.setting.batch_size) for r in rows] == [
        ("native:swin_tiny", "eager", 1), ("native:swin_tiny", "eager", 2),
        ("native:swin_tiny", "sdpa", 1), ("native:swin_tiny", "sdpa", 2),
        ("torchvision:swin_t", "eager", 1), ("torchvision:swin_t", "eager", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "is_done"),
    [
        ([{"status": "measured"}], True),
        ([{"status": "out_of_memory"}], True),
        # others held the device, or came to it: it may fit once they are gone
        ([{"status": "out_of_memory", "free_bytes": H200.total_bytes // 2}], False),
        ([{"status": "out_of_memory", "free_bytes": 1, "taken_bytes": 10**10}] * 3, False),
        ([{"status": "out_of_memory", "free_bytes": H200.total_bytes}], True),
        ([{"status": "timed_out", "flags": (BUDGET_ENDED,)}], False),
        # its own deadline, or a crash: once is no proof, twice is
        ([{"status": "timed_out"}], False),
        ([{"status": "crashed"}], False),
        ([{"status": "crashed"}, {"status": "timed_out"}], True),
    ],
)
def test_a_row_is_done_when_a_record_says_something_of_its_setting(
    found: list[dict[str, object]], is_done: bool
) -> None:
    row = Row("g", TINY, TrainSetting(), repeat=0, measure_seconds=1.0)
    records = [record_of(row.setting, **fields) for fields in found]
    assert (remaining_rows([row], records) == []) is is_done


def test_a_damaged_file_is_reported_and_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    append_records(file, [record_of(TrainSetting())])
    file.write_bytes(file.read_bytes() + b"{nonsense}\n" + file.read_bytes())
    before = file.read_bytes()
    with pytest.raises(PlannerError, match="line 2"):
        measure([], "cpu", file)
    assert file.read_bytes() == before
