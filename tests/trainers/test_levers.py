"""Each field and each trainer: the file changes with it, or it is refused, and alike everywhere."""

import re
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.trainers.emission import emit_setting
from planner.trainers.plan import Emitted
from planner.trainers.registry import TARGETS, TRAINERS
from tests.covering import chosen_of
from tests.trainers.cases import GIB, tiny

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")
CPU = DeviceInfo(kind="cpu", name="a processor", total_bytes=16 * GIB)
COMPILED = {"compile": "default"}
ASKED: dict[str, list[dict[str, Any]]] = {
    "checkpointing": [
        {"checkpointing": kind} for kind in ("blocks:1", "blocks:every-2", "selective", "stages")
    ],
    "offload": [{"offload": "activations"}],
    "compile": [COMPILED],
    "compile_scope": [{**COMPILED, "compile_scope": "blocks"}],
    "activation_memory_budget": [{**COMPILED, "activation_memory_budget": 0.5}],
    "optimizer_in_backward": [{"optimizer_in_backward": True}],
    "offload_optimizer": [{"offload_optimizer": kind} for kind in ("state", "state-and-gradients")],
    "zero_grad_to_none": [{"zero_grad_to_none": False}],
    "frozen_stages": [{"frozen_stages": 1}],
    "lora_rank": [{"lora_rank": 2}, {"lora_rank": 2, "lora_targets": "all"}],
    "ema": [{"ema": True}],
    "memory_format": [{"memory_format": "channels_last"}],
    "cudnn_benchmark": [{"cudnn_benchmark": False}],
    "pure-bf16": [{"precision": "pure-bf16"}],
    "fp8": [{"precision": "fp8"}],
    "fp16 on a CPU": [{"precision": "fp16"}],
}
# Each trainer with each answer, and each word with each answer.
CASES = chosen_of(
    [
        (target, word, index, word not in TRAINERS[target].lacks)
        for word in ASKED
        for target in TARGETS
        for index in range(len(ASKED[word]))
        if target != "microsoft" or word != "fp16 on a CPU"  # it needs CUDA for all
    ],
    pairs=[(0, 3), (1, 3)],
)


def field_of(word: str) -> str:
    return word if word in TrainSetting.model_fields else "precision"


def emitted(target: str, word: str, fields: dict[str, Any]) -> Emitted:
    """For a model of the trainer's library, of a data set's classes, which main.py asks for."""
    library = "timm" if target == "timm" else "native"
    setting = TrainSetting(**{"batch_size": 16, "precision": "fp32", **fields})
    model = tiny(library, num_classes=1000)
    return emit_setting(model, setting, target, device=CPU if word.endswith("CPU") else None)


def written(target: str, word: str, fields: dict[str, Any]) -> str:
    result = emitted(target, word, fields)
    return "".join((result.text, *result.modules.values()))


@pytest.mark.parametrize(("target", "word", "index", "is_expressed"), CASES)
def test_a_field_is_in_the_file_or_refused(
    target: str, word: str, index: int, is_expressed: bool
) -> None:
    fields, field = ASKED[word][index], field_of(word)
    if is_expressed:
        without = COMPILED if "compile" in fields and word != "compile" else {}
        assert written(target, word, fields) != written(target, word, without)
        return
    with pytest.raises(UnsupportedError) as raised:
        emitted(target, word, fields)
    assert raised.value.message.startswith(TRAINERS[target].title)
    assert f"it has no word for {field}={str(fields[field]).lower()}" in raised.value.message
    assert f"--set {field}=" in raised.value.way_out  # pasted in test_ways_out.py
    assert "--for pytorch" in raised.value.way_out


def test_each_word_that_a_trainer_lacks_is_asked() -> None:
    assert {word for trainer in TRAINERS.values() for word in trainer.lacks} == set(ASKED)


def test_the_page_says_what_each_trainer_cannot_express() -> None:
    table = PAGE.partition("| trainers without a word for it |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", table, re.MULTILINE)
    shown = {word: names for words, names in rows for word in re.findall("`(.*?)`", words)}
    lacking = {word: [t.name for t in TRAINERS.values() if word in t.lacks] for word in ASKED}
    assert shown == {word: ", ".join(names) for word, names in lacking.items()}
