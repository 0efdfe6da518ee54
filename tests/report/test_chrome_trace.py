"""A predicted step as a Chrome trace, read back: its sums are the estimate's, its form is valid."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.core.errors import PlannerError, UsageError
from planner.report.chrome_trace import write_trace

TINY: dict[str, Any] = {
    "image_size": 56, "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32, "num_classes": 10,
    "batch_size": 16,
}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {"accumulate": 2, "precision": "fp16"},
    {"compile": "default"},
    {"parallelism": "fsdp", "world_size": 4},
]
NANOSECOND = 1e-9


def made(**overrides: Any) -> tuple[list[dict[str, Any]], planner.Estimate]:
    given = {"gpu": "rtx 3090", **TINY, **overrides}
    trace = json.loads(json.dumps(planner.chrome_trace("native:swin_tiny", **given)))
    return trace["traceEvents"], planner.estimate("native:swin_tiny", **given)


def spans(events: list[dict[str, Any]], track: str, category: str = "") -> list[dict[str, Any]]:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [
        e for e in events
        if e["ph"] == "X" and names[e["tid"]] == track and category in ("", e["cat"])
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", SETTINGS)
def test_phases_last_what_the_estimate_says(overrides: dict[str, Any]) -> None:
    events, found = made(**overrides)
    assert found.throughput is not None
    seconds: dict[str, float] = {}
    for phase in spans(events, "device", "phase"):
        seconds[phase["name"]] = seconds.get(phase["name"], 0.0) + phase["dur"] * 1e-6
    within = 2 * NANOSECOND * len(events)
    assert seconds == pytest.approx(found.throughput.phase_seconds, abs=within)
    inside: dict[str, float] = {}
    for span in spans(events, "device"):
        if span["cat"] != "phase":
            kind = span["args"]["kind"]
            inside[kind] = inside.get(kind, 0.0) + span["dur"] * 1e-6
    expected = {k: s for k, s in found.throughput.kind_seconds.items() if s}
    assert {k: s for k, s in inside.items() if s} == pytest.approx(expected, abs=within)


@pytest.mark.parametrize("overrides", SETTINGS)
def test_spans_of_a_track_nest_and_never_overlap(overrides: dict[str, Any]) -> None:
    events, _ = made(**overrides)
    for event in events:
        assert event["ph"] in {"X", "M"}
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["pid"] == 1
    for track in ("device", "host"):
        for category in ("phase", ""):
            found = [e for e in spans(events, track, category) if category or e["cat"] != "phase"]
            ends = [(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in found]
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_collectives_have_a_track_of_their_own() -> None:
    events, _ = made(parallelism="ddp", world_size=4, batch_size=64)
    sent = spans(events, "link between devices", "collective")
    assert {e["name"] for e in sent} == {"all_reduce", "broadcast"}  # gradients, buffers
    # DDP's buckets hold the gradients of all parameters, in fp32.
    found = planner.estimate("native:swin_tiny", gpu="rtx 3090", **TINY)
    reduced = sum(e["args"]["bytes"] for e in sent if e["name"] == "all_reduce")
    assert reduced == 4 * found.num_parameters
    assert "link between devices" not in {e["args"].get("name") for e in made()[0]}


def test_a_trace_is_written_plain_or_packed(tmp_path: Path) -> None:
    trace = planner.chrome_trace("native:swin_tiny", gpu="rtx 3090", **TINY)
    plain, packed = (write_trace(trace, tmp_path / name) for name in ("a.json", "a.json.gz"))
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(packed.read_bytes()))


def test_a_trace_needs_a_device_and_a_name(tmp_path: Path) -> None:
    none: Any = None
    with pytest.raises(UsageError, match="needs a device"):
        planner.chrome_trace("native:swin_tiny", gpu=none)
    with pytest.raises(UsageError, match=r"ends in .json or .json.gz"):
        write_trace({}, tmp_path / "a.txt")
    with pytest.raises(PlannerError, match="does not exist"):
        write_trace({}, tmp_path / "nowhere" / "a.json")
