"""The published names, held against the libraries themselves where they can be built."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.core.schema import SwinConfig, TrainSetting
from planner.estimation.estimate import estimate
from planner.libraries import spec as drift
from planner.libraries.microsoft.spec import CHECKOUT_VARIABLE
from planner.libraries.names import SPECS, build_named, find_library, resolve_model
from planner.libraries.spec import drift_notes, package_folder
from planner.libraries.timm.spec import SPEC
from planner.libraries.torchvision import declare_missing_operators
from tests.steps import build_real, needs


def on_meta(config: SwinConfig) -> nn.Module:
    with torch.device("meta"):
        return build_real(config, TrainSetting())


def structure(module: nn.Module) -> dict[str, Any]:
    """What makes two modules the same model: shapes, windows, shifts, and rates of dropping."""
    found: dict[str, Any] = {name: tuple(p.shape) for name, p in module.named_parameters()}
    for name, part in module.named_modules():
        for field in ("window_size", "shift_size", "pretrained_window_size", "drop_prob", "p"):
            value = getattr(part, field, None)
            if value is not None:
                found[f"{name}.{field}"] = tuple(value) if isinstance(value, list) else value
    return found


# The smallest of each family; all of them are the same code with other numbers.
FAMILIES = ("swin_tiny_patch4_window7_224", "swin_s3_tiny_224", "swinv2_tiny_window16_256")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAMILIES else pytest.mark.release) for n in SPEC.published],
)
def test_timm_names_build_what_timm_builds(name: str) -> None:
    declare_missing_operators()
    import timm

    with torch.device("meta"):
        theirs = timm.create_model(name).train()
    ours = on_meta(SPEC.published[name])
    assert structure(ours) == structure(theirs)
    assert theirs.patch_embed.img_size == SPEC.published[name].image_size


def test_timm_lists_nothing_else() -> None:
    declare_missing_operators()
    import timm

    spec = find_library("timm")
    theirs = {name for name in timm.list_models("swin*") if not name.startswith("swinv2_cr_")}
    assert {name for name in timm.list_models("swin*") if spec.find(name)} == theirs
    tagged = {n for n in timm.list_pretrained("swin*") if not n.startswith("swinv2_cr_")}
    assert set(SPEC.tagged) == tagged
    classes = {name: timm.get_pretrained_cfg(name).num_classes for name in tagged}
    assert {name: config.num_classes for name, config in SPEC.tagged.items()} == classes


@needs("torchvision", "transformers")
def test_other_libraries_swins_are_built_as_their_library_does() -> None:
    """Those of the hub have their published configurations, though nothing is downloaded."""
    names = {"swin_v2_t": 28_351_570, "microsoft/swin-tiny-patch4-window7-224": 28_288_354,
             "microsoft/swinv2-base-patch4-window12-192-22k": 109_280_841}  # fmt: skip
    for name, parameters in names.items():
        with torch.device("meta"):
            module = build_named(resolve_model(name))
        assert sum(parameter.numel() for parameter in module.parameters()) == parameters, name


def test_every_name_is_its_own_with_its_classes_and_passes_its_library() -> None:
    for spec in SPECS.values():
        for name, config in {**spec.published, **spec.tagged}.items():
            of_22k = name.endswith("22k") or (spec.name == "timm" and "window12_192" in name)
            assert config.num_classes == (21841 if of_22k else 1000), name
            assert (config.library, config.name) == (spec.name, name)
            spec.check(config)


# An installed library that is not the transcribed one is noticed, without importing it.

TRANSCRIBED = json.loads((Path(drift.__file__).parent / "timm" / drift.HASHES).read_text())


@pytest.fixture(autouse=True)
def _forget() -> None:
    drift_notes.cache_clear()


def test_the_transcribed_version_says_nothing() -> None:
    if version("timm").partition("+")[0] != TRANSCRIBED["version"]:
        pytest.skip(f"timm {version('timm')} is not the transcribed one")
    for swin in (1, 2):
        assert drift_notes("timm", swin, package_folder("timm")) == ()


def test_a_file_that_differs_is_named(tmp_path: Path) -> None:
    installed = package_folder("timm")
    for name in TRANSCRIBED["files"]["1"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((installed / name).read_bytes())
    (tmp_path / "layers/mlp.py").write_text("# another\n")
    (note,) = drift_notes("timm", 1, tmp_path)
    assert note.startswith("transcribed from timm 1.0.31; ")
    assert note.endswith("is installed and its mlp.py differs: check with --record")
    (tmp_path / "layers/drop.py").unlink()  # what is gone differs
    drift_notes.cache_clear()
    (note,) = drift_notes("timm", 1, tmp_path)
    assert "its drop.py, mlp.py differ: " in note


def test_what_is_not_installed_says_nothing() -> None:
    assert drift_notes("timm", 1, None) == ()
    assert package_folder("no_such_library_of_anybody") is None


def test_an_estimate_says_that_an_authors_checkout_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SwinConfig(library="microsoft", image_size=56, depths=(1, 1), num_heads=(1, 2))
    said = "transcribed from microsoft/Swin-Transformer f82860b; another version"
    for checkout in (True, False):
        monkeypatch.setenv(CHECKOUT_VARIABLE, str(tmp_path) if checkout else "")
        assert any(said in line for line in estimate(model).assumed) is checkout
