"""The published names, held against the libraries themselves where they can be built."""

from __future__ import annotations

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
from planner.libraries.building import declare_missing_operators
from planner.libraries.microsoft.spec import CHECKOUT_VARIABLE
from planner.libraries.registry import SPECS, find_library
from planner.libraries.spec import drift_notes, package_folder
from planner.libraries.timm.spec import PUBLISHED as TIMM
from planner.libraries.timm.spec import TAGGED
from planner.libraries.torchvision.spec import PUBLISHED as TORCHVISION
from tests.building import build_real

# Counted in the libraries' own models: parameters by version and size, 1000 classes.
PARAMETERS = {
    (1, "tiny"): 28_288_354,
    (1, "small"): 49_606_258,
    (1, "base"): 87_768_224,
    (1, "large"): 196_532_476,
    (2, "tiny"): 28_347_154,
    (2, "small"): 49_728_418,
    (2, "base"): 87_918_816,
    (2, "large"): 196_739_932,
}
# torchvision's version 2 has a bias for the keys, which it sets to zero in each forward.
TORCHVISION_V2 = {"swin_v2_t": 28_351_570, "swin_v2_s": 49_737_442, "swin_v2_b": 87_930_848}

CHECKED = [
    *(("native", f"swin_{size}", (1, size)) for size in ("tiny", "base")),
    *(("native", f"swinv2_{size}", (2, size)) for size in ("small", "large")),
    ("transformers", "microsoft/swin-large-patch4-window7-224", (1, "large")),
    ("transformers", "microsoft/swinv2-tiny-patch4-window16-256", (2, "tiny")),
]


def on_meta(config: SwinConfig) -> nn.Module:
    with torch.device("meta"):
        return build_real(config, TrainSetting())


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
EACH_FAMILY = ("swin_tiny_patch4_window7_224", "swin_s3_tiny_224", "swinv2_tiny_window16_256")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in EACH_FAMILY else pytest.mark.release) for n in TIMM],
)
def test_timm_names_build_what_timm_builds(name: str) -> None:
    declare_missing_operators()
    import timm

    with torch.device("meta"):
        theirs = timm.create_model(name).train()
    ours = on_meta(TIMM[name])
    assert structure(ours) == structure(theirs)
    assert theirs.patch_embed.img_size == TIMM[name].image_size


def test_timm_lists_nothing_else() -> None:
    declare_missing_operators()
    import timm

    spec = find_library("timm")
    theirs = {name for name in timm.list_models("swin*") if not name.startswith("swinv2_cr_")}
    assert {name for name in timm.list_models("swin*") if spec.find(name)} == theirs
    tagged = {n for n in timm.list_pretrained("swin*") if not n.startswith("swinv2_cr_")}
    assert set(TAGGED) == tagged
    classes = {name: timm.get_pretrained_cfg(name).num_classes for name in tagged}
    assert {name: config.num_classes for name, config in TAGGED.items()} == classes


def test_torchvision_names_build_what_torchvision_builds() -> None:
    declare_missing_operators()
    from torchvision import models

    for name, config in TORCHVISION.items():
        with torch.device("meta"):
            theirs = models.get_model(name)
        ours = on_meta(config)
        assert structure(ours) == structure(theirs), name
        if name in TORCHVISION_V2:
            assert num_parameters(ours) == TORCHVISION_V2[name]


def test_parameter_counts() -> None:
    for library, name, size in CHECKED:
        config = find_library(library).published[name]
        assert config.num_classes == 1000
        assert num_parameters(on_meta(config)) == PARAMETERS[size], name


def test_imagenet_22k_names_have_its_classes() -> None:
    for spec in SPECS.values():
        for name, config in {**spec.published, **spec.tagged}.items():
            pretrained = name.endswith(("22k", "in22k")) or (
                spec.name == "timm" and "window12_192" in name
            )
            assert config.num_classes == (21841 if pretrained else 1000), name


def test_every_name_is_its_own_and_passes_its_library() -> None:
    for spec in SPECS.values():
        for name, config in {**spec.published, **spec.tagged}.items():
            assert (config.library, config.name) == (spec.name, name)
            spec.check(config)


# An installed library that is not the transcribed one is noticed, without importing it.

LIBRARIES = ("timm",)


@pytest.fixture(autouse=True)
def _forget() -> None:
    drift_notes.cache_clear()


def hashes(library: str) -> dict[str, dict[str, str]]:
    file = Path(drift.__file__).parent / library / drift.HASHES
    return json.loads(file.read_text())["files"]


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
