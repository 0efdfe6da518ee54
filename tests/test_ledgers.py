"""Steps that are recorded: what is kept of them, where, and what is said when there are none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import TrainSetting, estimate, largest_batch
from planner.core.errors import ContractError, UnsupportedError, UsageError
from planner.core.schema import FactoryModel, ResolvedSetting
from planner.estimation.estimate import choose
from planner.estimation.ledgers import record_ledgers, step_ledger
from planner.ledger import cache as ledger_cache
from planner.ledger.ledger import HUGE, AffineLedger, Allocated, Computed, Ledger, Recorder
from planner.machine.hardware import all_gpus, find_gpu
from planner.memory.profile import instant, walk, walk_ledger
from planner.memory.scratch import Processors, on_device
from planner.recording import kept
from planner.step.training import record_training
from tests.building import on_shapes
from tests.equality import in_canonical_order


def model_of(name: str) -> FactoryModel:
    factory = f"tests.recording.models:{name}"
    return FactoryModel(factory=factory, image_size=(32, 32), num_classes=16)


def setting(**fields: Any) -> ResolvedSetting:
    return ResolvedSetting(TrainSetting(**{"precision": "bf16", "batch_size": 5, **fields}))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    kept.clear()
    return tmp_path / "ledgers"


def no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded again; as in a new process, what is known is on disk."""
    kept.clear()
    monkeypatch.setattr(kept.recorder, "record", None)


def test_a_step_is_recorded_at_its_batch_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chosen = model_of("convolutional"), setting(batch_size=8)
    first = step_ledger(model, chosen)
    assert (first.batch_size, first.is_recorded) == (8, True)
    assert any("at batch 8 on an emulated a100-sxm-80gb" in note for note in first.notes)
    no_recorder(monkeypatch)
    assert step_ledger(model, chosen) == first


def test_what_shares_a_recording_and_what_does_not() -> None:
    """The memory of a card does not tell two steps apart; its kernels do."""
    model, cards = model_of("convolutional"), ("a100-sxm-80gb", "a100-sxm-40gb", "rtx-3090")
    steps = [kept.step_of(model, setting(), find_gpu(card)) for card in cards]
    assert steps[0] == steps[1] != steps[2]
    assert kept.step_of(model, setting(accumulate=9), None) == kept.step_of(
        model, setting(accumulate=2), None
    )
    assert len({step.setting for step in steps}) == 1
    few = kept.stand_ins(all_gpus()[:3])
    assert all(gpu is stand_in for gpu, stand_in in few.items())
    assert len(set(kept.stand_ins(all_gpus()).values())) <= 16


def test_the_largest_batch_of_any_model_fits_and_the_next_does_not() -> None:
    model = model_of("convolutional")
    best = largest_batch(model, memory_bytes="700MiB", precision="fp32")
    assert best is not None
    assert best.fits
    batch = best.setting.batch_size
    assert batch > 100
    single = estimate(model, best.setting, memory_bytes="700MiB")
    assert replace(single, assumed=()) == replace(best, assumed=())
    more = estimate(model, best.setting, memory_bytes="700MiB", batch_size=batch + 1)
    assert not more.fits or more.num_alloc_retries, "only by freeing cached memory"


def test_what_is_forgotten_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chosen = model_of("convolutional"), setting()
    step_ledger(model, chosen)
    calls = []
    record = kept.recorder.record

    def counted(*given: Any) -> Any:
        calls.append(given)
        return record(*given)

    monkeypatch.setattr(kept.recorder, "record", counted)
    kept.clear()
    step_ledger(model, chosen)
    assert not calls
    kept.forget([kept.step_of(model, chosen, None)])
    step_ledger(model, chosen)
    assert len(calls) == 1


def test_an_error_that_stays_is_kept_and_another_is_not() -> None:
    frozen = setting(frozen_stages=1)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="frozen stages"):
            step_ledger(model_of("convolutional"), frozen)
        kept.clear()
    with pytest.raises(UsageError, match="NoSuchModel"):
        step_ledger(model_of("NoSuchModel"), setting())
    assert [entry.key["setting"]["frozen_stages"] for entry in ledger_cache.entries()] == [1]


def test_a_step_with_two_optimizers_is_refused() -> None:
    with pytest.raises(ContractError, match=r"optimizer of its own \(Adam\)"):
        step_ledger(model_of("Adversarial"), setting())


def test_a_limit_ends_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waiting.py").write_text("import time\n\n\ndef build():\n    time.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = FactoryModel(factory="waiting:build")
    (error,) = record_ledgers([(model, setting(), None)], limit_seconds=1)
    assert error is not None
    assert "in the time that was left" in error.message


def test_no_torch_is_imported_for_it(cache: Path) -> None:
    command = ["estimate", "tests.recording.models:convolutional", "--image-size", "32"]
    command += ["--num-classes", "16", "--json"]
    script = f"import sys\nfrom planner.cli import main\nmain({command!r})\n"
    script += "assert 'torch' not in sys.modules"
    for said in ("Recording", ""):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert done.stderr.startswith(said)
        assert bool(done.stderr) == bool(said)
    assert len(list(cache.iterdir())) == 1


# A step on shapes recorded at a huge batch, read at others.

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
