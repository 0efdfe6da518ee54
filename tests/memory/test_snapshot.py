"""A device's record against ours: records made by the slow allocator, which has the same rules.

No record of a real device is kept here, so nothing here shows that a device has these rules.
`python -m planner.memory.snapshot FILE` compares one with ours.
"""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError
from planner.memory.replay import replay
from planner.memory.snapshot import load_snapshot, main, replay_snapshot
from tests.memory.histories import recorded_history
from tests.memory.requests import random_requests, random_streams

MIB = 1024**2


@pytest.mark.parametrize(("start", "descending"), [(0, True), (1, False), (137, True)])
def test_a_record_of_the_same_rules_is_equal(start: int, descending: bool) -> None:
    requests = random_requests(random.Random(start), 300)
    snapshot = recorded_history(requests, start=start, descending=descending)
    result = replay_snapshot(snapshot)
    assert result.difference == ""
    assert result.reserved_bytes == result.recorded_reserved_bytes
    assert result.num_requests == sum(1 for n in requests[start:] if n >= 0)


def test_segments_given_back_on_the_way_are_followed() -> None:
    num_found = 0
    for seed in range(20):
        requests = random_requests(random.Random(seed), 300)
        capacity = int(0.99 * replay(requests).peak_reserved_bytes)
        if replay(requests, allowed_bytes=capacity).out_of_memory_at is not None:
            continue
        snapshot = recorded_history(requests, capacity=capacity)
        assert any(e["action"] == "segment_free" for e in snapshot["device_traces"][0])
        assert replay_snapshot(snapshot).difference == ""
        num_found += 1
    assert num_found >= 3


def test_a_remainder_that_was_never_split_off_is_found_again() -> None:
    # Before recording, 4 MiB lie in a hole of 4.9 MiB, whole, with the rest of 20 MiB free behind
    # it. That the block ends at 4.9 shows only when 6 MiB are put there; at the end it is gone.
    hole = 4 * MIB + 900 * 1024
    snapshot = recorded_history([hole, 5 * MIB, ~0, 4 * MIB, ~1, 6 * MIB, ~3], start=5)
    assert replay_snapshot(snapshot).difference == ""
    assert replay_snapshot(snapshot).held_before_bytes == hole


def test_what_the_device_did_otherwise_is_named() -> None:
    snapshot = recorded_history([5 * MIB, 6 * MIB, ~0, 512, 5 * MIB, ~1])
    first, second = snapshot["segments"]
    base = first["address"]

    moved = copy.deepcopy(snapshot)
    moved["device_traces"][0][6]["addr"] = base + 11 * MIB
    moved["segments"][0]["blocks"] = [
        {"size": 11 * MIB, "state": "inactive"},
        {"size": 5 * MIB, "state": "active_allocated"},
        {"size": 4 * MIB, "state": "inactive"},
    ]
    assert f"ours is at {base:#x}" in replay_snapshot(moved).difference

    first_event = snapshot["device_traces"][0][0]
    larger = copy.deepcopy(snapshot)
    larger["device_traces"][0][0]["size"] *= 2
    assert "the device one of" in replay_snapshot(larger).difference

    without = copy.deepcopy(snapshot)
    del without["device_traces"][0][0]
    without["segments"] = [second]
    assert "the device took none" in replay_snapshot(without).difference

    extra = copy.deepcopy(snapshot)
    extra["device_traces"][0].insert(2, {**first_event, "addr": 1 << 40})
    extra["segments"].append({**second, "address": 1 << 40, "blocks": []})
    assert "ours none" in replay_snapshot(extra).difference

    grown = copy.deepcopy(snapshot)
    grown["segments"][0]["blocks"][0]["size"] += 512
    assert "at the end 1 blocks differ" in replay_snapshot(grown).difference


def test_a_record_that_contradicts_itself_is_said_to() -> None:
    snapshot = recorded_history([5 * MIB, ~0, 512])
    snapshot["segments"] = snapshot["segments"][1:]
    with pytest.raises(PlannerError, match="contradicts itself"):
        replay_snapshot(snapshot)
    snapshot = recorded_history([5 * MIB, ~0, 512], start=2)
    snapshot["device_traces"][0].append(
        {"action": "free_completed", "addr": 1 << 30, "size": 512, "stream": 0}
    )
    with pytest.raises(PlannerError, match="contradicts itself"):
        replay_snapshot(snapshot)


@pytest.mark.parametrize(("seed", "start"), enumerate([0, 137]))
def test_a_record_of_several_streams_is_equal(seed: int, start: int) -> None:
    source = random.Random(seed)
    requests = random_requests(source, 300)
    streams = random_streams(source, requests, 3)
    capacity = int(0.99 * replay(requests, streams=streams).peak_reserved_bytes)
    if replay(requests, allowed_bytes=capacity, streams=streams).out_of_memory_at is not None:
        capacity = 1 << 40
    snapshot = recorded_history(requests, start=start, streams=streams, capacity=capacity)
    assert replay_snapshot(snapshot).difference == ""
    # Were all blocks of one stream, ours would lie elsewhere.
    for entry in (*snapshot["device_traces"][0], *snapshot["segments"]):
        entry["stream"] = 0
    assert replay_snapshot(snapshot).difference != ""


def test_a_snapshot_with_private_pools_is_refused() -> None:
    snapshot = recorded_history([512])
    snapshot["segments"][0]["segment_pool_id"] = (0, 1)
    with pytest.raises(UnsupportedError, match="private pools"):
        replay_snapshot(snapshot)


def test_a_snapshot_file_is_read_without_running_code(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorded_history([5 * MIB, 512])))
    assert replay_snapshot(load_snapshot(path)).difference == ""
    assert main([str(path)]) == 0
    path.write_bytes(pickle.dumps(recorded_history([5 * MIB, 512, ~1], start=2)))
    with pytest.raises(PlannerError, match="holds no request"):
        main([str(path)])
    path.write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(PlannerError, match="asks for"):
        load_snapshot(path)
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(PlannerError, match="no memory snapshot"):
        load_snapshot(path)
    path.write_bytes(b"\x80")
    with pytest.raises(PlannerError, match="cannot be read"):
        load_snapshot(path)
