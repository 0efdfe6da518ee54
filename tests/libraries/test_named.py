"""A name that is no Swin of ours is what the installed library makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import NamedModel, TrainSetting
from planner.estimation.estimate import estimate, resolve
from planner.ledger.ledger import Computed
from planner.libraries.names import build_named, look_up_here, resolve_model
from tests.equality import recorded
from tests.libraries.steps import require

HUB_TINY = "microsoft/swin-tiny-patch4-window7-224"


def named(text: str, **overrides: str) -> NamedModel:
    model = resolve_model(text, overrides)
    assert isinstance(model, NamedModel)
    return model


@pytest.mark.parametrize(
    ("text", "task", "size"),
    [
        ("timm:swinv2_cr_tiny_ns_224", "classification", (3, 224, 224)),
        ("torchvision:inception_v3", "classification", (3, 299, 299)),
        ("torchvision:r3d_18", "video", (3, 16, 112, 112)),
        ("torchvision:fcos_resnet50_fpn", "detection", (3, 480, 640)),
        ("transformers:ViTForImageClassification", "own-loss", (3, 224, 224)),
        ("transformers:VideoMAEForVideoClassification", "own-loss", (3, 16, 224, 224)),
    ],
)
def test_takes_the_size_of_the_librarys_own_weights(
    text: str, task: str, size: tuple[int, ...]
) -> None:
    require(text.partition(":")[0])
    model = named(text)
    assert model.title == text
    assert model.task == task
    frames = () if model.num_frames is None else (model.num_frames,)
    assert (model.in_channels, *frames, *model.image_size) == size


def test_a_language_model_has_tokens_and_no_image() -> None:
    require("transformers")
    model = named("transformers:BertForMaskedLM", sequence_length="128")
    assert (model.sequence_length, model.image_size) == (128, None)
    with pytest.raises(UnsupportedError, match="BertForMaskedLM has no image_size"):
        resolve_model("transformers:BertForMaskedLM", {"image_size": "224"})


def test_reads_a_configuration_of_transformers_from_a_folder(tmp_path: Path) -> None:
    require("transformers")
    fields = {
        "architectures": ["SwinForMaskedImageModeling"], "image_size": 64, "embed_dim": 24,
        "depths": [2, 2], "num_heads": [3, 6],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    by_folder = named(f"transformers:{tmp_path}")
    by_file = named(f"transformers:{tmp_path / 'config.json'}")
    assert by_folder.image_size == (64, 64)
    assert by_folder.config_sha256 == by_file.config_sha256
    (tmp_path / "config.json").write_text(json.dumps({**fields, "embed_dim": 48}))
    assert named(f"transformers:{tmp_path}").config_sha256 != by_folder.config_sha256
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="does not say which class it configures"):
        resolve_model(f"transformers:{tmp_path}", {})


def test_a_size_is_named_as_the_configuration_has_it() -> None:
    """Hiera's has both sides, and refuses one."""
    require("transformers")
    torch = pytest.importorskip("torch")
    model = named("transformers:HieraForImageClassification")
    with torch.device("meta"):
        assert list(build_named(model, "library").config.image_size) == [224, 224]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:vit_bas_patch16_224", "Did you mean 'vit_base_patch16_224'"),
        ("timm:vit_base_patch16_224.augre_in21k", "'vit_base_patch16_224.augreg_in21k'"),
        ("torchvision:swin3d_x", "'swin3d_"),
        ("transformers:ViTForImageClasification", "Did you mean 'ViTForImageClassification'"),
        ("transformers:google/vit-base", "nothing is downloaded"),
        ("transformers:Trainer", "no model with a configuration"),
    ],
)
def test_an_unknown_name_is_said_with_the_nearest(text: str, message: str) -> None:
    require(text.partition(":")[0])
    with pytest.raises(UsageError) as caught:
        resolve_model(text, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["torchvision:raft_small", "torchvision:keypointrcnn_resnet50_fpn", "transformers:BertModel"],
)
def test_a_step_that_is_not_known_is_refused_with_the_way_out(text: str) -> None:
    require(text.partition(":")[0])
    with pytest.raises(UnsupportedError, match=r"planner\.training\.tasks"):
        resolve_model(text, {})


def test_a_library_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PlannerError) as caught:
        look_up_here("timm", "vit_base_patch16_224")
    assert "timm is not installed" in str(caught.value)
    assert "pip install 'planner[timm]'" in str(caught.value)


@pytest.mark.parametrize(
    ("library", "attention", "kernel"),
    [
        ("timm", "eager", "_softmax"),
        ("torchvision", "eager", "_safe_softmax"),
        ("transformers", "eager", "_softmax"),
        ("transformers", "library", "_scaled_dot_product_flash_attention"),
        ("a Swin of transformers", "eager", "_softmax"),
        ("a Swin of transformers", "sdpa", "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_what_was_asked_for(
    library: str, attention: str, kernel: str, tmp_path: Path
) -> None:
    """By timm's switch, by a configuration of transformers, by torch's choice of kernels; within
    what backward runs again too."""
    require(library.rpartition(" ")[2])
    config = {
        "architectures": ["DeiTForImageClassification"], "image_size": 32, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    texts = {
        "timm": "timm:test_vit", "torchvision": "torchvision:vit_b_32",
        "transformers": f"transformers:{tmp_path}",
    }  # fmt: skip
    text = texts.get(library)
    model = named(text or f"transformers:{HUB_TINY}", num_classes="10")
    setting = TrainSetting(batch_size=2, attention=attention, checkpointing="blocks")
    if library.endswith("transformers"):
        setting = setting.model_copy(update={"checkpointing": "none"})
    events = recorded(model, resolve(model, setting)[1]).events
    names = {e.name.removeprefix("aten.") for e in events if isinstance(e, Computed)}
    kernels = (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_softmax", "_safe_softmax",
    )  # fmt: skip
    assert {name.partition(".")[0] for name in names} & set(kernels) == {kernel}


@pytest.mark.parametrize(
    ("text", "attention", "said"),
    [
        ("timm:resnet18", "eager", "none that timm can switch"),
        ("torchvision:vit_b_32", "sdpa", "can only keep it from that"),
        ("transformers:PoolFormerForImageClassification", "sdpa", "has no sdpa"),
    ],
)
def test_an_attention_that_cannot_be_set_is_refused(text: str, attention: str, said: str) -> None:
    require(text.partition(":")[0])
    with pytest.raises(UnsupportedError, match=said) as refused:
        estimate(text, batch_size=2, attention=attention)
    assert "Omit --attention" in refused.value.way_out
