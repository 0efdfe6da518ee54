"""The real modules: each library builds, runs, attends and checkpoints as it was asked to."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.maps import HEADS, Trainable
from planner.libraries.microsoft.spec import CHECKOUT_VARIABLE
from planner.libraries.names import SPECS, find_library
from planner.libraries.torchvision import declare_missing_operators
from tests.covering import covering
from tests.steps import Changes, build_real, name_of, needs
from tests.test_checkpointing import saved_bytes
from tests.trainers.cases import tiny

BUILT = ("native", "timm")


def small(library: str, version: int, **fields: object) -> SwinConfig:
    return tiny(library, version, **{"num_heads": (2, 4), "drop_path_rate": 0.2, **fields})


def setting(**fields: object) -> TrainSetting:
    return TrainSetting.model_validate(fields)


def run(module: nn.Module, config: SwinConfig) -> Tensor:
    """Logits of a training forward, from one seed."""
    torch.manual_seed(0)
    images = torch.randn(2, config.in_channels, *config.image_size)
    output = module(images)
    logits = output if isinstance(output, Tensor) else output.logits
    assert isinstance(logits, Tensor)
    return logits


def gradients(config: SwinConfig, how: TrainSetting) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = build_real(config, how)
    assert module.training
    torch.manual_seed(2)
    run(module, config).square().mean().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


# Each kind of checkpointing once, in each library, in each version.
CHECKPOINTED = covering(
    BUILT,
    (1, 2),
    ("blocks", "blocks:3", "blocks:every-2", "selective", "stages", "stages:0"),
)  # fmt: skip


@pytest.mark.parametrize(("library", "version", "checkpointing"), CHECKPOINTED)
def test_checkpointing_saves_less_and_changes_nothing(
    library: str, version: int, checkpointing: str
) -> None:
    config = small(library, version)
    plain = gradients(config, setting())
    checkpointed = gradients(config, setting(checkpointing=checkpointing))
    assert checkpointed.keys() == plain.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    images = torch.zeros(2, config.in_channels, *config.image_size)
    modules = (build_real(config, setting(checkpointing=kind)) for kind in (checkpointing, "none"))
    less, more = (saved_bytes(module, images) for module in modules)
    assert less < 0.8 * more


def test_the_librarys_own_attention_is_resolved() -> None:
    """What each does by itself on CUDA."""
    own = {
        (name, version): spec.resolve(small(name, version), setting()).attention
        for name, spec in SPECS.items()
        for version in (1, 2)
    }
    fused = {key for key, attention in own.items() if attention == "sdpa"}
    assert fused == {("native", 1), ("native", 2)}


@pytest.mark.parametrize(
    ("library", "version", "fields", "message"),
    [
        ("timm", 2, {"attention": "sdpa"}, "timm's Swin version 2 has only eager attention"),
        ("native", 1, {"checkpointing": "stages:0,2"}, "the model has 2 stages, counted from 0"),
        ("timm", 1, {"checkpointing": "blocks:9"}, "has 4 blocks: checkpointing is blocks:9"),
    ],
)
def test_refuses_what_a_library_cannot_do(
    library: str, version: int, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        find_library(library).resolve(small(library, version), setting(**fields))
    assert caught.value.way_out


def test_refuses_what_a_library_cannot_build_with_every_fault() -> None:
    config = small("timm", 1, absolute_position_embedding=True, patch_norm=False)
    with pytest.raises(UnsupportedError) as caught:
        build_real(config, setting())
    for fault in ("absolute_position_embedding: must be False", "patch_norm: must be True"):
        assert fault in str(caught.value)


def test_a_library_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from planner.libraries.timm import spec

    def build(config: SwinConfig, attention: str) -> nn.Module:
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    monkeypatch.setattr(spec, "build", build)
    with pytest.raises(PlannerError, match=r"pip install 'planner\[timm\]'"):
        build_real(small("timm", 1), setting())


AUTHORS_MODULE = """
from torch import nn

class {name}(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments
        self.layers = nn.ModuleList(nn.Identity() for _ in arguments["depths"])
        self.layers[0].use_checkpoint = False

print("a line that must not reach standard output")
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the authors' repository, which is in no package index."""
    (tmp_path / "models").mkdir()
    for name, file in (("SwinTransformer", ""), ("SwinTransformerV2", "_v2")):
        source = AUTHORS_MODULE.format(name=name)
        (tmp_path / "models" / f"swin_transformer{file}.py").write_text(source)
    monkeypatch.setenv(CHECKOUT_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("version", [1, 2])
def test_microsoft_comes_from_a_checkout(version: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = small("microsoft", version, drop_rate=0.1)
    how = setting(checkpointing="blocks")
    module = build_real(config, how)
    arguments = module.arguments
    assert module.layers[0].use_checkpoint is True  # type: ignore[index, union-attr]
    assert arguments["drop_rate"] == 0.1  # type: ignore[index]
    assert ("pretrained_window_sizes" in arguments) == (version == 2)  # type: ignore[operator]
    assert capsys.readouterr().out == ""


def test_microsoft_without_a_checkout_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CHECKOUT_VARIABLE, raising=False)
    with pytest.raises(PlannerError, match="git clone"):
        build_real(small("microsoft", 1), setting())
    monkeypatch.setenv(CHECKOUT_VARIABLE, str(tmp_path))
    with pytest.raises(PlannerError, match=r"has no models/swin_transformer\.py"):
        build_real(small("microsoft", 1), setting())


# Our adapters beside those of peft: the same layers, the same weights.


@needs("timm", "peft")
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (tiny("timm", depths=(1, 1)), {"frozen_stages": 1}),
        (tiny("timm", depths=(1, 1)), {"lora_targets": "all"}),
    ],
    ids=name_of,
)
def test_what_is_trained_is_what_peft_trains(config: SwinConfig, changes: Changes) -> None:
    declare_missing_operators()
    from peft import LoraConfig, get_peft_model

    spec = find_library(config.library)
    setting = spec.resolve(config, TrainSetting(lora_rank=4, **changes))
    chosen = Trainable.from_setting(setting)
    plain = build_real(config, TrainSetting(attention=setting.attention))
    theirs = get_peft_model(plain, LoraConfig(r=4, target_modules=chosen.adapted))
    for name, parameter in plain.named_parameters():
        if name.startswith(HEADS):
            parameter.requires_grad_(True)
    ours, theirs = (
        sorted(tuple(p.shape) for p in module.parameters() if p.requires_grad)
        for module in (build_real(config, setting), theirs)
    )
    assert ours == theirs
