"""What several ranks measured, as one; what no probe runs is refused before."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import TrainSetting
from planner.core.units import MIB
from planner.training import zero
from search.probe.parent.ranks import put_together
from search.probe.parent.runner import run_probe
from search.probe.protocol import OutcomeMessage
from tests.search.probes import AMPLE_SECONDS, request_of


def test_what_ranks_say_is_put_together() -> None:
    """Steps by the slower rank each, peaks by the fuller, flags with the ranks that have them."""
    slow = OutcomeMessage(
        probe_id="x", status="measured", step_seconds=(1.0, 4.0), peak_reserved_bytes=10,
        device_bytes=12, forward_seconds=0.5, flags=("both", "mine"), free_bytes=7, taken_bytes=1,
    )  # fmt: skip
    fast = slow.model_copy(
        update={"step_seconds": (2.0, 3.0), "peak_reserved_bytes": 20, "device_bytes": 22,
                "forward_seconds": 0.25, "flags": ("both",), "free_bytes": 5}
    )  # fmt: skip
    found = put_together([slow, fast], ["cuda:0", "cuda:1"])
    assert found.step_seconds == (2.0, 4.0)
    assert (found.peak_reserved_bytes, found.device_bytes) == (20, 22)
    assert (found.free_bytes, found.taken_bytes) == (5, 1)
    assert found.flags[:2] == ("both", "rank 0: mine")
    assert found.flags[2].startswith("rank 0 (cuda:0) is a straggler")
    assert "2.00 ×" in found.flags[2]
    assert [rank.device_bytes for rank in found.ranks] == [12, 22]


def test_what_no_probe_runs_is_said_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = TrainSetting(parallelism="zero2", world_size=2)
    monkeypatch.setattr(zero, "find_spec", lambda name: "found")
    for fields, way_out in (
        ({"precision": "pure-bf16"}, "Set precision=bf16"),
        ({"compile": "default"}, "Set compile=off"),
        ({"zero_grad_to_none": False}, "Set zero_grad_to_none=true"),
    ):
        with pytest.raises(UnsupportedError, match=way_out):
            zero.refuse_unsupported(sharded.model_copy(update=fields))
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="Install deepspeed, or choose"):
        zero.refuse_unsupported(sharded)


@pytest.mark.trainers
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_two_ranks_of_deepspeed_are_measured() -> None:
    """What DeepSpeed imports (80 MB and more) is not the setting's memory."""
    setting = {"parallelism": "zero2", "precision": "bf16", "ema": True, "world_size": 2}
    record = run_probe(request_of("tiny", **setting), deadline_seconds=AMPLE_SECONDS)
    assert record.status == "measured", record.message
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank in record.ranks:
        assert 0 < (rank.peak_allocated_bytes or 0) < 24 * MIB
        assert rank.step_seconds > 0
