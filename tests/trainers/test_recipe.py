"""One recipe for every trainer, written in the file: what was probed, and what goes with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, MeasurementRecord, TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import TARGETS, Emitted, emit, emit_setting
from tests.trainers.cases import GIB, FakeEstimator, executed, recommendation, tiny

declare_missing_operators()
CPU = DeviceInfo(kind="cpu", name="a processor", total_bytes=16 * GIB)
LIBRARIES = {"timm": "timm", "transformers": "transformers"}


def emitted(target: str, device: DeviceInfo | None = None, **fields: Any) -> Emitted:
    """For a model with 1000 classes, which every trainer can train, of the trainer's library."""
    setting = TrainSetting(**{"batch_size": 4, "precision": "fp32", **fields})
    model = tiny(LIBRARIES.get(target, "native"), num_classes=1000)
    return emit_setting(model, setting, target, estimator=FakeEstimator(), device=device)


def values(target: str, **fields: Any) -> dict[str, Any]:
    """The keys of a YAML or JSON file, or the names that a Python one defines."""
    text = emitted(target, **fields).text
    if target in ("timm", "microsoft", "accelerate"):
        loaded = yaml.safe_load(text)
        assert isinstance(loaded, dict)
        return loaded
    if target == "deepspeed":
        loaded = json.loads(text)
        assert isinstance(loaded, dict)
        return loaded
    return executed(text)


def whole(result: Emitted) -> str:
    """All that is written, without the marks and line ends of comments."""
    lines = f"{result.text}\n{result.code}".replace("\\u00d7", "×").replace("\\u2026", "…")
    return " ".join(lines.replace('\\"', '"').replace("#", " ").split())


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_warned_of_stands_in_the_file(target: str) -> None:
    """A warning scrolls away; the file is read when training goes wrong."""
    result = emitted(target, precision="fp16", checkpointing="blocks", loss="label-smoothing")
    assert result.warnings
    for warning in result.warnings:
        assert " ".join(warning.split()) in whole(result), warning
    assert " ".join(result.launch.split()) in whole(result)


@pytest.mark.parametrize("target", TARGETS)
def test_a_result_of_the_cpu_says_how_to_run_there(target: str) -> None:
    if target == "microsoft":
        with pytest.raises(UnsupportedError, match="needs CUDA"):
            emitted(target, device=CPU)
        return
    result = emitted(target, device=CPU)
    said = {
        "timm": "device: cpu", "transformers": '"use_cpu": True', "accelerate": "use_cpu: true",
        "lightning": '"accelerator": "cpu"', "deepspeed": "DS_ACCELERATOR=cpu",
        "pytorch": '"--device", default="cpu"', "mmengine": "",
    }  # fmt: skip
    assert said[target] in result.text
    assert "TF32" not in result.launch


@pytest.mark.parametrize("target", TARGETS)
def test_the_allocator_is_set_as_it_was_probed(target: str) -> None:
    """A measured peak holds for the allocator that it was measured with. torch 2.9.1 ignores
    expandable_segments in PYTORCH_ALLOC_CONF; the older name it takes, as does every other."""
    setting = TrainSetting(batch_size=4, precision="fp32")
    found = recommendation(tiny(LIBRARIES.get(target, "native"), num_classes=1000), setting)
    evidence = found.evidence
    assert isinstance(evidence, MeasurementRecord)
    options = "expandable_segments:True"
    versions = {**evidence.versions, "allocator_config": options}
    probed = found.model_copy(
        update={"evidence": evidence.model_copy(update={"versions": versions})}
    )
    result = emit(probed, target, estimator=FakeEstimator())
    assert result.launch.startswith(f"PYTORCH_CUDA_ALLOC_CONF={options} ")
    assert f"PYTORCH_CUDA_ALLOC_CONF={options}" in result.text
    assert "ALLOC_CONF" not in emit(found, target, estimator=FakeEstimator()).launch


@pytest.mark.parametrize("loss", ["cross-entropy", "label-smoothing", "soft-target"])
def test_labels_are_smoothed_and_images_mixed_as_probed(loss: str) -> None:
    """timm's train.py smooths by 0.1 unless told, main.py mixes images unless told."""
    smoothing = 0.0 if loss == "cross-entropy" else 0.1
    mixing = (0.8, 1.0) if loss == "soft-target" else (0.0, 0.0)
    timm = values("timm", loss=loss)
    assert (timm["smoothing"], timm["mixup"], timm["cutmix"]) == (smoothing, *mixing)
    microsoft = values("microsoft", loss=loss)
    assert (microsoft["AUG"]["MIXUP"], microsoft["AUG"]["CUTMIX"]) == mixing
    assert microsoft["MODEL"]["LABEL_SMOOTHING"] == smoothing
    model = values("mmengine", loss=loss)["model"]
    assert model["head"]["loss"].get("label_smooth_val", 0.0) == smoothing
    augments = model.get("train_cfg", {}).get("augments", [])
    assert [a["alpha"] for a in augments] == ([0.8, 1.0] if loss == "soft-target" else [])
    for target in ("pytorch", "lightning", "transformers"):
        assert ("def mix(" in emitted(target, loss=loss).text) is (loss == "soft-target")


def test_main_py_s_classes_are_its_data_set_s() -> None:
    assert values("microsoft")["DATA"]["DATASET"] == "imagenet"
    large = emit_setting(
        tiny("microsoft", num_classes=21841), TrainSetting(precision="fp16"), "microsoft",
        estimator=FakeEstimator(),
    )  # fmt: skip
    assert "DATASET: imagenet22K" in large.text
    with pytest.raises(UnsupportedError, match=r"(?s)1000 .*21841 .*not 10.*--num-classes 1000"):
        emit_setting(tiny("microsoft"), TrainSetting(precision="fp16"), "microsoft")
