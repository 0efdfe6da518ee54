"""A predicted training as a snapshot: what is written reads back as what was predicted, and the
functions of torch that read snapshots take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.core.errors import PlannerError, UsageError
from planner.ledger.ledger import Allocated, Freed, Ledger, Marked, Tagged
from planner.memory.allocator_config import parse_allocator_config
from planner.memory.predicted_snapshot import predicted_snapshot
from planner.memory.profile import instant, profile_memory
from planner.memory.snapshot import load_snapshot, replay_snapshot
from planner.report.snapshot import write_snapshot
from planner.watching.explaining.snapshot_reading import read_snapshot

TINY: dict[str, Any] = {
    "image_size": 56, "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32, "num_classes": 10,
    "batch_size": 8,
}  # fmt: skip
WORKSPACE = 8519680
SETTINGS: list[dict[str, Any]] = [
    {},
    {"checkpointing": "blocks", "optimizer": "sgd"},
    {"accumulate": 2, "precision": "fp16", "batch_size": 24},
    {"parallelism": "fsdp", "world_size": 4},  # several streams
]


def ledger_of(**overrides: Any) -> Ledger:
    from planner.estimation.estimate import choose
    from planner.estimation.ledgers import step_ledger

    return step_ledger(*choose("native:swin_tiny", None, None, {**TINY, **overrides}))


@pytest.mark.parametrize("overrides", SETTINGS)
def test_what_is_written_reads_back_as_predicted(overrides: dict[str, Any], tmp_path: Path) -> None:
    ledger = ledger_of(**overrides)
    expected = profile_memory(ledger, WORKSPACE, None)
    path = write_snapshot(predicted_snapshot(ledger, WORKSPACE), tmp_path / "step.pickle")
    result = replay_snapshot(load_snapshot(path))
    assert result.difference == ""
    assert result.peak_allocated_bytes == expected.peak_allocated_bytes
    assert result.peak_reserved_bytes == expected.peak_reserved_bytes
    assert result.reserved_bytes == result.recorded_reserved_bytes
    assert result.held_before_bytes == 0


def test_what_is_alive_at_the_end_is_the_ledgers_by_category() -> None:
    ledger = ledger_of()
    reading = read_snapshot(predicted_snapshot(ledger, 0))
    end = instant(ledger, len(ledger.events) - 1)
    seen = {name.replace(" ", "_"): num_bytes for name, num_bytes in reading.categories.items()}
    assert {c: n for c, n in end.by_category.items() if n} == seen
    assert any(group.where == "build (parameter)" for group in reading.groups)


def test_frames_say_operation_modules_and_phase() -> None:
    trace = predicted_snapshot(ledger_of(), WORKSPACE)["device_traces"][0]
    found = next(
        entry for entry in trace
        if entry["action"] == "alloc" and entry["frames"][0]["filename"].endswith("mlp.fc1")
    )  # fmt: skip
    names = [frame["name"] for frame in found["frames"]]
    assert names[0].startswith("aten.")
    assert names[1:] == [
        "layers.0.blocks.0.mlp.fc1", "layers.0.blocks.0.mlp", "layers.0.blocks.0",
        "layers.0.blocks", "layers.0", "layers", "forward",
    ]  # fmt: skip


def test_expandable_segments_are_mapped_pages() -> None:
    config = parse_allocator_config("expandable_segments:True")
    ledger = ledger_of(batch_size=32, cudnn_benchmark=False)
    snapshot = predicted_snapshot(ledger, WORKSPACE, config)
    expected = profile_memory(ledger, WORKSPACE, config)
    trace = snapshot["device_traces"][0]
    mapped = sum(entry["size"] for entry in trace if entry["action"] == "segment_map")
    assert mapped == sum(segment["total_size"] for segment in snapshot["segments"])
    assert mapped == expected.peak_reserved_bytes
    assert all(segment["is_expandable"] for segment in snapshot["segments"])
    assert snapshot["allocator_settings"]["expandable_segments"] is True


def test_torchs_own_tools_take_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz as viz

    snapshot: Any = planner.memory_snapshot("native:swin_tiny", gpu="rtx 3090", **TINY)
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    summary = viz.segsum(snapshot)  # type: ignore[no-untyped-call]
    assert f"segments: {len(snapshot['segments'])}\n" in summary
    assert f"total_reserved: {viz.Bytes(reserved)}" in summary  # type: ignore[no-untyped-call]
    told = viz.trace(snapshot)  # type: ignore[no-untyped-call]
    assert told.startswith("Device 0 ----")
    assert "cudaMalloc" in told
    flames = viz.memory(snapshot, format_flamegraph=str)  # type: ignore[no-untyped-call]
    assert sum(int(line.rpartition(" ")[2]) for line in flames.splitlines()) == reserved
    assert viz.segments(snapshot, format_flamegraph=str)  # type: ignore[no-untyped-call]
    for page in (
        viz.trace_plot(snapshot),  # type: ignore[no-untyped-call]
        viz.trace_plot(snapshot, plot_segments=True),  # type: ignore[no-untyped-call]
        viz.segment_plot(snapshot),  # type: ignore[no-untyped-call]
        viz.trace_plot(snapshot, filter_freed=True),  # type: ignore[no-untyped-call]
    ):
        assert "MemoryViz.js" in page
    # Without one event of this category MemoryViz.js ends in an error of its own.
    assert "unknown" in {e["category"] for e in snapshot["device_traces"][0]}
    # What was never freed is what is alive at the end.
    left = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    used = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] != "inactive"]
    assert sorted(e["addr"] for e in left) == sorted(b["address"] for b in used)


def test_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    snapshot = {"segments": [], "device_traces": []}
    with pytest.raises(UsageError, match=r"ends in .pickle or .pkl"):
        write_snapshot(snapshot, tmp_path / "a.json")
    with pytest.raises(PlannerError, match="does not exist"):
        write_snapshot(snapshot, tmp_path / "nowhere" / "a.pickle")


def test_what_a_step_takes_over_is_released_in_its_second_turn_too() -> None:
    # The steady step, from the Marked of step 0 on, frees what the step before it left, and leaves
    # as much: 4 MiB that its second turn frees in place of what the first one freed.
    made = [Allocated(1, 64 << 20, "parameter"), Tagged(1, "parameters"), Marked("build", 0)]
    step = [
        [Allocated(2 + n, 4 << 20, "kept"), *([Freed(1 + n)] if n else []), Marked("forward", n)]
        for n in (0, 1)
    ]
    ends = [Marked(phase, 0) for phase in ("backward", "optimizer", "zero_grad")]
    ledger = Ledger((*made, *step[0], *ends, *step[1]), 1, 1)
    snapshot = predicted_snapshot(ledger, 0)
    result = replay_snapshot(snapshot)
    assert result.difference == ""
    assert (result.num_requests, result.num_releases) == (4, 2)
    assert read_snapshot(snapshot).allocated_bytes == (64 + 4) << 20
