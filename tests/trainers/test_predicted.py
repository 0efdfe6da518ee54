"""What estimate and advise answer, emitted: said to be predicted, and nothing of it lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import Advice, Estimate, advise, emit, estimate
from planner.core.errors import UnsupportedError, UsageError
from planner.core.files import to_json
from planner.core.schema import FactoryModel
from planner.core.units import GIB
from tests.trainers.cases import tiny

MODEL = tiny("timm")
EXPANDABLE = "expandable_segments:True"


@pytest.fixture(scope="module")
def found() -> Estimate:
    return estimate(MODEL, gpu="rtx 3090", batch_size=32, allocator=EXPANDABLE)


@pytest.fixture(scope="module")
def advice() -> Advice:
    """A wish that does not fit as it stands."""
    return advise(tiny(), gpu="rtx 3090", memory_bytes="500MiB", batch_size=1024, keep=["compile"])


@pytest.mark.parametrize("form", ["object", "mapping", "array", "file"])
def test_an_estimate_is_read_in_every_form(form: str, found: Estimate, tmp_path: Path) -> None:
    data = json.loads(json.dumps(to_json(found)))
    file = tmp_path / "e.json"
    file.write_text(json.dumps(data))
    given: Any = {"object": found, "mapping": data, "array": [data], "file": file}[form]
    emitted = emit(given, "timm")
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
        emit(advice.plain.estimate, "pytorch")
    emitted = emit(advice.plain.estimate, "pytorch", changes={"batch_size": 8})
    assert any("changed after the estimate" in warning for warning in emitted.warnings)


def test_a_task_is_trained_by_its_own_loss(found: Estimate) -> None:
    """The file gave it images and took logits: nobody had kept that it is a task."""
    data = to_json(found)
    data |= {"model": FactoryModel(factory="mine:make").model_dump(), "setting": {"batch_size": 4}}
    for told in ({"is_task": True, "unit": "pairs"}, {"is_task": False, "unit": "images"}):
        text = emit({**data, **told}, "pytorch").text
        assert ("load_task(" in text) == told["is_task"]
        assert f'    unit: str = "{told["unit"]}"' in text


@pytest.mark.parametrize(
    "data", [{"ways": [1], "recommended": 2}, {"breakdown": {}}, [{"setting": 3}], {"a": 1}, [1]]
)
def test_what_is_no_answer_is_a_fault(data: Any) -> None:
    with pytest.raises(UsageError):
        emit(data, "timm")
