"""ZeRO-1 and ZeRO-2 by formula, against DeepSpeed 0.19.8 itself on this CPU, byte by byte.

DeepSpeed runs as one rank of a fake process group: it allocates what a rank does, and sends
nothing. The plain step of the same module is recorded beside it; ZeRO inserted into that has to be
what DeepSpeed made. Tensors below 64 bytes (scalars of the norm and the overflow check) are left
out on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner.ledger.ledger
from planner.core.errors import PlannerError
from planner.core.schema import TrainSetting
from planner.estimation.estimate import choose, estimate
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Allocated, Awaited, Event, Freed, Ledger, Marked, Scratch, Sent
from planner.memory.profile import steady_step
from planner.step.zero import insert_zero_events, on_one_device
from planner.step.zero.insert_events import Weight, _registered, weights_of
from planner.step.zero.layout import Layout
from tests.step.zero.deepspeed_run import make_model, record

LEAST = 64
BUCKET = 100_000

# (model, precision, stage, world size, rank, and what else)
CASES: list[dict[str, Any]] = [
    {"model": model, "precision": precision, "stage": stage, "world_size": world_size,
     "rank": rank, "bucket": BUCKET, **more}
    for model, precision, stage, world_size, rank, more in [
        ("mlp", "fp32", 1, 2, 1, {"accumulate": 2}),
        ("mlp", "pure-bf16", 2, 8, 3, {"bucket": 50_000}),  # some weights are larger than it
        ("swin", "bf16", 2, 2, 1, {"overlap": True}),
    ]
]  # fmt: skip

ONE_AT_A_TIME = {"zero_max_reuse": 0, "zero_prefetch_bucket": 0}
CASES_OF_3: list[dict[str, Any]] = [
    {"model": model, "precision": precision, "stage": 3, "world_size": world_size, "rank": 0,
     "bucket": BUCKET, "fields": {"zero_persistence": 600, **fields}}
    for model, precision, world_size, fields in [
        ("mlp", "pure-bf16", 8, {}),
        ("mlp", "fp32", 2, {"zero_persistence": 100_000}),
        ("swin", "bf16", 2, ONE_AT_A_TIME),
    ]
]  # fmt: skip


def setting_of(case: dict[str, Any]) -> TrainSetting:
    return TrainSetting(
        world_size=case["world_size"],
        parallelism=f"zero{case['stage']}",
        precision=case["precision"],
        zero_reduce_bucket=case["bucket"],
        zero_overlap=case.get("overlap", False),
        accumulate=case.get("accumulate", 1),
        **case.get("fields", {}),
    )


def as_ledger(rows: list[list[Any]]) -> Ledger:
    events = tuple(getattr(planner.ledger.ledger, name)(*fields) for name, *fields in rows)
    return Ledger(events, batch_size=4, num_parameters=0)


def ends(ledger: Ledger) -> list[tuple[str, int, int, int]]:
    """(phase, step, live bytes at its end, most of them in it)."""
    sizes: dict[int, int] = {}
    total = peak = 0
    found = []
    for event in ledger.events:
        if isinstance(event, Allocated) and event.num_bytes >= LEAST:
            sizes[event.storage] = event.num_bytes
            total += event.num_bytes
        elif isinstance(event, Freed):
            total -= sizes.pop(event.storage, 0)
        elif isinstance(event, Marked):
            found.append((event.phase, event.step, total, peak))
            peak = total
        peak = max(peak, total)
    return found


@cache
def measured() -> dict[str, dict[str, Any]]:
    """What DeepSpeed made of all cases, by case."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.step.zero.deepspeed_run", json.dumps([*CASES, *CASES_OF_3])],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    results = [json.loads(line.removeprefix("RESULT")) for line in lines]
    assert results, done.stderr[-2000:]
    return {json.dumps(result["case"]): result for result in results}


def title(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.trainers
@pytest.mark.parametrize("case", CASES, ids=title)
def test_bytes_are_those_of_deepspeed(case: dict[str, Any]) -> None:
    result = measured()[json.dumps(case)]
    sharded = insert_zero_events(as_ledger(result["plain"]), setting_of(case), case["rank"]).ledger
    assert ends(sharded) == ends(as_ledger(result["deepspeed"]))


@pytest.mark.trainers
@pytest.mark.parametrize("case", CASES_OF_3, ids=title)
def test_bytes_of_stage_3_stay_as_deepspeed_keeps_them(case: dict[str, Any]) -> None:
    """What stays is equal to the byte; the steady step's peak lies in the range."""
    result = measured()[json.dumps(case)]
    sharded = insert_zero_events(as_ledger(result["plain"]), setting_of(case)).ledger
    mine, its = ends(sharded), ends(as_ledger(result["deepspeed"]))
    assert mine[0][2] == its[0][2]  # built
    assert mine[-1][2] == its[-1][2]  # after the steady step
    most, measured_most = (max(peak for _, step, _, peak in found if step) for found in (mine, its))
    assert most - sharded.doubtful_bytes <= measured_most <= most


# What DeepSpeed 0.19.8 made of the MLP on 2026-11-22 (torch 2.13.0, CPU): live bytes after build
# and after the second step, and the most in that step's backward. Precision, stage, N, rank.
MEASURED = [
    (("fp32", 1, 8, 0), 1, 1_834_000, 2_241_328, 4_272_656),
    (("fp32", 2, 8, 7), 1, 1_834_000, 2_241_328, 3_485_200),
    (("pure-bf16", 1, 8, 3), 1, 1_018_832, 1_426_160, 2_441_776),
    (("pure-bf16", 2, 8, 0), 1, 1_018_832, 1_426_160, 1_919_328),
    (("fp32", 2, 2, 0), 2, 2_444_944, 4_074_224, 6_407_536),
]


@pytest.mark.parametrize(("which", "accumulate", "built", "steady", "peak"), MEASURED)
def test_bytes_are_those_measured(
    which: tuple[str, int, int, int], accumulate: int, built: int, steady: int, peak: int
) -> None:
    names = ("precision", "stage", "world_size", "rank")
    case = dict(zip(names, which, strict=True))
    case |= {"model": "mlp", "bucket": BUCKET, "accumulate": accumulate}
    plain = as_ledger(record(make_model(case), case, engine=False))
    found = ends(insert_zero_events(plain, setting_of(case), case["rank"]).ledger)
    assert (found[0][2], found[-1][2]) == (built, steady)
    assert max(most for phase, step, _, most in found if (phase, step) == ("backward", 1)) == peak


def test_weights_are_dealt_out_as_deepspeed_does() -> None:
    """398,602 parameters over 8: 996,520 B when built in bf16, that is 2A + 4A/N, in DeepSpeed
    0.19.8."""
    layout = Layout((128 * 16 + 128, *[131_712] * 3, 1_290), 8)
    assert layout.num_parameters == 398_602
    assert layout.aligned == 398_608
    assert 2 * layout.aligned + 4 * layout.share == 996_520


def test_pieces_fill_all_shares() -> None:
    layout = Layout((5, 30, 1, 1, 7, 100), 4)
    held = [sum(numel for _, numel in layout.of_rank(rank)) for rank in range(4)]
    assert sum(held) == layout.num_parameters
    assert held[:-1] == [layout.share] * 3
    assert sum(layout.runs(range(6))) == layout.num_parameters
    assert len(layout.runs(range(6))) == 4


SWIN = "timm:swin_tiny_patch4_window7_224"


@cache
def one_device(batch_size: int, precision: str, accumulate: int = 1) -> Ledger:
    settings = {"batch_size": batch_size, "precision": precision, "accumulate": accumulate}
    return step_ledger(*choose(SWIN, settings, None, {}))


def zero(stage: int, precision: str = "bf16", **more: Any) -> TrainSetting:
    return TrainSetting(
        **{"parallelism": f"zero{stage}", "world_size": 8, "precision": precision, **more}
    )


def state(events: Sequence[Event], phase: str, step: int) -> int:
    ledger = Ledger(tuple(events), 2, 0)
    return next(live for name, at, live, _ in ends(ledger) if (name, at) == (phase, step))


@pytest.mark.parametrize(("stage", "precision", "size"), [(1, "bf16", 4), (2, "pure-bf16", 2)])
def test_states_of_a_swin_are_the_closed_form(stage: int, precision: str, size: int) -> None:
    """Flat weights, fp32 masters of the share from the start, Adam's two states after a step."""
    one = one_device(2, precision)
    weights = sum(weight.num_bytes for weight in weights_of(one)[0])
    layout = Layout((weights // size,), 8)
    sharded = insert_zero_events(one, zero(stage, precision)).ledger.events
    given = state(one.events, "build", 0) - weights
    states = size * layout.aligned + 4 * layout.share
    assert state(sharded, "build", 0) == given + states
    assert state(sharded, "zero_grad", 1) == given + states + 8 * layout.share


@pytest.mark.parametrize(
    ("precision", "stage", "overlaps"), [("bf16", 2, False), ("fp32", 1, True)]
)
def test_the_last_rank_is_the_fullest_where_gradients_leave_in_backward(
    precision: str, stage: int, overlaps: bool
) -> None:
    """The one with the most gradients has up to 13.5 MB less, and at most 1.1 MB more."""
    one = one_device(2, precision)
    setting = zero(stage, precision, zero_reduce_bucket=4_000_000, zero_overlap=overlaps)
    peaks = [steady_step(insert_zero_events(one, setting, r).ledger).peak_bytes for r in range(8)]
    assert steady_step(insert_zero_events(one, setting).ledger).peak_bytes == peaks[-1]
    assert peaks[-1] == pytest.approx(max(peaks), rel=0.005)
    assert peaks[-1] - peaks[0] > 20_000_000


def test_each_storage_is_freed_once_and_each_collective_awaited() -> None:
    sharded = insert_zero_events(
        one_device(2, "bf16"), zero(2, accumulate=3, zero_overlap=True)
    ).ledger
    alive: set[int] = set()
    scratch: set[int] = set()  # that a kernel asks for, and gives back before it returns
    pending: set[int] = set()
    for event in sharded.events:
        if isinstance(event, Allocated | Scratch):
            assert event.storage not in alive
            alive.add(event.storage)
            if isinstance(event, Scratch):
                scratch.add(event.storage)
        elif isinstance(event, Freed):
            alive.remove(event.storage)
            scratch.discard(event.storage)
        elif isinstance(event, Marked):
            assert not scratch
            assert event.phase != "optimizer" or not pending
        elif isinstance(event, Sent):
            pending.add(event.handle)
        elif isinstance(event, Awaited):
            pending.remove(event.handle)


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (2, 2)])
def test_gradients_cross_once_a_step_or_in_each_micro_batch(stage: int, micro_batches: int) -> None:
    """ZeRO-1 sums them in the last micro-batch; both gather all weights after the step."""
    setting = zero(stage, "fp32", accumulate=2)
    one = one_device(2, "fp32", on_one_device(setting).accumulate)
    parameters = sum(weight.num_bytes for weight in weights_of(one)[0])
    events = insert_zero_events(one, setting).ledger.events
    middle = next(i for i, e in enumerate(events) if e == Marked("zero_grad", 0))
    sent = [event for event in events[middle:] if isinstance(event, Sent)]
    reduced = [e.num_bytes for e in sent if e.collective == "all_reduce" and e.num_bytes > 4]
    gathered = [e.num_bytes for e in sent if e.collective == "all_gather"]
    assert sum(reduced) == micro_batches * parameters
    assert gathered == [4 * Layout((parameters // 4,), 8).aligned]


def test_a_traced_model_is_sharded_in_the_order_of_its_parameters() -> None:
    """A trace has a module's weights after its children's, DeepSpeed before."""
    order = _registered(
        [Weight(0, 4, "stem"), Weight(1, 4, "block.attn.qkv"), Weight(2, 4, "block.attn"),
         Weight(3, 4, "block.mlp"), Weight(4, 4, "")]
    )  # fmt: skip
    assert [weight.storage for weight in order] == [4, 0, 2, 1, 3]


def test_a_bucket_larger_than_the_model_is_named() -> None:
    found = estimate(SWIN, zero(2, batch_size=2))
    said = " ".join(found.assumed)
    assert "2 buckets (one for each dtype in which gradients cross)" in said
    assert "which take 3.73 GiB whatever the model" in said
    assert "zero_reduce_bucket=2359296" in said
    fitting = estimate(SWIN, zero(2, batch_size=2, zero_reduce_bucket=2_359_296))
    assert "whatever the model" not in " ".join(fitting.assumed)
    assert found.peak_live_bytes - fitting.peak_live_bytes > 3 << 30


def test_what_fails_or_is_unknown_is_refused() -> None:
    for given, said in (
        ({"memory_format": "channels_last"}, "sends each weight as bytes"),
        ({"parallelism": "zero3", "ema": True}, "have no elements between steps"),
        ({"compile": "default"}, "compile default under DeepSpeed is not estimated"),
    ):
        with pytest.raises(PlannerError, match=said):
            estimate(SWIN, {"parallelism": "zero2", "world_size": 8, **given})


def test_gradients_that_share_a_storage_are_refused() -> None:
    """Swin V2's query and value biases are cut from one: whose the bytes are, no size says."""
    with pytest.raises(PlannerError, match="share a storage of 9,216 bytes"):
        estimate("timm:swinv2_tiny_window8_256", zero(2, batch_size=2))
