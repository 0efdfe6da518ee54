"""Steps that are recorded: what is kept of them, where, and what is said when there are none."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import SwinConfig, TrainSetting, estimate, largest_batch
from planner.core.errors import ContractError, UnsupportedError, UsageError
from planner.core.schema import FactoryModel, ResolvedSetting
from planner.estimation.estimate import read_resolved, resolve
from planner.estimation.ledgers import record_ledgers, step_ledger
from planner.ledger import cache as ledger_cache
from planner.ledger.cache import decode, encode, load, source_digest, store
from planner.ledger.ledger import HUGE, AffineLedger, Allocated, Computed, Ledger, ShapeLedgers
from planner.machine.hardware import all_gpus, find_gpu
from planner.memory.profile import _walk_template, find_instant, has_kept_workspaces, walk_ledger
from planner.memory.scratch import Processors, size_scratch
from planner.recording import recordings
from planner.report.text import cache_row
from planner.step.training import run_on_shapes
from tests.steps import in_canonical_order, on_shapes


def model_of(name: str) -> FactoryModel:
    factory = f"tests.recording.models:{name}"
    return FactoryModel(factory=factory, image_size=(32, 32), num_classes=16)


def setting(**fields: Any) -> ResolvedSetting:
    return ResolvedSetting(TrainSetting(**{"precision": "bf16", "batch_size": 5, **fields}))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    recordings.clear()
    return tmp_path / "ledgers"


def no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded again; as in a new process, what is known is on disk."""
    recordings.clear()
    monkeypatch.setattr(recordings.recorder, "record", None)


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
    steps = [recordings.step_of(model, setting(), find_gpu(card)) for card in cards]
    assert steps[0] == steps[1] != steps[2]
    assert recordings.step_of(model, setting(accumulate=9), None) == recordings.step_of(
        model, setting(accumulate=2), None
    )
    assert len({step.setting for step in steps}) == 1
    few = recordings.stand_ins(all_gpus()[:3])
    assert all(gpu is stand_in for gpu, stand_in in few.items())
    assert len(set(recordings.stand_ins(all_gpus()).values())) <= 16


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
    record = recordings.recorder.record

    def counted(*given: Any) -> Any:
        calls.append(given)
        return record(*given)

    monkeypatch.setattr(recordings.recorder, "record", counted)
    recordings.clear()
    step_ledger(model, chosen)
    assert not calls
    recordings.forget([recordings.step_of(model, chosen, None)])
    step_ledger(model, chosen)
    assert len(calls) == 1


def test_an_error_that_stays_is_kept_and_another_is_not() -> None:
    frozen = setting(frozen_stages=1)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="frozen_stages is 1"):
            step_ledger(model_of("convolutional"), frozen)
        recordings.clear()
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


# A step on shapes that runs at a huge batch gives the ledgers of others.

walk_anew = _walk_template.__wrapped__  # the cache takes equal ledgers for one
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


def ledgers_of(case: str) -> ShapeLedgers:
    model, of_model, of_setting = SWINS[case]
    config, setting = read_resolved(model, TrainSetting(**of_setting), None, of_model)
    build = on_shapes(config, setting)

    def run(batch_size: int) -> Ledger:
        return run_on_shapes(build, config, setting.model_copy(update={"batch_size": batch_size}))

    return ShapeLedgers(run)


@pytest.mark.parametrize("case", SWINS)
def test_one_run_of_a_huge_batch_gives_every_other_ledger(case: str) -> None:
    run = ledgers_of(case).run
    line = AffineLedger.from_huge(run(HUGE))
    for batch in (2, 17):
        found, expected = line.ledger(batch), run(batch)
        assert in_canonical_order(found.events) == in_canonical_order(expected.events)
        assert found.num_parameters == expected.num_parameters
        # What is read off the line's own ledger is what the events say by themselves.
        alone = replace(found, events=tuple(found.events))
        assert walk_ledger(found) == walk_anew(alone, has_kept_workspaces())
        for step in (0, 1):
            assert list(found.operations(step)) == list(alone.operations(step))
        there, made = size_scratch(found, A100), size_scratch(alone, A100)
        assert there == made != found
        assert there.events == tuple(made.events)
        made = replace(there, events=tuple(made.events))
        assert walk_ledger(there) == walk_anew(made, has_kept_workspaces())
        peak = walk_ledger(there).steady.peak_index
        assert find_instant(there, peak) == find_instant(made, peak)


def test_a_huge_batch_shows_what_shrinks_with_the_batch() -> None:
    """fixed + per image * batch, where the fixed part is negative: 3 * batch - 5 bytes."""

    def record(batch: int) -> Ledger:
        work = Computed("aten.mm", "matmul", "float32", 7 * batch + 11, 3 * batch - 5, 1, "")
        return Ledger((Allocated(0, 3 * batch - 5, "aten.mm"), work), batch, 0)

    line = AffineLedger.from_huge(record(HUGE))
    assert line.ledger(9) == record(9)


def test_a_step_on_shapes_runs_three_times_at_most() -> None:
    batches = []
    ledgers = ledgers_of("native")
    run = ledgers.run

    def counted(batch_size: int) -> Ledger:
        batches.append(batch_size)
        return run(batch_size)

    ledgers.run = counted
    for batch_size in (8, 8, 1, 2, 30, 1, 8, 64):
        found, expected = ledgers.ledger(batch_size), run(batch_size)
        assert in_canonical_order(found.events) == in_canonical_order(expected.events)
    assert batches == [8, 1, HUGE]


# Ledgers on disk: equal when read back, absent when not whole, safe among processes, bounded.

TINY = SwinConfig(image_size=64, embed_dim=32, depths=(1, 1), num_heads=(1, 2), num_classes=10)
TINY_SETTING = TrainSetting(precision="fp16", clip_grad=True)
KEY = {"name": "tiny", "batch": 0}


def at(batch_size: int) -> Ledger:
    return step_ledger(*resolve(TINY, TINY_SETTING.model_copy(update={"batch_size": batch_size})))


NAME = {"found": "x"}


def test_what_is_read_back_is_what_was_kept() -> None:
    noted = replace(at(2), notes=("a note",), is_recorded=True)
    for value in (at(1), noted, NAME):
        store(KEY, value)
        assert load(KEY) == value
    error = UnsupportedError("a law", "a way out")
    store(KEY, error)
    assert (type(load(KEY)), str(load(KEY))) == (UnsupportedError, str(error))


def test_what_is_not_whole_is_absent(cache: Path) -> None:
    data = encode(KEY, at(2))
    assert decode(data, KEY) is not None
    assert decode(data, {**KEY, "batch": 2}) is None, "of another key"
    torn = [data[:length] for length in (0, 1, 20, 90, 200, len(data) // 2, len(data) - 1)]
    flipped = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(0, len(data), 499)]
    foreign = [b"\x80\x04", b"{}", os.urandom(5000), data.replace(b"ledger 4", b"ledger 1", 1)]
    store(KEY, at(2))
    (file,) = cache.iterdir()
    for content in (*torn, *flipped, *foreign):
        file.write_bytes(content)
        assert load(KEY) is None


def test_what_was_not_used_for_longest_goes_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(encode({"name": 0}, NAME))
    monkeypatch.setattr(ledger_cache, "MAX_CACHE_BYTES", 3 * size)
    for name in range(3):
        store({"name": name}, NAME)
        for path in cache.iterdir():  # an hour older than what follows
            stat = path.stat()
            os.utime(path, (stat.st_atime, stat.st_mtime - 3600))
    load({"name": 0})  # used now
    store({"name": 3}, NAME)
    kept = [name for name in range(4) if load({"name": name}) is not None]
    assert kept == [0, 2, 3]


def test_what_a_killed_writer_left_is_removed_in_time(cache: Path) -> None:
    store(KEY, NAME)
    old, young = cache / ".old.tmp", cache / ".young.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store(KEY, NAME)
    assert (old.exists(), young.exists()) == (False, True)


def test_a_cache_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        store(KEY, NAME)
        assert load(KEY) is None
    said = capsys.readouterr().err
    assert said.count("cannot be kept") == 1
    assert "Not a directory" in said


def test_the_cache_is_listed_and_cleared(cache: Path) -> None:
    store({"title": "a"}, NAME)  # as the prior of a search, which is no step
    (cache / "foreign.ledger").write_bytes(b"something else\n")
    assert [cache_row(e, 0.0)[1] for e in ledger_cache.entries()] == ["what a search expects"]
    assert (ledger_cache.clear(), ledger_cache.entries()) == (2, [])


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FactoryModel:
    """`pack/models.py` of the user's, which imports `pack/blocks.py` and a package."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise ImportError('a key imports nothing')\n")
    (tmp_path / "pack" / "blocks.py").write_text("from . import sizes\n")
    (tmp_path / "pack" / "sizes.py").write_text("WIDTH = 8\n")
    (tmp_path / "pack" / "models.py").write_text(
        "import os, numpy\nfrom pack.blocks import Block\n\n\ndef build(): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    return FactoryModel(factory="pack.models:build")


def key_of(model: FactoryModel, **setting: object) -> ledger_cache.Key:
    ledger_cache._read_sources.cache_clear()
    key = ledger_cache.ledger_key(model, TrainSetting(**setting), 0)  # type: ignore[arg-type]
    assert key is not None
    return key


def test_a_factory_is_known_by_its_sources_and_what_they_import(factory: FactoryModel) -> None:
    key = key_of(factory)
    assert set(key["sources"]) == {"pack", "pack.models", "pack.blocks", "pack.sizes"}
    assert {"torch", "numpy", "planner", "python"} <= set(key["versions"])
    assert key == key_of(factory, batch_size=9)
    assert key != key_of(factory, precision="fp32")
    assert key != key_of(factory.model_copy(update={"num_classes": 5}))
    # The emulated GPU decides a ledger too, and is C.
    assert source_digest(("machine/emulated/source",)) != source_digest(())


def test_an_edit_of_a_source_and_another_version_of_a_package_is_another_key(
    factory: FactoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(factory)
    for file in ("models", "blocks", "sizes", "__init__"):
        before = key_of(factory)
        with Path("pack", f"{file}.py").open("a") as source:
            source.write("# edited\n")
        assert before != key_of(factory), file
    monkeypatch.setattr(ledger_cache, "installed_version", lambda name: f"{name} 99")
    other = key_of(factory)
    assert key["versions"]["numpy"] != other["versions"]["numpy"] == "numpy 99"
    missing = FactoryModel(factory="nowhere_at_all:build")
    assert ledger_cache.ledger_key(missing, TINY_SETTING, 0) is None
