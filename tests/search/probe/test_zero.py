"""Probes of ranks under DeepSpeed (gloo, on the CPU), and what such a probe refuses."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from planner.errors import UnsupportedError
from planner.parallel import zero
from planner.schema import TrainSetting
from planner.units import MIB
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.search.processes import remaining


@pytest.fixture(autouse=True)
def _nothing_remains(token: str) -> Iterator[None]:
    yield
    assert not remaining(token)


@pytest.mark.trainers
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    "setting",
    [
        {"parallelism": "zero1", "accumulate": 2, "clip_grad": True},
        {"parallelism": "zero2", "precision": "bf16", "ema": True},
        {"parallelism": "zero3", "precision": "fp16", "accumulate": 2},
    ],
    ids=str,
)
def test_two_ranks_are_measured(fork_server: ForkServer, setting: dict[str, object]) -> None:
    """What DeepSpeed imports (80 MB and more) is not the setting's memory."""
    request = request_of("tiny", world_size=2, **setting)
    record = run_probe(request, deadline_seconds=AMPLE_SECONDS, fork_server=fork_server)
    assert record.status == "measured", record.message
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank in record.ranks:
        assert 0 < (rank.peak_allocated_bytes or 0) < 24 * MIB
        assert rank.step_seconds > 0


def test_without_deepspeed_a_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="Install deepspeed, or choose"):
        zero.refuse_unsupported(TrainSetting(parallelism="zero2", world_size=2))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        ({"precision": "pure-bf16"}, "Set precision=bf16"),
        ({"compile": "default"}, "Set compile=off"),
        ({"zero_grad_to_none": False}, "Set zero_grad_to_none=true"),
    ],
)
def test_what_no_probe_runs_is_said_before(setting: dict[str, object], way_out: str) -> None:
    with pytest.raises(UnsupportedError, match=way_out):
        zero.refuse_unsupported(TrainSetting(parallelism="zero2", world_size=2, **setting))
