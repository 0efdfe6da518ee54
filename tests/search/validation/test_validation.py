"""`planner validate`: rows, resumption, and what records say of the estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from planner.cli import main
from planner.core.errors import PlannerError, UsageError
from planner.core.schema import DeviceInfo, MeasurementRecord, TrainSetting
from planner.core.schema.record import BUDGET_ENDED
from planner.core.schema.world import RankRecord
from search.loop.study.records import append_records, read_records
from search.probe.parent.fork_server import ForkServer
from search.tuning.validation.compare import (
    accuracy,
    compare,
    estimate_of,
    rank_correlation,
)
from search.tuning.validation.matrix import Group, Row, expand, order_rows, read_matrix
from search.tuning.validation.run import (
    LEAST_COMPILED_SECONDS,
    LEAST_SECONDS,
    measure,
    remaining_rows,
)
from tests.search.validation.measurements import H200, TINY, exact_record, record_of

TRUTH = Path(__file__).parents[2] / "truth"


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


@pytest.mark.parametrize("file", sorted(TRUTH.glob("*.yaml")), ids=lambda p: p.name)
def test_the_kept_matrices_can_be_read(file: Path) -> None:
    assert len(read_matrix(file)) >= 8


def test_a_matrix_with_faults_names_them(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("groups:\n  - {name: a, model: [x], repeats: 0}\n")
    with pytest.raises(UsageError, match=r"3 faults") as caught:
        read_matrix(file)
    assert "models" in str(caught.value)
    assert "repeats" in str(caught.value)


def test_what_is_new_comes_first_and_a_repeat_last() -> None:
    grid = {"precision": ["bf16", "fp32"], "batch_size": [64, 65]}
    rows = expand([Group(name="g", models=["native:swin_tiny"], repeats=2, grid=grid)])
    ordered = order_rows(rows)
    assert sorted(r.key for r in ordered) == sorted(r.key for r in rows)
    assert [r.repeat for r in ordered] == [0] * 4 + [1] * 4
    found = [(r.setting.precision, r.setting.batch_size) for r in ordered[:2]]
    assert found == [("bf16", 64), ("fp32", 65)]


def test_rows_that_are_recorded_are_not_measured_again() -> None:
    rows = expand([Group(name="g", models=["native:swin_tiny"], repeats=2,
                         grid={"batch_size": [1, 2]})])  # fmt: skip
    once = MeasurementRecord.model_validate(
        {**record_of(rows[0].setting).model_dump(), "model": rows[0].model}
    )
    assert [r.repeat for r in remaining_rows(rows, [once])] == [0, 1, 1]
    assert len(remaining_rows(rows, [once, once])) == 2


OTHERS = "2 other processes on the GPU hold 3.00 GiB"


@pytest.mark.parametrize(
    ("found", "is_done"),
    [
        ([{"status": "measured"}], True),
        ([{"status": "unsupported"}], True),
        ([{"status": "non_finite"}], True),
        ([{"status": "out_of_memory"}], True),
        # others held the device, or came to it: it may fit once they are gone
        ([{"status": "out_of_memory", "free_bytes": H200.total_bytes // 2}], False),
        ([{"status": "out_of_memory", "free_bytes": 1, "taken_bytes": 10**10}] * 3, False),
        ([{"status": "out_of_memory", "free_bytes": H200.total_bytes}], True),
        ([{"status": "timed_out", "flags": (BUDGET_ENDED,)}], False),
        ([{"status": "timed_out", "flags": (BUDGET_ENDED,)}] * 5, False),
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


def row_of(compile_mode: str = "off") -> Row:
    setting = TrainSetting.model_validate({"compile": compile_mode, "precision": "fp32"})
    return Row("g", TINY, setting, repeat=0, measure_seconds=2.0)


@pytest.fixture
def imported(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are forked from the server of all tests: each run would import torch again."""
    monkeypatch.setattr(
        "search.tuning.validation.run.ForkServer", lambda model: nullcontext(fork_server)
    )


def test_a_row_is_not_begun_with_too_little_time_and_the_next_may_be(
    imported: None, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    assert measure([row_of("default")], "cpu", file, budget_seconds=LEAST_COMPILED_SECONDS) == []
    assert measure([row_of()], "cpu", file, budget_seconds=LEAST_SECONDS) == []
    # a compiled row that there is no time for does not keep an eager one from being measured
    rows = [row_of("default"), row_of()]
    found = measure(rows, "cpu", file, budget_seconds=LEAST_COMPILED_SECONDS - 1)
    assert [record.setting.compile for record in found] == ["off"]


def test_a_row_that_the_budget_cuts_is_measured_again(
    imported: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.jsonl"
    monkeypatch.setattr("search.tuning.validation.run.LEAST_SECONDS", 0.0)
    assert [r.cut_short for r in measure([row_of()], "cpu", file, budget_seconds=0.02)] == [True]
    assert read_records(file).records[0].status == "timed_out"
    assert [r.status for r in measure([row_of()], "cpu", file)] == ["measured"]


def test_errors_are_shares_of_what_was_measured() -> None:
    comparisons = compare([exact_record(n) for n in (2, 8, 32, 64)])
    allocated, seconds = accuracy(comparisons, "allocated"), accuracy(comparisons, "step time")
    assert (allocated.count, allocated.median, allocated.worst) == (4, 0.0, 0.0)
    assert seconds.median == pytest.approx(0.5)
    assert rank_correlation(comparisons) == pytest.approx(1.0)
    assert all(p == m for c in comparisons for p, m in c.phases.values())


def test_cuda_graphs_are_compared_by_what_the_device_gives_up() -> None:
    """A replayed graph allocates nothing: torch counts only what lies outside its pool."""
    eager = exact_record(2)
    graphs = eager.model_copy(
        update={"setting": eager.setting.model_copy(update={"compile": "reduce-overhead"})}
    )
    assert set(compare([eager])[0].figures) >= {"allocated", "reserved", "device"}
    found = compare([graphs])[0]
    assert "allocated" not in found.figures
    assert set(found.figures) >= {"reserved", "device"}
    assert found.phases == {}


def test_a_record_is_compared_under_the_allocator_it_was_measured_under() -> None:
    record = exact_record(32)
    expandable = {**record.versions, "allocator_config": "expandable_segments:True"}
    found = compare([record.model_copy(update={"versions": expandable})])[0]
    plain = compare([record])[0].estimate
    assert found.estimate.peak_reserved_bytes != plain.peak_reserved_bytes
    unknown = {**record.versions, "allocator_config": "backend:cudaMallocAsync"}
    assert compare([record.model_copy(update={"versions": unknown})]) == []


def test_only_measured_records_of_a_gpu_are_compared() -> None:
    cpu = record_of(TrainSetting()).model_copy(
        update={"device": DeviceInfo(kind="cpu", name="a CPU", total_bytes=1)}
    )
    failed = record_of(TrainSetting()).model_copy(update={"status": "out_of_memory"})
    assert compare([cpu, failed]) == []


def test_rows_are_measured_for_real_and_a_run_resumes(imported: None, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    config = tmp_path / "tiny.json"
    config.write_text(TINY.model_dump_json())
    rows = expand([Group(name="g", models=[str(config)], measure_seconds=0.2,
                         grid={"batch_size": [1, 2]}, setting={"precision": "fp32"})])  # fmt: skip
    first = measure(rows[:1], "cpu", file)
    assert [r.status for r in first] == ["measured"]
    rest = measure(rows, "cpu", file)
    assert [r.setting.batch_size for r in rest] == [2]
    assert len(read_records(file).records) == 2
    assert measure(rows, "cpu", file) == []


def test_a_damaged_file_is_reported_and_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    append_records(file, [exact_record(2)])
    file.write_bytes(file.read_bytes() + b"{nonsense}\n" + file.read_bytes())
    before = file.read_bytes()
    with pytest.raises(PlannerError, match="line 2"):
        measure([], "cpu", file)
    assert file.read_bytes() == before
    done = subprocess.run(
        [sys.executable, "-m", "planner", "validate", "--replay", str(file), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "line 2" in done.stderr
    assert len(json.loads(done.stdout)) == 1


def test_each_rank_is_compared_with_the_estimate_of_the_worst(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = exact_record(8)
    setting = one.setting.model_copy(update={"world_size": 2, "parallelism": "ddp"})
    fullest = estimate_of(record_of(setting)).peak_reserved_bytes
    ranks = tuple(
        RankRecord(rank=rank, device=f"cuda:{rank}", step_seconds=0.1, peak_reserved_bytes=held)
        for rank, held in enumerate((fullest // 2, fullest))
    )
    record = one.model_copy(
        update={"setting": setting, "peak_reserved_bytes": fullest, "ranks": ranks}
    )
    (found,) = compare([record])
    assert found.error("reserved") == 0
    assert found.ranks[1]["reserved"] == (fullest, fullest)
    assert found.ranks[0]["reserved"][0] / found.ranks[0]["reserved"][1] == pytest.approx(2, 0.01)
    append_records(tmp_path / "world.jsonl", [record], "--record")
    assert main(["validate", "--replay", str(tmp_path / "world.jsonl")]) == 0
    assert "Each rank: measured" in capsys.readouterr().out
