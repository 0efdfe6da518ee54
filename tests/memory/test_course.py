"""What is read from a line's course is what the ledger at that batch says, to the byte."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from planner import SwinConfig, TrainSetting, find_gpu
from planner.affine import Line, LineEvents, Recorder
from planner.estimation import choose, judge
from planner.ledger import Allocated, Computed, Event, Freed, Ledger, Marked
from planner.libraries.registry import find_library
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.pool_replay import Recurrence
from planner.memory.profile import read_ledger
from planner.step.training import record_training
from planner.throughput.prediction import predict_step, rates_for

WORKSPACE = 8_519_680
SMALL = {"image_size": (56, 56), "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32}
CASES = {
    "native": ("native:swin_tiny", {}, {}),
    "small": ("native:swin_tiny", SMALL, {"attention": "eager"}),
    "small, version 2": ("native:swinv2_tiny", SMALL | {"window_size": 7}, {}),
    "fp32, blocks": ("timm:swin_tiny_patch4_window7_224", {}, {
        "precision": "fp32", "checkpointing": "blocks",
    }),
    "accumulation": ("native:swin_tiny", SMALL, {"accumulate": 4, "precision": "fp16"}),
    "gradients kept": ("native:swin_tiny", SMALL, {
        "zero_grad_to_none": False, "ema": True, "clip_grad": True, "optimizer": "sgd",
    }),
    "transformers": ("transformers:microsoft/swin-tiny-patch4-window7-224", SMALL, {
        "optimizer": "adamw-fused", "loss": "soft-target",
    }),
    "torchvision": ("torchvision:swin_t", SMALL, {"precision": "pure-bf16"}),
}  # fmt: skip


def recorder_of(case: str) -> tuple[SwinConfig, TrainSetting, Recorder]:
    model, of_model, of_setting = CASES[case]
    setting = TrainSetting(**{"batch_size": 8, **of_setting})
    config, setting = choose(model, setting, None, of_model)
    build = find_library(config.library).on_shapes(config, setting)

    def record(batch_size: int) -> Ledger:
        return record_training(build, config, setting.model_copy(update={"batch_size": batch_size}))

    recorder = Recorder(record)
    recorder.ledger(8)
    recorder.ledger(9)
    return config, setting, recorder


def plain(ledger: Ledger) -> Ledger:
    """The same ledger with its events made, which is read event by event."""
    return Ledger(tuple(ledger.events), ledger.batch_size, ledger.num_parameters, ledger.notes)


@pytest.mark.parametrize("case", CASES)
def test_the_short_way_reads_what_the_long_one_does(case: str) -> None:
    config, setting, recorder = recorder_of(case)
    gpu = find_gpu("h100-sxm-80gb")
    for batch_size in (2, 3, 8, 31, 64, 200, 1000):
        ledger = recorder.ledger(batch_size)
        assert isinstance(ledger.events, LineEvents)
        assert ledger.events.course is not None
        at = setting.model_copy(update={"batch_size": batch_size})
        for device in (None, gpu):
            assert judge(config, at, ledger, device) == judge(config, at, plain(ledger), device)


def test_it_does_under_other_allocator_options_too() -> None:
    _, _, recorder = recorder_of("small")
    for config in (
        AllocatorConfig(expandable_segments=True),
        AllocatorConfig(max_split_bytes=32 << 20),
        AllocatorConfig(large_segment_bytes=32 << 20, max_non_split_rounding_bytes=32 << 20),
    ):
        for batch_size in (2, 17, 300):
            ledger = recorder.ledger(batch_size)
            assert isinstance(ledger.events, LineEvents)
            course = ledger.events.course
            assert course is not None
            found = course.read(batch_size, WORKSPACE, config)
            assert found == read_ledger(plain(ledger), WORKSPACE, config)


def test_a_workspace_of_any_size_is_taken_where_the_first_products_are() -> None:
    _, _, recorder = recorder_of("small")
    ledger = recorder.ledger(16)
    assert isinstance(ledger.events, LineEvents)
    course = ledger.events.course
    assert course is not None
    for workspace in (0, 512, 1 << 20, (1 << 20) + 1, 33_554_432):
        assert course.read(16, workspace, None) == read_ledger(plain(ledger), workspace, None)


def test_predicted_seconds_are_those_of_the_operations_one_by_one() -> None:
    _, setting, recorder = recorder_of("accumulation")
    rates = rates_for(find_gpu("rtx 3090"))
    for compile_mode in ("off", "default"):
        at = setting.model_copy(update={"batch_size": 24, "compile": compile_mode})
        ledger = recorder.ledger(24)
        assert isinstance(ledger.events, LineEvents)
        course = ledger.events.course
        assert course is not None
        assert predict_step(course.operations(24), rates, at, 2) == predict_step(
            ledger.operations(), rates, at, 2
        )


def test_a_step_that_does_not_repeat_is_read_event_by_event() -> None:
    config, setting, recorder = recorder_of("small")

    def leaking(batch_size: int) -> Ledger:
        found = recorder.ledger(batch_size)
        events: list[Event] = []
        for event in found.events:
            events.append(event)
            if event == Marked("forward", 1):
                events.append(Allocated(-1, 4096 * batch_size, "kept"))
        return Ledger(tuple(events), batch_size, found.num_parameters)

    line = Line.through(leaking(4), leaking(5))
    assert line.course is None
    at = setting.model_copy(update={"batch_size": 7})
    assert judge(config, at, line.ledger(7)) == judge(config, at, leaking(7))


def test_sizes_cross_from_one_pool_to_the_other_with_the_batch() -> None:
    """600 kB an image: of the small pool at batch 1, of the large one at 2; 3 images are not."""

    def record(batch_size: int) -> Ledger:
        return Ledger(step_of(lambda k: 1 + k * batch_size * 100_000), batch_size, 0)

    line = Line.through(record(2), record(3))
    assert line.course is not None
    for batch_size in range(1, 40):
        expected = read_ledger(record(batch_size), WORKSPACE, None)
        assert line.course.read(batch_size, WORKSPACE, None) == expected


def step_of(size: Callable[[int], int]) -> tuple[Event, ...]:
    """Two steps of six storages of growing sizes, released in another order than they came."""
    events: list[Event] = [Allocated(99, size(5), "weight"), Marked("build", 0)]
    work = Computed("aten.mm", "matmul", "float32", 1, 1, 1, "")
    for step in (0, 1):
        for k in range(6):
            events += [Allocated(10 * step + k, size(k), f"forward {k}"), work]
        events += [Freed(10 * step + k) for k in (1, 4)]
        events.append(Marked("forward", step))
        events += [Freed(10 * step + k) for k in (3, 5)]
        events += [Allocated(10 * step + 6, size(2), "gradient"), Freed(10 * step + 2)]
        events += [Marked("backward", step), Marked("optimizer", step)]
        events += [Freed(10 * step), Freed(10 * step + 6), Marked("zero_grad", step)]
    return tuple(events)


@pytest.mark.parametrize("seed", range(100))
def test_a_pool_may_still_grow_in_the_repeated_step(seed: int) -> None:
    """It does in one of thirty: what a step hands on may be in the next one's way."""

    def record(batch_size: int) -> Ledger:
        return Ledger(random_steps(random.Random(seed), batch_size), batch_size, 0)

    line = Line.through(record(2), record(3))
    assert line.course is not None
    for batch_size in (2, 3):
        expected = read_ledger(record(batch_size), WORKSPACE, None)
        assert line.course.read(batch_size, WORKSPACE, None) == expected


def random_steps(source: random.Random, batch_size: int) -> tuple[Event, ...]:
    """Two steps that ask and release alike: the first keeps some of its own besides, and each hands
    on storages that the next releases."""
    asked: list[tuple[int, int]] = []  # (storage, units per image), or (storage, 0) to release it
    held: list[int] = []
    for storage in range(20):
        asked.append((storage, source.randint(1, 1000)))
        held.append(storage)
        while held and source.random() < 0.4:
            asked.append((held.pop(source.randrange(len(held))), 0))
    handed_on = {k: source.randrange(len(asked)) for k in held if source.random() < 0.4}
    asked += [(k, 0) for k in held if k not in handed_on]
    kept = {k: source.randint(1, 2000) for k in range(len(asked)) if source.random() < 0.1}
    events: list[Event] = [Allocated(9999, 4096, "weight"), Marked("build", 0)]
    for step in (0, 1):
        for place, (storage, units) in enumerate(asked):
            if units:
                events.append(Allocated(100 * step + storage, 512 * units * batch_size, "asked"))
            else:
                events.append(Freed(100 * step + storage))
            if step == 0 and place in kept:
                events.append(Allocated(1000 + place, 512 * kept[place], "kept"))
            if step == 1:
                events += [Freed(k) for k, when in handed_on.items() if when == place]
        events += [Marked(phase, step) for phase in ("forward", "backward", "optimizer")]
        events.append(Marked("zero_grad", step))
    return tuple(events)


def test_a_place_recurs_where_nothing_moved_and_nothing_was_added() -> None:
    def place(addresses: list[int]) -> list[int]:
        return addresses[:1]

    def moved(addresses: list[int]) -> list[int]:
        return addresses[1:2]

    assert Recurrence(3, place, place).holds([10, 20], [(2, 4096)])
    assert not Recurrence(3, place, moved).holds([10, 20], [(2, 4096)])
    assert not Recurrence(3, place, place).holds([10, 20], [(3, 4096)])
