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
from planner.ledger.ledger import Event
from planner.step.reducer import steps_until_steady
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
    "find_unused, cap": {"ddp_find_unused": True, "ddp_bucket_mb": 1},
    "static, view": {"ddp_static_graph": True, **VIEW},
    "fp16, view": {"ddp_compression": "fp16", **VIEW},
    "every, view": {**TWO, "gradient_sync": "every", **VIEW},
    "kept, view, no_sync": {**KEPT, **VIEW, **TWO},
    "frozen, view": {"frozen_stages": 1, **VIEW},
    "validated": {"validation_batch_size": 4, "ddp_find_unused": True},
}
MODES = {**QUICK, **LONG}
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.release) for name in LONG)]
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


def compared(rows: list[Row], setting: TrainSetting) -> list[Row]:
    """`rows` without what a ledger tells otherwise on purpose: the rebuild of buckets stands at the
    end of the step before it; the agreement on them takes a copy on the host, which here is the
    device."""
    weights = build_real(MODEL, setting).parameters()
    agreed = 4 * (sum(p.requires_grad for p in weights) + 1)
    rebuilt = ("end", "zero_grad", steps_until_steady(setting) - 3)
    return [tuple(row) for row in rows if row[1] != agreed and tuple(row) != rebuilt]


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


def once_more(rows: list[Row]) -> list[Row]:
    """`rows`, and the last step again."""
    *_, before, last = (row[2] for row in rows if row[:2] == ("end", "zero_grad"))
    again = rows[rows.index(("end", "zero_grad", before)) + 1 :]
    return rows + [(*row[:2], last + 1) if row[0] == "end" else row for row in again]


def freed_by_gloo(setting: TrainSetting) -> set[Row]:
    """The buffers of one type are sent as one copy. On a busy machine gloo's thread lets go of it
    last, and what that thread frees the profiler does not see. The first buckets it lets go at
    once, which NCCL does not."""
    num_bytes: Counter[object] = Counter()
    for buffer in build_real(MODEL, setting).buffers():
        num_bytes[buffer.dtype] += buffer.nbytes
    trained = (p.nbytes for p in build_real(MODEL, setting).parameters() if p.requires_grad)
    return {("-", size) for size in (*num_bytes.values(), sum(trained))}


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_allocate_and_free_what_the_ledger_says(ranks: Ranks, name: str) -> None:
    setting = setting_of(name)
    real = ranks(name)
    alone = rows_of(events_of(without_ddp(setting)))
    for _ in range(steps_until_steady(setting) - 2):
        alone = once_more(alone)
    mine = {"ddp": rows_of(events_of(setting)), "none": alone}
    lists = [
        compared(rows, setting) for whose in (mine, real) for rows in (whose["none"], whose["ddp"])
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
    from planner.trace.run import trace_training

    setting = setting_of(name)
    mine = events_of(setting, in_place_sums=False)
    trace = trace_training(lambda: build_real(MODEL, setting), MODEL, setting, detailed=True)
    difference = first_difference(mine, trace.events)
    assert not difference, difference
    assert phase_ends(mine) == phase_ends(trace.events)
    assert collectives(mine) == collectives(trace.events)
