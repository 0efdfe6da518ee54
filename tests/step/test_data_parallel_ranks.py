"""DDP's events in every mode: those of two real processes over gloo, and those of the trace.

On a CPU kernels allocate otherwise than on a GPU, so what is compared is what DDP adds to a step
and takes from it: the step with DDP laid beside the step without, once real and once on shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from planner import TrainSetting
from planner.ledger import Event
from planner.step.training import record_training
from tests.building import build_real, on_shapes
from tests.equality import collectives, first_difference, phase_ends
from tests.step.gloo_ranks import BASE, MODEL, Row, rows_of, run_ranks, without_ddp

VIEW = {"ddp_bucket_view": True}
TWO = {"accumulate": 2}
KEPT = {"zero_grad_to_none": False}
QUICK: dict[str, dict[str, Any]] = {
    "default": {},
    "view, no_sync": {**VIEW, **TWO},
}
LONG: dict[str, dict[str, Any]] = {
    "find_unused": {"ddp_find_unused": True},
    "view": VIEW,
    "cap": {"ddp_bucket_mb": 2},
    "find_unused, view": {"ddp_find_unused": True, **VIEW},
    "find_unused, cap": {"ddp_find_unused": True, "ddp_bucket_mb": 1},
    "find_unused, view, no_sync": {"ddp_find_unused": True, **VIEW, **TWO},
    "static": {"ddp_static_graph": True},
    "static, view": {"ddp_static_graph": True, **VIEW},
    "static, find_unused": {"ddp_static_graph": True, "ddp_find_unused": True},
    "fp16": {"ddp_compression": "fp16"},
    "fp16, view": {"ddp_compression": "fp16", **VIEW},
    "no_sync": TWO,
    "every": {**TWO, "gradient_sync": "every"},
    "every, view": {**TWO, "gradient_sync": "every", **VIEW},
    "no buffers": {"ddp_broadcast_buffers": False},
    "kept": KEPT,
    "kept, view": {**KEPT, **VIEW},
    "kept, view, no_sync": {**KEPT, **VIEW, **TWO},
    "frozen, view": {"frozen_stages": 1, **VIEW},
    "validated": {"validation_batch_size": 4, "ddp_find_unused": True},
}
MODES = {**QUICK, **LONG}
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.combinations) for name in LONG)]
Ranks = Callable[[str], Any]


def setting_of(name: str) -> TrainSetting:
    return TrainSetting.model_validate({**BASE.model_dump(), **MODES[name]})


def events_of(setting: TrainSetting, in_place_sums: bool = True) -> tuple[Event, ...]:
    return record_training(on_shapes(MODEL, setting), MODEL, setting, in_place_sums).events


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two processes did in a mode; one start for all quick modes, and one for the others."""
    found: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in found:
            modes: Mapping[str, Any] = QUICK if name in QUICK else LONG
            folder = Path(tmp_path_factory.mktemp("ranks"))
            found.update(run_ranks(folder, modes, seconds=900))
        return found[name]

    return of


def compared(rows: list[Row], num_weights: int, skips_second_step: bool) -> list[Row]:
    """`rows` without what a ledger tells otherwise on purpose: the rebuild of buckets stands at the
    end of the first step; the agreement on them takes a copy on the host, which here is the device;
    of a static graph the second iteration is left out."""
    rows = [tuple(row) for row in rows]
    if skips_second_step:
        first, second = rows.index(("end", "zero_grad", 0)), rows.index(("end", "zero_grad", 1))
        rows = rows[:first] + [_earlier(row) for row in rows[second:]]
    agreed = 4 * (num_weights + 1)
    return [row for row in rows if row[1] != agreed and row != ("end", "zero_grad", 0)]


def _earlier(row: Row) -> Row:
    return (*row[:2], row[2] - 1) if row[0] == "end" else row


def changes(without: list[Row], with_ddp: list[Row]) -> list[Row]:
    """What is new in the second list, and gone from the first, in order and by phase."""
    found: list[Row] = []
    matcher = SequenceMatcher(None, without, with_ddp, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            found += [row for row in without[a:b] if row[0] == "end"]
        else:
            found += [("gone", *row) for row in without[a:b]]
            found += [("new", *row) for row in with_ddp[c:d]]
    return found


def freed_by_gloo(setting: TrainSetting) -> set[Row]:
    """The buffers of one type are sent as one copy. On a busy machine gloo's thread lets go of it
    last, and what that thread frees the profiler does not see."""
    num_bytes: Counter[object] = Counter()
    for buffer in build_real(MODEL, setting).buffers():
        num_bytes[buffer.dtype] += buffer.nbytes
    return {("-", size) for size in num_bytes.values()}


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_allocate_and_free_what_the_ledger_says(ranks: Ranks, name: str) -> None:
    setting = setting_of(name)
    real = ranks(name)
    num_weights = sum(p.requires_grad for p in build_real(MODEL, setting).parameters())
    mine = {"ddp": rows_of(events_of(setting)), "none": rows_of(events_of(without_ddp(setting)))}
    lists = [
        compared(rows, num_weights, setting.ddp_static_graph and whose is real)
        for whose in (mine, real)
        for rows in (whose["none"], whose["ddp"])
    ]
    if setting.ddp_compression != "none":
        # Copies are freed on gloo's threads, which the profiler does not see.
        lists = [[row for row in rows if row[0] != "-"] for rows in lists]
    else:
        unseen = freed_by_gloo(setting)
        lists = [[row for row in rows if row not in unseen] for rows in lists]
    expected, found = changes(*lists[:2]), changes(*lists[2:])
    assert len(expected) > len([row for row in expected if row[0] == "end"])
    assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_of_the_real_module_has_the_same_events(name: str) -> None:
    from planner.trace import trace_training

    setting = setting_of(name)
    mine = events_of(setting, in_place_sums=False)
    trace = trace_training(lambda: build_real(MODEL, setting), MODEL, setting, detailed=True)
    difference = first_difference(mine, trace.events)
    assert not difference, difference
    assert phase_ends(mine) == phase_ends(trace.events)
    assert collectives(mine) == collectives(trace.events)
