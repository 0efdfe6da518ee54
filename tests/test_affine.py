"""A step on shapes recorded at a huge batch, read at others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import TrainSetting
from planner.estimation.estimate import choose
from planner.ledger.affine import HUGE, AffineLedger, Recorder
from planner.ledger.ledger import Allocated, Computed, Ledger
from planner.memory.profile import instant, walk, walk_ledger
from planner.memory.scratch import Processors, on_device
from planner.step.training import record_training
from tests.building import on_shapes
from tests.equality import in_canonical_order

A100 = Processors(108, 2048, (8, 0))

SMALL = {"image_size": (56, 56), "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32}
SWINS = {
    "native": ("native:swin_tiny", SMALL, {}),
    "native, version 2": ("native:swinv2_tiny", SMALL | {"window_size": 7}, {"attention": "eager"}),
    "timm": ("timm:swin_tiny_patch4_window7_224", SMALL, {
        "precision": "fp32", "checkpointing": "blocks",
    }),
    "fused": ("timm:swin_tiny_patch4_window7_224", SMALL, {
        "optimizer": "adamw-fused", "loss": "soft-target",
    }),
    "accumulation": ("native:swin_tiny", SMALL, {"accumulate": 2, "precision": "fp16"}),
}  # fmt: skip


def recorder_of(case: str) -> Recorder:
    model, of_model, of_setting = SWINS[case]
    config, setting = choose(model, TrainSetting(**of_setting), None, of_model)
    build = on_shapes(config, setting)

    def record(batch_size: int) -> Ledger:
        return record_training(build, config, setting.model_copy(update={"batch_size": batch_size}))

    return Recorder(record)


@pytest.mark.parametrize("case", SWINS)
def test_one_recording_of_a_huge_batch_is_that_of_any_other(case: str) -> None:
    record = recorder_of(case).record
    line = AffineLedger.from_huge(record(HUGE))
    for batch in (2, 17):
        found, recorded = line.ledger(batch), record(batch)
        assert in_canonical_order(found.events) == in_canonical_order(recorded.events)
        assert found.num_parameters == recorded.num_parameters
        # What is read off the line's own ledger is what the events say by themselves.
        assert walk_ledger(found) == walk(found.events)
        alone = replace(found, events=tuple(found.events))
        for step in (0, 1):
            assert list(found.operations(step)) == list(alone.operations(step))
        there, made = on_device(found, A100), on_device(alone, A100)
        assert there == made != found
        assert there.events == tuple(made.events)
        assert walk_ledger(there) == walk(made.events)
        peak = walk_ledger(there).steady.peak_index
        assert instant(there, peak) == instant(replace(there, events=tuple(made.events)), peak)


def test_a_huge_batch_shows_what_shrinks_with_the_batch() -> None:
    """fixed + per image * batch, where the fixed part is negative: 3 * batch - 5 bytes."""

    def record(batch: int) -> Ledger:
        work = Computed("aten.mm", "matmul", "float32", 7 * batch + 11, 3 * batch - 5, 1, "")
        return Ledger((Allocated(0, 3 * batch - 5, "aten.mm"), work), batch, 0)

    line = AffineLedger.from_huge(record(HUGE))
    assert line.ledger(9) == record(9)


def test_a_recorder_records_three_times_at_most() -> None:
    recorded = []
    recorder = recorder_of("native")
    record = recorder.record

    def counted(batch_size: int) -> Ledger:
        recorded.append(batch_size)
        return record(batch_size)

    recorder.record = counted
    for batch_size in (8, 8, 1, 2, 30, 1, 8, 64):
        found, expected = recorder.ledger(batch_size), record(batch_size)
        assert in_canonical_order(found.events) == in_canonical_order(expected.events)
    assert recorded == [8, 1, HUGE]
