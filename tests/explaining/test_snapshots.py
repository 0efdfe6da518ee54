"""Snapshots of the allocator: histories that the slow allocator made, with stacks put on them."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.core.errors import PlannerError
from planner.core.files import to_json
from planner.programs.explanation import explain
from planner.programs.snapshots import NO_STACK, read_snapshot
from planner.report.programs import explanation_text
from tests.covering import covering
from tests.memory.requests import recorded_history
from tests.trainers.cases import tiny

MIB, GIB = 1024**2, 1024**3
SITE = "/env/lib/python3.11/site-packages"


def frame(filename: str, name: str, line: int = 1) -> dict[str, Any]:
    return {"filename": filename, "name": name, "line": line}


MODULE = frame(f"{SITE}/torch/nn/modules/module.py", "_call_impl")
LOOP = frame("/home/me/train.py", "main", 40)
STACKS = {
    "forward: activations": [
        frame(f"{SITE}/torch/nn/functional.py", "linear"),
        frame(f"{SITE}/timm/models/swin_transformer.py", "forward", 205), MODULE, LOOP,
    ],
    "optimizer state": [frame(f"{SITE}/torch/optim/adamw.py", "_init_group"), LOOP],
    "parameters and buffers": [
        frame(f"{SITE}/torch/nn/modules/module.py", "convert"),
        frame(f"{SITE}/torch/nn/modules/module.py", "_apply"), LOOP,
    ],
    "backward: gradients and temporaries": [
        frame(f"{SITE}/torch/autograd/graph.py", "_engine_run_backward"),
        frame(f"{SITE}/torch/_tensor.py", "backward"), LOOP,
    ],
    "other": [LOOP],
    NO_STACK: [],
}  # fmt: skip


def failed_snapshot(requested: int = 256 * MIB, device_free: int = 64 * MIB) -> dict[str, Any]:
    """Six live blocks of 30 MiB, one of each kind, one free one of 50 MiB, and a request that
    failed."""
    snapshot = recorded_history([*[30 * MIB] * 6, 50 * MIB, ~6])
    blocks = [
        block
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    for block, stack in zip(blocks, STACKS.values(), strict=True):
        block["frames"] = stack
    snapshot["device_traces"][0].append({
        "action": "oom", "device_free": device_free, "size": requested, "stream": 0, "frames": [],
    })  # fmt: skip
    return snapshot


def test_what_is_alive_and_what_is_free_add_up() -> None:
    found = read_snapshot(failed_snapshot(), "it")
    seen = found.figures
    assert seen["allocated_bytes"] + seen["unused_bytes"] == seen["reserved_bytes"]
    assert sum(found.categories.values()) == seen["allocated_bytes"]
    assert set(found.categories) == set(STACKS)
    assert seen["largest_free_bytes"] <= seen["unused_bytes"]
    assert (seen["requested_bytes"], seen["free_bytes"]) == (256 * MIB, 64 * MIB)


def test_a_snapshot_of_an_older_torch_keeps_stacks_in_a_history() -> None:
    snapshot = failed_snapshot()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if "frames" in block:
                block["history"] = [{"frames": block.pop("frames")}]
    assert set(read_snapshot(snapshot, "it").categories) == set(STACKS)


def test_a_failure_is_explained_with_what_was_alive(tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    path.write_bytes(pickle.dumps(failed_snapshot()))
    found = explain(path)
    assert found.kind == "snapshot"
    text = " ".join(explanation_text(found).split())
    assert "A request of 256.00 MiB failed" in text
    assert "the driver had 64.00 MiB" in text
    assert "swin_transformer.py:205 forward" in text
    assert "expandable_segments" not in text, "its free blocks are less than what is missing"
    assert to_json(found)["seen"]["missing_bytes"] == 192 * MIB
    path.write_bytes(pickle.dumps(failed_snapshot(110 * MIB)))
    assert "expandable_segments:True lets most" in explanation_text(explain(path))


def test_levers_free_what_was_missing_and_the_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    path.write_bytes(pickle.dumps(failed_snapshot(8 * MIB, 2 * MIB)))
    plan = planner.estimate(tiny(), batch_size=256, gpu="rtx 3090")
    found = explain(path, plan)
    assert found.expected is plan
    assert explain(path, planner.advise(tiny(), batch_size=256, gpu="rtx 3090")).expected
    assert found.relief.needed_bytes == 6 * MIB
    most = plan.device_total_bytes - 6 * MIB
    assert all(way.estimate.device_total_bytes <= most for way in found.relief.advice.ways)
    text = explanation_text(found)
    assert "predicted at the peak" in text
    assert "6.00 MiB must become free. As it is, it should need" in text
    assert found.relief.advice.ways[0].command in text
    assert text.startswith(found.differs[0][:40]), "it fits: no change of it comes first"


def explained(path: Path, data: bytes) -> str:
    """What is said of it; of what is refused, the reason."""
    path.write_bytes(data)
    try:
        return explanation_text(explain(path))
    except PlannerError as error:
        return error.message


BAD = {
    "nan": math.nan, "huge": 10**400, "negative": -1, "bool": True, "text": "1", "none": None,
    "tuple": (1,), "dict": {},
}  # fmt: skip
PLACES = ("size", "total_size", "device", "state", "frames", "category", "failed", "free")


@pytest.mark.parametrize(("place", "bad"), covering(PLACES, BAD))
def test_a_value_that_cannot_be_is_refused_or_passed_over(
    place: str, bad: str, tmp_path: Path
) -> None:
    snapshot = failed_snapshot()
    segment = snapshot["segments"][0]
    failure = snapshot["device_traces"][0][-1]
    block = next(b for b in segment["blocks"] if b.get("frames"))
    entry, key = {
        "total_size": (segment, "total_size"), "device": (segment, "device"),
        "failed": (failure, "size"), "free": (failure, "device_free"),
    }.get(place, (block, place))  # fmt: skip
    entry[key] = BAD[bad]
    said = explained(tmp_path / "a.pickle", pickle.dumps(snapshot))
    assert len(said) < 5000
    if place in ("size", "total_size", "failed", "free"):
        assert "is no number of bytes" in said


def test_lists_that_are_there_many_times_over_are_not_followed(tmp_path: Path) -> None:
    blocks = [{"size": 512, "state": "inactive"}] * 10_000
    segment = {"device": 0, "total_size": 512, "blocks": blocks}
    snapshot = {"segments": [segment] * 10_000, "device_traces": []}
    said = explained(tmp_path / "a.pickle", pickle.dumps(snapshot))
    assert "more events or blocks" in said


def test_damaged_snapshots_are_refused_or_told(tmp_path: Path) -> None:
    """One bit turned, or an end cut off, at each of fifty places."""
    whole = pickle.dumps(failed_snapshot())
    for place in range(0, len(whole), max(len(whole) // 50, 1)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for data in (bytes(flipped), whole[:place]):
            assert explained(tmp_path / "a.pickle", data)
