"""Ledgers on disk: equal when read back, absent when not whole, safe among processes, bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planner import SwinConfig, TrainSetting
from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel
from planner.estimation.estimate import resolve
from planner.estimation.ledgers import step_ledger
from planner.ledger import cache as ledger_cache
from planner.ledger import cache as ledger_key
from planner.ledger.cache import decode, encode, load, store
from planner.ledger.ledger import Ledger

TINY = SwinConfig(image_size=64, embed_dim=32, depths=(1, 1), num_heads=(1, 2), num_classes=10)
SETTING = TrainSetting(precision="fp16", clip_grad=True)
KEY = {"name": "tiny", "batch": 0}


def at(batch_size: int) -> Ledger:
    return step_ledger(*resolve(TINY, SETTING.model_copy(update={"batch_size": batch_size})))


NAME = {"found": "x"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    return tmp_path / "ledgers"


def test_what_is_read_back_is_what_was_kept() -> None:
    noted = replace(at(2), notes=("a note",), is_recorded=True)
    for kept in (at(1), noted, NAME):
        store(KEY, kept)
        assert load(KEY) == kept
    store(KEY, UnsupportedError("a law", "a way out"))
    error = load(KEY)
    assert type(error) is UnsupportedError
    assert str(error) == str(UnsupportedError("a law", "a way out"))


def test_what_is_not_whole_is_absent(folder: Path) -> None:
    data = encode(KEY, at(2))
    assert decode(data, KEY) is not None
    assert decode(data, {**KEY, "batch": 2}) is None, "of another key"
    torn = [data[:length] for length in (0, 1, 20, 90, 200, len(data) // 2, len(data) - 1)]
    flipped = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(0, len(data), 499)]
    foreign = [b"\x80\x04", b"{}", os.urandom(5000), data.replace(b"ledger 4", b"ledger 1", 1)]
    store(KEY, at(2))
    (file,) = folder.iterdir()
    for content in (*torn, *flipped, *foreign):
        file.write_bytes(content)
        assert load(KEY) is None
    assert ledger_cache.entries() == [] or load(KEY) is None


def test_what_was_not_used_for_longest_goes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(encode({"name": 0}, NAME))
    monkeypatch.setattr(ledger_cache, "MAX_CACHE_BYTES", 3 * size)
    for name in range(3):
        store({"name": name}, NAME)
        for path in folder.iterdir():  # an hour older than what follows
            stat = path.stat()
            os.utime(path, (stat.st_atime, stat.st_mtime - 3600))
    load({"name": 0})  # used now
    store({"name": 3}, NAME)
    kept = [name for name in range(4) if load({"name": name}) is not None]
    assert kept == [0, 2, 3]


def test_what_a_killed_writer_left_is_removed_in_time(folder: Path) -> None:
    store(KEY, NAME)
    old, young = folder / ".old.tmp", folder / ".young.tmp"
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


def test_the_cache_is_listed_and_cleared(folder: Path) -> None:
    store({"name": "a"}, NAME)
    (folder / "foreign.ledger").write_bytes(b"something else\n")
    assert [entry.key for entry in ledger_cache.entries()] == [{"name": "a"}]
    assert ledger_cache.clear() == 2
    assert ledger_cache.entries() == []


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FactoryModel]:
    """`pack/models.py` of the user's, which imports `pack/blocks.py` and a package."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise ImportError('a key imports nothing')\n")
    (tmp_path / "pack" / "blocks.py").write_text("from . import sizes\n")
    (tmp_path / "pack" / "sizes.py").write_text("WIDTH = 8\n")
    (tmp_path / "pack" / "models.py").write_text(
        "import os, numpy\nfrom pack.blocks import Block\n\n\ndef build(): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    ledger_key._read_sources.cache_clear()
    yield FactoryModel(factory="pack.models:build")
    ledger_key._version.cache_clear()  # those that a test pretended


def key_of(model: FactoryModel, **setting: object) -> ledger_key.Key:
    ledger_key._read_sources.cache_clear()
    ledger_key._version.cache_clear()
    key = ledger_key.ledger_key(model, TrainSetting(**setting), 0)  # type: ignore[arg-type]
    assert key is not None
    return key


def test_a_factory_is_known_by_its_sources_and_what_they_import(factory: FactoryModel) -> None:
    key = key_of(factory)
    assert set(key["sources"]) == {"pack", "pack.models", "pack.blocks", "pack.sizes"}
    assert {"torch", "numpy", "planner", "python"} <= set(key["versions"])
    assert key == key_of(factory, batch_size=9)
    assert key != key_of(factory, precision="fp32")
    assert key != key_of(factory.model_copy(update={"num_classes": 5}))


def test_an_edit_of_a_source_and_another_version_of_a_package_is_another_key(
    factory: FactoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(factory)
    for file in ("models", "blocks", "sizes", "__init__"):
        before = key_of(factory)
        with Path("pack", f"{file}.py").open("a") as source:
            source.write("# edited\n")
        assert before != key_of(factory), file
    monkeypatch.setattr(ledger_key, "version", lambda name: f"{name} 99")
    other = key_of(factory)
    assert key["versions"]["numpy"] != other["versions"]["numpy"] == "numpy 99"
    assert ledger_key.ledger_key(FactoryModel(factory="nowhere_at_all:build"), SETTING, 0) is None
