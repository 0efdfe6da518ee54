"""From what a person calls a model to its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import FactoryModel, SwinConfig
from planner.libraries.resolve import resolve_model


def test_reads_a_librarys_name() -> None:
    config = resolve_model("timm:swin_s3_tiny_224", {})
    assert isinstance(config, SwinConfig)
    assert config.title == "timm:swin_s3_tiny_224"
    assert config.windows == (7, 7, 14, 7)


def test_reads_a_bare_name_that_one_library_has() -> None:
    assert resolve_model("swin_t", {}) == resolve_model("torchvision:swin_t", {})
    slashed = resolve_model("microsoft/swin-tiny-patch4-window7-224", {})
    assert slashed.title == "transformers:microsoft/swin-tiny-patch4-window7-224"


def test_overrides_are_laid_over_the_published_fields() -> None:
    config = resolve_model(
        "timm:swin_tiny_patch4_window7_224", {"image_size": "384", "depths": "2,2,2,2"}
    )
    assert isinstance(config, SwinConfig)
    assert (config.image_size, config.depths, config.window_size) == ((384, 384), (2, 2, 2, 2), 7)


def test_reads_a_factory() -> None:
    model = resolve_model("my.models:make_swin", {"image_size": 96})
    assert model == FactoryModel(factory="my.models:make_swin", image_size=(96, 96))
    assert resolve_model("models:make", {}) == FactoryModel(factory="models:make")


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
        ("SwinB", "unknown model 'SwinB'. Did you mean 'swin_b'"),
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


@pytest.mark.parametrize("prefix", ["", "transformers:"])
def test_another_architecture_is_refused_with_the_way_out(prefix: str) -> None:
    with pytest.raises(UnsupportedError, match="--record"):
        resolve_model(f"{prefix}microsoft/swin-base-simmim-window6-192", {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "is not whole JSON"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "- 1", "holds no fields"),
        ("a.yaml", "drop_rate: 2\nwindw: 3", "has 2 faults"),
    ],
)
def test_a_bad_file_is_an_error_and_no_traceback(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        resolve_model(str(file), {})


def test_faults_of_overrides_come_in_one_message() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model("native:swin_tiny", {"drop_path_rate": 2, "windw": 3, "num_heads": "3,6"})
    assert "native:swin_tiny has 3 faults" in str(caught.value)


def test_an_override_that_the_library_cannot_build_is_refused() -> None:
    name = "transformers:microsoft/swin-tiny-patch4-window7-224"
    with pytest.raises(PlannerError, match="larger than the feature map of stage 3"):
        resolve_model(name, {"image_size": 128})
