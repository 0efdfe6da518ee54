"""A name that is no Swin of ours is what the installed library makes of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import DeviceInfo, MeasurementRecord, NamedModel, SwinConfig, TrainSetting
from planner.estimation.estimate import estimate, resolve
from planner.ledger.ledger import Computed
from planner.libraries.named import build_named
from planner.libraries.resolve import resolve_model
from planner.trace.kept_step import traced_step


def need(library: str) -> None:
    """Skips where `library` is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def named(text: str, **overrides: str) -> NamedModel:
    model = resolve_model(text, overrides)
    assert isinstance(model, NamedModel)
    return model


@pytest.mark.parametrize(
    ("text", "task", "size"),
    [
        ("timm:vit_base_patch16_224", "classification", (3, 224, 224)),
        ("timm:swinv2_cr_tiny_ns_224", "classification", (3, 224, 224)),
        ("timm:vit_small_patch14_dinov2.lvd142m", "classification", (3, 518, 518)),
        ("torchvision:inception_v3", "classification", (3, 299, 299)),
        ("torchvision:swin3d_t", "video", (3, 16, 224, 224)),
        ("torchvision:r3d_18", "video", (3, 16, 112, 112)),
        ("torchvision:deeplabv3_resnet50", "segmentation", (3, 520, 520)),
        ("torchvision:fcos_resnet50_fpn", "detection", (3, 480, 640)),
        ("transformers:ViTForImageClassification", "own-loss", (3, 224, 224)),
        ("transformers:VideoMAEForVideoClassification", "own-loss", (3, 16, 224, 224)),
    ],
)
def test_takes_the_size_of_the_librarys_own_weights(
    text: str, task: str, size: tuple[int, ...]
) -> None:
    need(text.partition(":")[0])
    model = named(text)
    assert model.title == text
    assert model.task == task
    assert model.image_size is not None
    frames = () if model.num_frames is None else (model.num_frames,)
    assert (model.in_channels, *frames, *model.image_size) == size


def test_a_language_model_has_tokens_and_no_image() -> None:
    need("transformers")
    model = named("transformers:BertForMaskedLM", sequence_length="128")
    assert (model.sequence_length, model.image_size) == (128, None)
    with pytest.raises(UnsupportedError, match="BertForMaskedLM has no image_size"):
        resolve_model("transformers:BertForMaskedLM", {"image_size": "224"})


def test_reads_a_configuration_of_transformers_from_a_folder(tmp_path: Path) -> None:
    need("transformers")
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
    need("transformers")
    torch = pytest.importorskip("torch")
    model = named("transformers:HieraForImageClassification")
    with torch.device("meta"):
        assert list(build_named(model, "library").config.image_size) == [224, 224]


def test_published_swins_stay_what_they_are() -> None:
    for text in ("timm:swin_tiny_patch4_window7_224", "torchvision:swin_t"):
        assert isinstance(resolve_model(text, {}), SwinConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:swin_tiny", "Did you mean 'swin_tiny_patch4_window7_224'"),
        ("timm:vit_bas_patch16_224", "Did you mean 'vit_base_patch16_224'"),
        ("timm:vit_base_patch16_224.augre_in21k", "'vit_base_patch16_224.augreg_in21k'"),
        ("torchvision:swin3d_x", "'swin3d_"),
        ("transformers:ViTForImageClasification", "Did you mean 'ViTForImageClassification'"),
        ("transformers:google/vit-base", "nothing is downloaded"),
        ("transformers:__name__", "unknown model of transformers"),
        ("transformers:Trainer", "no model with a configuration"),
    ],
)
def test_an_unknown_name_is_said_with_the_nearest(text: str, message: str) -> None:
    need(text.partition(":")[0])
    with pytest.raises(UsageError) as caught:
        resolve_model(text, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["torchvision:raft_small", "torchvision:keypointrcnn_resnet50_fpn", "transformers:BertModel"],
)
def test_a_step_that_is_not_known_is_refused_with_the_way_out(text: str) -> None:
    need(text.partition(":")[0])
    with pytest.raises(UnsupportedError, match=r"planner\.training\.tasks"):
        resolve_model(text, {})


@pytest.mark.parametrize(
    "text", ["timm:swin_tny_patch4_window7_224", "torchvision:swin_tt", "native:vit_base"]
)
def test_a_mistyped_swin_is_told_without_importing_a_library(text: str) -> None:
    code = (
        "import sys\nfrom planner.libraries.resolve import resolve_model\n"
        f"try: resolve_model({text!r}, {{}})\n"
        "except Exception as error: print(error)\n"
        "print([m for m in ('torch', 'timm', 'torchvision') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("unknown model of")
    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_library_that_is_not_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no name is known yet
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PlannerError) as caught:
        resolve_model("timm:vit_base_patch16_224", {})
    assert "timm is not installed" in str(caught.value)
    assert "pip install 'planner[timm]'" in str(caught.value)


def test_a_record_of_a_named_model_is_written_and_read() -> None:
    model = NamedModel(
        library="timm", name="resnet18", task="classification", image_size=(64, 64),
        in_channels=3, num_classes=10,
    )  # fmt: skip
    record = MeasurementRecord(
        model=model, setting=TrainSetting(), device=DeviceInfo(kind="cpu", name="x", total_bytes=1),
        versions={}, date="2026-11-22T00:00:00Z", status="measured",
    )  # fmt: skip
    again = MeasurementRecord.model_validate_json(record.model_dump_json())
    assert again == record
    assert isinstance(again.model, NamedModel)


def test_builds_the_model_at_another_size() -> None:
    need("timm")
    import torch

    from planner.libraries.named import build_named

    model = named("timm:vit_tiny_patch16_224", image_size="64", num_classes="5", in_channels="1")
    with torch.device("meta"):
        module = build_named(model)
        assert module(torch.empty(2, 1, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize(
    ("text", "fused", "eager"),
    [
        ("timm:vit_tiny_patch16_224", "_scaled_dot_product_flash_attention", "_softmax"),
        ("torchvision:vit_b_32", "_scaled_dot_product_flash_attention", "_safe_softmax"),
        ("transformers:DeiTForImageClassification", "_scaled_dot_product_flash_attention",
         "_softmax"),
    ],
)  # fmt: skip
def test_attention_is_what_was_asked_for(text: str, fused: str, eager: str) -> None:
    """By timm's switch, by a configuration of transformers, by torch's choice of kernels; within
    what backward runs again too."""
    need(text.partition(":")[0])
    model = named(text, num_classes="10")

    def ran(attention: str) -> set[str]:
        setting = TrainSetting(batch_size=2, attention=attention, checkpointing="blocks")
        events = traced_step(model, resolve(model, setting)[1])._trace(2).events
        names = {e.name.removeprefix("aten.") for e in events if isinstance(e, Computed)}
        return {name.partition(".")[0] for name in names} & {fused, eager}

    assert ran("library") == {fused}
    assert ran("eager") == {eager}


@pytest.mark.parametrize(
    ("text", "attention", "said"),
    [
        ("timm:resnet18", "eager", "no attention that timm can switch"),
        ("torchvision:vit_b_32", "sdpa", "can only keep it from that"),
        ("transformers:PoolFormerForImageClassification", "sdpa", "has no sdpa"),
    ],
)
def test_an_attention_that_cannot_be_set_is_refused(text: str, attention: str, said: str) -> None:
    need(text.partition(":")[0])
    with pytest.raises(UnsupportedError, match=said) as refused:
        estimate(text, batch_size=2, attention=attention)
    assert "Omit --attention" in refused.value.way_out


@pytest.mark.parametrize("name", ["mvit_v1_b", "mvit_v2_s"])
def test_mvit_is_of_the_size_that_torchvision_fixes(name: str) -> None:
    need("torchvision")
    build_named(named(f"torchvision:{name}", num_classes="10"))
    with pytest.raises(UnsupportedError, match=r"for clips of \(224, 224, 16\)") as refused:
        build_named(named(f"torchvision:{name}", image_size="64", num_classes="10"))
    assert "a factory of your own" in refused.value.way_out
