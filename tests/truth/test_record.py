"""A matrix measured and resumed; and the quarter of its rows that enters no fit."""

import hashlib
from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.core.schema.record import BUDGET_ENDED
from search.loop.records import append_records
from tests.truth.fit import HELD_OUT_ONE_IN, drawn_key, is_held_out
from tests.truth.matrix import Group, Row, expand, read_matrix
from tests.truth.record import measure, remaining_rows

TINY = SwinConfig(image_size=(28, 28), depths=(1, 1), num_heads=(1, 2), embed_dim=16, num_classes=4)
H200 = DeviceInfo(kind="cuda", name="NVIDIA H200", total_bytes=150_121_545_728)


def record_of(setting: TrainSetting, **found: object) -> MeasurementRecord:
    return MeasurementRecord.model_validate(
        {
            "model": TINY, "setting": setting, "device": H200, "versions": {"torch": "2.11.0"},
            "date": "2026-11-20T00:00:00+00:00", "status": "measured", **found,
        }
    )  # fmt: skip


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


def test_the_held_out_quarter_is_the_one_that_was_drawn() -> None:
    """Drawn before anything was measured (2026-11-20): the order moves no row across. Two rows are
    gone with a checkpointing that is no more, and the Swins of torchvision and transformers were
    drawn anew when they came to be named. A field that comes later must move none either."""
    files = [f for f in Path(__file__).parent.glob("*.yaml") if f.stem != "minutes"]
    rows = [row for file in sorted(files) for row in read_matrix(file)]
    keys = {drawn_key(r.model, r.setting): record_of(r.setting, model=r.model) for r in rows}
    held = sorted(key for key, record in keys.items() if is_held_out(record))
    assert len(rows) == 504
    assert len(held) == 89
    assert abs(len(held) / len(keys) - 1 / HELD_OUT_ONE_IN) < 0.05
    digest = hashlib.sha256("\n".join(held).encode()).hexdigest()
    assert digest.startswith("27494d41c4b57b3b")
