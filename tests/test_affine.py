"""A step recorded at two batches, read at others: what it is to be affine, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor, nn

from planner import TrainSetting
from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel
from planner.estimation.estimate import choose
from planner.ledger.affine import HUGE, AffineLedger, NotAffineError, Recorder, in_canonical_order
from planner.ledger.ledger import Allocated, Computed, Event, Freed, Ledger, Marked, Tagged
from planner.memory.profile import instant, walk, walk_ledger
from planner.memory.scratch import Processors, on_device
from planner.step.training import record_training
from planner.trace.ledger import trace_estimate
from tests.building import on_shapes

A100 = Processors(108, 2048, (8, 0))

SMALL = {"image_size": (56, 56), "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32}
SWINS = {
    "native": ("native:swin_tiny", SMALL, {}),
    "native, version 2": ("native:swinv2_tiny", SMALL | {"window_size": 7}, {"attention": "eager"}),
    "timm": ("timm:swin_tiny_patch4_window7_224", SMALL, {
        "precision": "fp32", "checkpointing": "blocks",
    }),
    "transformers": ("transformers:microsoft/swin-tiny-patch4-window7-224", SMALL, {
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


class Small(nn.Module):
    """A linear layer on pixels, normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 8 * 8, 24)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(images.flatten(1))).relu())


def traced(module: type[nn.Module], batch_size: int, num_steps: int | None = None) -> Ledger:
    model = FactoryModel(factory="tests.affine:module", image_size=(8, 8), num_classes=10)
    setting = TrainSetting(batch_size=batch_size, precision="fp32")
    return trace_estimate(model, setting, module, num_steps)


def test_one_step_is_checked_against_the_first_of_two() -> None:
    affine = AffineLedger.through(traced(Small, 2), traced(Small, 7))
    one = traced(Small, 3, num_steps=1)
    assert len(one.events) < len(affine.at.events)
    affine.check(one)
    other = [e._replace(flops=1) if isinstance(e, Computed) else e for e in one.events]
    with pytest.raises(NotAffineError, match="differs in FLOPs"):
        affine.check(replace(one, events=tuple(other)))


# -- by hand ---------------------------------------------------------------------------------------


def ledger_of(events: list[Event], batch_size: int, **more: int) -> Ledger:
    return Ledger(tuple(events), batch_size, num_parameters=0, **more)


def step(batch_size: int, **changes: object) -> list[Event]:
    """100 bytes and 7 an image; 10 FLOPs an image on 3 bytes."""
    computed = Computed("aten.mm", "matmul", "float32", 10 * batch_size, 3, 1, "head")
    return [
        Allocated(1, 100 + 7 * batch_size, "aten.mm", "head"),
        computed._replace(**changes),  # type: ignore[arg-type]
        Marked("forward", 0),
        Allocated(2, 512, "aten.add"),
        Tagged(1, "activations"), Tagged(2, "gradients"),
        Freed(1), Freed(2),
    ]  # fmt: skip


def test_sizes_and_flops_are_fixed_and_per_image() -> None:
    affine = AffineLedger.through(ledger_of(step(2), 2), ledger_of(step(4), 4))
    assert affine.slopes == {0: (7, 0), 1: (0, 10)}
    assert affine.ledger(9) == ledger_of(step(9), 9)
    assert affine.ledger(2) is affine.at


def test_the_order_within_a_run_of_releases_or_of_tags_is_nothing() -> None:
    turned = step(3)
    turned[4:6] = turned[5:3:-1]
    turned[6:8] = turned[7:5:-1]
    affine = AffineLedger.through(ledger_of(step(2), 2), ledger_of(turned, 3))
    affine.check(ledger_of(turned, 3))
    affine.check(ledger_of(step(9), 9))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernels": 2}, "aten.mm of head differs in kernels: 1 at batch 2, 2 at batch 4"),
        ({"flops": 41}, "aten.mm of head differs in FLOPs: 20 at batch 2, 41 at batch 4"),
        ({"num_bytes": 1_002}, "aten.mm of head differs in bytes: 3 at batch 2, 1,002 at batch 4"),
        ({"path": "tail"}, "at batch 2 aten.mm of head comes next, at batch 4 aten.mm of tail"),
    ],
)
def test_what_differs_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        AffineLedger.through(ledger_of(step(2), 2), ledger_of(step(4, **changes), 4))
