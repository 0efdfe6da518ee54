"""From what a person calls a model to its configuration."""

import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import FactoryModel, NamedModel, TrainSetting
from planner.estimation.estimate import estimate, resolve
from planner.ledger.ledger import Computed
from planner.libraries.factories import check_factory, load_factory
from planner.libraries.names import build_named, look_up_in_process, resolve_model
from tests.steps import recorded, require


def test_reads_a_librarys_name() -> None:
    config = resolve_model("timm:swin_s3_tiny_224", {})
    assert config.title == "timm:swin_s3_tiny_224"
    assert config.windows == (7, 7, 14, 7)


def test_reads_a_bare_name_that_one_library_has() -> None:
    assert resolve_model("swin_t", {}) == resolve_model("torchvision:swin_t", {})
    slashed = resolve_model("microsoft/swin-tiny-patch4-window7-224", {})
    assert slashed.title == "transformers:microsoft/swin-tiny-patch4-window7-224"
    assert (slashed.num_classes, slashed.task) == (1000, "classification")


def test_overrides_are_laid_over_the_published_fields() -> None:
    config = resolve_model("native:swin_tiny", {"image_size": "384", "depths": "2,2,2,2"})
    assert (config.image_size, config.depths, config.window_size) == ((384, 384), (2, 2, 2, 2), 7)


def test_reads_a_factory() -> None:
    model = resolve_model("my.models:make_swin", {"image_size": 96})
    assert model == FactoryModel(factory="my.models:make_swin", image_size=(96, 96))


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_config_written_and_read_back_is_equal(tmp_path: Path, suffix: str) -> None:
    import yaml

    config = resolve_model("native:swinv2_base_384", {})
    file = tmp_path / f"mine{suffix}"
    data = config.model_dump(mode="json")
    file.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data))
    assert resolve_model(str(file), {}) == config
    assert resolve_model(str(file), {"num_classes": 7}).num_classes == 7


def test_reads_the_authors_own_files(tmp_path: Path) -> None:
    file = tmp_path / "swinv2_base_patch4_window12to16_192to256_22kto1k_ft.yaml"
    file.write_text(
        "DATA: {IMG_SIZE: 256}\n"
        "MODEL:\n"
        "  TYPE: swinv2\n"
        "  NAME: swinv2_base_patch4_window12to16_192to256_22kto1k_ft\n"
        "  DROP_PATH_RATE: 0.2\n"
        "  SWINV2: {EMBED_DIM: 128, DEPTHS: [2, 2, 18, 2], NUM_HEADS: [4, 8, 16, 32],\n"
        "    WINDOW_SIZE: 16, PRETRAINED_WINDOW_SIZES: [12, 12, 12, 6]}\n"
    )
    assert resolve_model(str(file), {}) == resolve_model(f"microsoft:{file.stem}", {})
    file.write_text("MODEL: {TYPE: swin_moe}")
    with pytest.raises(UnsupportedError, match="swin_moe"):
        resolve_model(str(file), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("native:swin_tny", "unknown model of native 'swin_tny'. Did you mean 'swin_tiny'"),
        ("SwinB", "unknown model 'SwinB'. Did you mean 'swin_base'"),
        (
            "vit_b_16",
            "'vit_b_16'.\nDid you mean torchvision:vit_b_16? Only Swins go",
        ),
        ("tim:swin_tiny_patch4_window7_224", "unknown library 'tim'. Did you mean 'timm'?"),
        ("timm", "'timm' is a library, not a model."),
        (":", "':' names no model."),
        ("./own.py:Task", "FILE:NAME of a Python file in the current folder"),
        (
            "swin_tiny_patch4_window7_224",
            "Choose one of: timm:swin_tiny_patch4_window7_224, "
            "microsoft:swin_tiny_patch4_window7_224.",
        ),
        ("missing.yaml", "missing.yaml cannot be read: No such file"),
    ],
)
def test_what_names_no_model_is_said_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model(text, {})
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_another_architecture_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedError, match="--record"):
        resolve_model("swin_base_simmim")


def test_an_override_that_the_library_cannot_build_is_refused() -> None:
    with pytest.raises(PlannerError, match="does not divide the feature map of stage 2"):
        resolve_model("microsoft:swin_tiny_patch4_window7_224", {"image_size": 128})


# A factory of the user's own: found where `python -m` would find it, and every fault in words.

FACTORIES = """
    from torch import nn

    number = 3

    class Head(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)

    def build():
        print("building")
        return nn.Linear(2, 2)

    def nothing():
        pass

    def the_class():
        return nn.Linear

    def raises():
        raise ValueError("depths and heads\\ndiffer")

    def leaves():
        raise SystemExit(3)

    class Zoo:
        @staticmethod
        def small():
            return nn.Linear(1, 1)
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current directory, which is not on sys.path."""
    pytest.importorskip("torch")
    name = f"own_models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_builds_a_module_and_keeps_what_it_prints_off_standard_output(
    own_models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch import nn

    for attribute in ("build", "Head", "Zoo.small"):
        assert isinstance(load_factory(f"{own_models}:{attribute}")(), nn.Module)
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == "building\n"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("nothing", r"returned None"),
        ("the_class", r"returned the class Linear"),
        ("raises", r"raised ValueError: depths and heads differ at .*\.py:21"),
        ("leaves", r"raised SystemExit: 3"),
    ],
)
def test_a_factory_at_fault(own_models: str, attribute: str, message: str) -> None:
    from planner.training.tasks import task_for

    with pytest.raises(PlannerError, match=message) as caught:
        task_for(FactoryModel(factory=f"{own_models}:{attribute}"), TrainSetting())
    assert caught.value.way_out
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("swin", r"written package\.module:name"),
        ("a.b:", r"written package\.module:name"),
        ("no_such_package_here:build", r"no module 'no_such_package_here'"),
        ("OWN:buidl", r"Did you mean 'build'"),
        ("OWN:number", "is a value of type int, and a factory is a function"),
    ],
)
def test_a_name_that_leads_nowhere(own_models: str, spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_factory(spec.replace("OWN", own_models))


def test_a_file_in_place_of_a_module_is_told_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def build(): ...")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is a file") as caught:
        check_factory("mine.py:build")
    assert caught.value.way_out == "Write mine:build."
    check_factory("mine:build")


def test_a_module_that_is_loaded_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program made itself has no spec by which importlib would find it."""
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))
    check_factory("made_here:build")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library_here", "raised ModuleNotFoundError"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero at .*\.py:1"),
        ("def build(:", r"raised SyntaxError: .* \(.*\.py, line 1\)\.\n"),
    ],
)
def test_a_module_that_cannot_be_imported(own_models: str, source: str, message: str) -> None:
    Path(f"{own_models}.py").write_text(source)
    with pytest.raises(PlannerError, match=message) as caught:
        load_factory(f"{own_models}:build")
    assert not isinstance(caught.value, UsageError)


def test_a_factory_of_the_running_program_is_for_no_other_process() -> None:
    with pytest.raises(UsageError, match="Write it into a file of the current folder: my_model:b"):
        check_factory("__main__:build")


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
        look_up_in_process("timm", "vit_base_patch16_224")
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
        ("torchvision:vit_b_32", "sdpa", "can only turn that off"),
        ("transformers:PoolFormerForImageClassification", "sdpa", "has no sdpa"),
    ],
)
def test_an_attention_that_cannot_be_set_is_refused(text: str, attention: str, said: str) -> None:
    require(text.partition(":")[0])
    with pytest.raises(UnsupportedError, match=said) as refused:
        estimate(text, batch_size=2, attention=attention)
    assert "Omit --attention" in refused.value.way_out
