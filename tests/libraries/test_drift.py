"""An installed library that is not the transcribed one is noticed, without importing it."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from planner.core.schema import SwinConfig
from planner.estimation.estimate import estimate
from planner.libraries import spec as drift
from planner.libraries.microsoft.spec import CHECKOUT_VARIABLE
from planner.libraries.registry import find_library
from planner.libraries.spec import drift_notes, package_folder

LIBRARIES = ("timm",)


@pytest.fixture(autouse=True)
def _forget() -> None:
    drift_notes.cache_clear()


def hashes(library: str) -> dict[str, dict[str, str]]:
    file = Path(drift.__file__).parent / library / drift.HASHES
    found: dict[str, dict[str, str]] = json.loads(file.read_text())["files"]
    return found


def copy_of(library: str, folder: Path) -> Path:
    """A folder with the installed library's transcribed files, as if it were the library."""
    installed = package_folder(library)
    if installed is None:
        pytest.skip(f"{library} is not installed")
    for name in hashes(library)["1"]:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((installed / name).read_bytes())
    return folder


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_transcribed_version_says_nothing(library: str) -> None:
    if package_folder(library) is None:
        pytest.skip(f"{library} is not installed")
    transcribed = json.loads((Path(drift.__file__).parent / library / drift.HASHES).read_text())
    if version(library).partition("+")[0] != transcribed["version"]:
        pytest.skip(f"{library} {version(library)} is not the transcribed one")
    for swin in (1, 2):
        assert drift_notes(library, swin, package_folder(library)) == ()


def test_a_file_that_differs_is_named(tmp_path: Path) -> None:
    folder = copy_of("timm", tmp_path)
    (folder / "layers/mlp.py").write_text("# another\n")
    (note,) = drift_notes("timm", 1, folder)
    assert note.startswith("transcribed from timm 1.0.31; ")
    assert note.endswith("is installed and its mlp.py differs: check with --record")
    (folder / "layers/drop.py").unlink()  # what is gone differs
    drift_notes.cache_clear()
    (note,) = drift_notes("timm", 1, folder)
    assert "its drop.py, mlp.py differ: " in note


def test_what_is_not_installed_says_nothing() -> None:
    assert drift_notes("timm", 1, None) == ()
    assert package_folder("no_such_library_of_anybody") is None


def test_an_authors_checkout_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_library("microsoft")
    model = SwinConfig(library="microsoft")
    monkeypatch.delenv(CHECKOUT_VARIABLE, raising=False)
    assert spec.drift(model) == ()
    monkeypatch.setenv(CHECKOUT_VARIABLE, str(tmp_path))
    (note,) = spec.drift(model)
    assert note.startswith("transcribed from microsoft/Swin-Transformer f82860b; another version")


def test_an_estimate_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SwinConfig(library="microsoft", image_size=56, depths=(1, 1), num_heads=(1, 2))
    monkeypatch.setenv(CHECKOUT_VARIABLE, str(tmp_path))
    assert any("check with --record" in line for line in estimate(model).assumed)
    monkeypatch.delenv(CHECKOUT_VARIABLE)
    assert not any("check with --record" in line for line in estimate(model).assumed)
