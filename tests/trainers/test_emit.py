"""What every trainer has in common: reading a result, refusing, estimating anew, saying so."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner import Advice, Estimate, advise, estimate
from planner.core.errors import UnsupportedError, UsageError
from planner.core.files import to_json
from planner.core.schema import FactoryModel, SwinConfig, TrainSetting
from planner.trainers.emission import emit, emit_setting
from tests.trainers.cases import GIB, recommendation, tiny


@pytest.mark.parametrize("form", ["object", "mapping", "file", "directory"])
def test_a_result_is_read_in_every_form(form: str, tmp_path: Path) -> None:
    found = recommendation()
    file = tmp_path / "recommendation.json"
    file.write_text(found.model_dump_json())
    given: Any = {
        "object": found, "mapping": json.loads(found.model_dump_json()), "file": file,
        "directory": str(tmp_path),
    }[form]  # fmt: skip
    text = emit(given, "timm").text
    assert "batch_size: 128" in text
    assert "1280.0 images/s" in text, "the probe is cited"
    assert "NVIDIA GeForce RTX 3090" in text


def test_another_format_is_refused() -> None:
    with pytest.raises(UsageError, match="format 99"):
        emit({**json.loads(recommendation().model_dump_json()), "format": 99}, "timm")


def test_nothing_fits_has_nothing_to_emit() -> None:
    found = recommendation(
        status="nothing_fits", setting=None, evidence=None, advice="Try --image-size 192."
    )
    for num_probes, said in ((3, "fitted on"), (0, "was probed on")):
        tried = found.model_copy(update={"num_probes": num_probes})
        with pytest.raises(UnsupportedError, match=rf"(?s)nothing.*{said}.*--image-size 192"):
            emit(tried, "timm")


def test_another_library_is_estimated_and_called_unmeasured() -> None:
    found = recommendation(tiny("timm", num_classes=1000), TrainSetting(precision="fp16"))
    emitted = emit(found, "microsoft")
    assert "this is microsoft's Swin" in emitted.warnings[0]
    assert re.search(r"(?s)Not measured: .* estimated to take [\d.]+ .iB", emitted.warnings[0])
    assert "Not measured" in emitted.text, "the file says it too"
    small = found.device.model_copy(update={"total_bytes": GIB // 4})
    with pytest.raises(UnsupportedError, match=r"(?s)iB.*does not fit.*batch_size=N"):
        emit(found.model_copy(update={"device": small}), "microsoft")


def test_a_changed_setting_is_estimated_and_called_unmeasured() -> None:
    changes = {"precision": "fp16", "world_size": "8"}
    emitted = emit(recommendation(tiny("timm")), "timm", changes=changes)
    assert "trains under DDP here" in emitted.warnings[0]
    assert "amp_dtype: float16" in emitted.text
    assert "Changed since, and so not what was measured: world_size=8, precision=fp16" in (
        emitted.text
    )
    with pytest.raises(UsageError, match=r"precison: no such field\. Did you mean 'precision'"):
        emit(recommendation(), "timm", changes={"precison": "fp16"})


@pytest.mark.parametrize(
    ("target", "model", "fields", "law"),
    [
        ("timm", tiny("timm", 2), {"attention": "sdpa"}, "only eager attention: attention is sdpa"),
        ("microsoft", tiny("timm", window_size=(4, 2)), {}, "window_size"),
        ("microsoft", tiny("native", image_size=(32, 64)), {}, "square images, not 32x64"),
        ("lightning", tiny(), {"optimizer": "adamw-fused", "clip_grad": True}, "fused optimizer"),
        ("transformers", tiny(), {"parallelism": "fsdp", "world_size": 2}, "only ddp"),
        (
            "lightning",
            tiny(),
            {"parallelism": "ddp", "gradient_sync": "every", "accumulate": 2},
            "has no word for",
        ),
    ],
)
def test_what_a_trainer_cannot_say_is_refused_with_a_way_out(
    target: str, model: SwinConfig, fields: dict[str, Any], law: str
) -> None:
    setting = TrainSetting(batch_size=2, **{"precision": "fp16", **fields})
    with pytest.raises(UnsupportedError, match=law) as caught:
        emit_setting(model, setting, target)
    assert "--" in caught.value.way_out or "own" in caught.value.way_out


def test_all_refusals_come_together() -> None:
    setting = TrainSetting(batch_size=2, compile="default", optimizer="lion", ema=True)
    with pytest.raises(UnsupportedError) as caught:
        emit_setting(tiny("microsoft"), setting, "microsoft")
    for law in ("compile", "lion", "ema", "bf16"):
        assert law in caught.value.message


def test_a_factory_goes_where_any_module_goes() -> None:
    model = FactoryModel(factory="my.models:make")
    for target in ("pytorch", "accelerate", "lightning", "deepspeed", "transformers"):
        emitted = emit_setting(model, TrainSetting(batch_size=2), target)
        files = {emitted.filename: emitted.text, **emitted.modules}
        assert "from my.models import make" in files["train.py"]
    for target in ("timm", "microsoft"):
        with pytest.raises(UnsupportedError, match=r"(?s)my\.models:make.*pytorch"):
            emit_setting(model, TrainSetting(batch_size=2), target)
    with pytest.raises(UnsupportedError, match="has checkpointing none, blocks"):
        emit_setting(model, TrainSetting(checkpointing="stages"), "pytorch")


# What estimate and advise answer, emitted: said to be predicted, and nothing of it lost.

MODEL = tiny("timm")
EXPANDABLE = "expandable_segments:True"


@pytest.fixture(scope="module")
def found() -> Estimate:
    return estimate(MODEL, gpu="rtx 3090", batch_size=32, allocator=EXPANDABLE)


@pytest.fixture(scope="module")
def advice() -> Advice:
    """A wish that does not fit as it stands."""
    return advise(tiny(), gpu="rtx 3090", memory_bytes="500MiB", batch_size=1024, keep=["compile"])


@pytest.mark.parametrize("given_of", [lambda found: found, lambda found: [to_json(found)]])
def test_an_estimate_is_read_alone_and_in_an_array(given_of: Any, found: Estimate) -> None:
    emitted = emit(given_of(found), "timm")
    assert "batch_size: 32" in emitted.text
    assert emitted.warnings[0].startswith("Predicted, not measured: ")
    for said in (emitted.warnings[0], " ".join(emitted.text.replace("\n#", "").split())):
        assert "images/s ±" in said
        assert "on rtx-3090" in said
    assert "predicted and not measured" in emitted.text
    assert f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE} python" in emitted.launch


def test_a_way_of_advice_is_what_it_says(advice: Advice) -> None:
    assert len(advice.ways) > 1
    for number, way in enumerate(advice.ways, 1):
        emitted = emit(advice, "pytorch", way=number)
        setting = way.setting
        assert f"    batch_size: int = {setting.batch_size}  #" in emitted.text
        assert (EXPANDABLE in emitted.launch) == ("allocator" in dict(way.changes))
        assert "within 500.00 MiB" in emitted.warnings[0]
    assert emit(advice, "pytorch").text == emit(to_json(advice), "pytorch", way=1).text


def test_of_several_one_is_chosen() -> None:
    rows = [to_json(estimate(MODEL, gpu="rtx 3090", batch_size=n)) for n in (8, 16)]
    with pytest.raises(UsageError, match=r"2 settings: 1 is batch_size=8; 2 is batch_size=16") as e:
        emit(rows, "timm")
    assert e.value.way_out == "Choose one with --way N."
    assert "batch_size: 16" in emit(rows, "timm", way=2).text
    with pytest.raises(UsageError, match="1 is model=timm:custom; 2 is model=timm:custom"):
        emit(rows[:1] * 2, "timm")
    with pytest.raises(UsageError, match="--way 3 is not one of them"):
        emit(rows, "timm", way=3)
    largest = [{"precision": "fp32", "estimate": None}, {"precision": "bf16", "estimate": rows[0]}]
    assert "batch_size: 8" in emit(largest, "timm").text, "as --max-batch prints them"


def test_what_does_not_fit_is_refused(advice: Advice) -> None:
    none_fits = advise(tiny(), gpu="rtx 3090", memory_bytes=GIB // 4, keep=["compile"])
    assert none_fits.recommended is None
    with pytest.raises(UnsupportedError, match="no way that fits") as caught:
        emit(none_fits, "pytorch")
    assert none_fits.nearest is not None
    assert none_fits.nearest.command in caught.value.way_out
    with pytest.raises(UnsupportedError, match=r"nothing to emit.*does not fit in 500"):
        emit(advice.as_asked.estimate, "pytorch")
    emitted = emit(advice.as_asked.estimate, "pytorch", changes={"batch_size": 8})
    assert any("changed after the estimate" in warning for warning in emitted.warnings)


def test_a_task_is_trained_by_its_own_loss(found: Estimate) -> None:
    """The file gave it images and took logits: nobody had kept that it is a task."""
    data = to_json(found)
    data |= {"model": FactoryModel(factory="mine:make").model_dump(), "setting": {"batch_size": 4}}
    for told in ({"is_task": True, "unit": "pairs"}, {"is_task": False, "unit": "images"}):
        text = emit({**data, **told}, "pytorch").text
        assert ("load_task(" in text) == told["is_task"]
        assert f'    unit: str = "{told["unit"]}"' in text
