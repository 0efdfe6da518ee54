"""An estimate of a compiled step without a recording: the eager step bounds it, and it says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import estimate
from planner.core.schema import ResolvedSetting, TrainSetting
from planner.core.units import MIB
from planner.estimation.estimate import resolve
from planner.ledger.ledger import Allocated, Computed, Event, Freed, Ledger, PhaseEnded, Tagged
from planner.libraries.names import resolve_model
from planner.memory.allocator_config import parse_allocator_config
from planner.memory.compiled import EXTERN_PREFIX, FUSED_PREFIX, pool_graph_memory
from planner.memory.profile import profile_memory, profile_within_limit
from planner.recording.recordings import step_of

SWIN_T = "native:swin_tiny"
KIB = 1024


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))


def compiled_ledger() -> Ledger:
    """One compiled step, by hand: forward saves 2 KiB and takes 1 more for a while, the backward
    makes a gradient of 3 KiB, and the optimizer takes 4 KiB."""

    def step(number: int, start: int) -> list[Event]:
        fused, extern = FUSED_PREFIX + "mul", EXTERN_PREFIX + "mm"
        return [
            Allocated(start, 2 * KIB, fused), Tagged(start, "activations"),
            Allocated(start + 1, 1 * KIB, extern), Freed(start + 1),
            Computed(extern, "matmul", "float32", 8, 8, 1, ""),
            Allocated(start + 2, 4, "aten.nll_loss_forward"), PhaseEnded("forward", number),
            Allocated(start + 3, 3 * KIB, extern), Tagged(start + 3, "gradients"), Freed(start),
            Freed(start + 2), PhaseEnded("backward", number),
            Allocated(start + 4, 4 * KIB, "aten._foreach_sqrt"), Freed(start + 4),
            PhaseEnded("optimizer", number), Freed(start + 3), PhaseEnded("zero_grad", number),
        ]  # fmt: skip

    batch = [
        Allocated(0, 3 * KIB, "weight"), Tagged(0, "parameters"),
        Allocated(1, 6 * KIB, "images"), Tagged(1, "activations"), PhaseEnded("build", 0),
    ]  # fmt: skip
    return Ledger((*batch, *step(0, 2), *step(1, 7)), batch_size=2, num_parameters=768)


def test_a_pool_holds_the_peak_of_both_halves() -> None:
    """Derived: 2 KiB saved and a gradient of 3 are alive at once, and nothing beside them."""
    pooled = pool_graph_memory(compiled_ledger())
    pool = [e for e in pooled.events if isinstance(e, Allocated) and "CUDA graph pool" in e.label]
    assert [(e.num_bytes, e.label) for e in pool] == [
        (2 * KIB, "CUDA graph pool (saved)"),
        (3 * KIB, "CUDA graph pool (gradients)"),
        (0, "CUDA graph pool (rest)"),
    ]
    assert pooled.pooled_saved_bytes == 2 * KIB
    freed = {e.storage for e in pooled.events if isinstance(e, Freed)}
    assert freed.isdisjoint(e.storage for e in pool)
    eager = [e.label for e in pooled.events if isinstance(e, Allocated)][5:]
    assert eager == ["aten.nll_loss_forward", "aten._foreach_sqrt"] * 2
    tags = {e.storage: e.category for e in pooled.events if isinstance(e, Tagged)}
    assert [tags.get(e.storage) for e in pool] == ["activations", "gradients", None]


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
def test_a_pool_is_reserved_in_segments_of_its_own(options: str) -> None:
    """Derived: its 5 KiB take a segment of 2 MiB, which what is eager does not share."""
    config = parse_allocator_config(options)
    pooled = pool_graph_memory(compiled_ledger())
    plain = profile_memory(replace(pooled, pool_requests=()), 0, config)
    found = profile_memory(pooled, 0, config)
    assert found.peak_reserved_bytes - plain.peak_reserved_bytes == 2 * MIB - 5 * KIB
    assert found.peak_allocated_bytes == plain.peak_allocated_bytes
    assert sum(found.reserved_by_stream.values()) == found.peak_reserved_bytes
    assert profile_within_limit(pooled, 0, config, found.peak_reserved_bytes) == found
    assert profile_within_limit(pooled, 0, config, found.peak_reserved_bytes - 1) is None


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_an_unrecorded_estimate_is_the_eager_steps_and_says_so(mode: str) -> None:
    eager = estimate(SWIN_T, compile="off", batch_size=8, gpu="a100-sxm-80gb")
    compiled = estimate(SWIN_T, compile=mode, batch_size=8, gpu="a100-sxm-80gb")
    assert compiled.peak_reserved_bytes == eager.peak_reserved_bytes
    assert compiled.low_bytes < eager.low_bytes < eager.high_bytes < compiled.high_bytes
    (note,) = [n for n in compiled.assumed if "the eager step in place of the compiled one" in n]
    assert "--record" in note
    times = [step.throughput for step in (eager, compiled) if step.throughput is not None]
    assert times[0].images_per_second < times[1].images_per_second


def test_checkpointing_may_come_to_nothing_in_an_unrecorded_step() -> None:
    """torch may recompute every block at once, which takes what the unchecked step takes."""
    unchecked = estimate(SWIN_T, batch_size=32, compile="default")
    checked = estimate(SWIN_T, batch_size=32, compile="default", checkpointing="blocks")
    assert 1.25 * checked.peak_reserved_bytes < unchecked.peak_reserved_bytes
    assert checked.high_bytes > unchecked.peak_reserved_bytes


def test_what_shares_a_recording_and_what_does_not() -> None:
    """Tuning and sizes change no byte; scope and budget do."""
    model = resolve_model(SWIN_T, {})

    def key(**fields: Any) -> TrainSetting:
        return step_of(*resolve(model, TrainSetting(compile="default", **fields)), None).setting

    others = [key(compile_scope="blocks"), key(activation_memory_budget=0.5)]
    assert len({key(), *others}) == 3
    _, broken = resolve(model, TrainSetting(compile="default", compile_scope="blocks"))
    spread = ResolvedSetting(broken.model_copy(update={"parallelism": "ddp"}))
    assert step_of(model, spread, None).setting.compile == "off"
