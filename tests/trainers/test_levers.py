"""Each lever and each trainer: the file changes with it, or it is refused, and alike everywhere."""

import re
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.trainers.emission import emit_setting
from planner.trainers.plan import Emitted, Trainer
from planner.trainers.refusals import LEVERS, Lever
from planner.trainers.registry import TARGETS, TRAINERS
from tests.covering import chosen_of
from tests.trainers.cases import GIB, tiny

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")
CPU = DeviceInfo(kind="cpu", name="a processor", total_bytes=16 * GIB)
COMPILED = {"compile": "default"}
ASKED: dict[str, list[dict[str, Any]]] = {
    "checkpointing-in-parts": [
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
    "bf16-on-cpu": [{"precision": "bf16"}],
    "fp16-on-cpu": [{"precision": "fp16"}],
}


def expresses(trainer: Trainer, lever: Lever) -> bool:
    return trainer.expresses is None or lever.name in trainer.expresses


BY_NAME = {lever.name: lever for lever in LEVERS}
# Each trainer with each answer, and each lever with each answer.
CASES = chosen_of(
    [
        (target, lever.name, index, expresses(TRAINERS[target], lever))
        for lever in LEVERS
        for target in TARGETS
        for index in range(len(ASKED[lever.name]))
        if target != "microsoft" or not lever.name.endswith("-on-cpu")  # it needs CUDA for all
    ],
    pairs=[(0, 3), (1, 3)],
)


def emitted(target: str, lever: Lever, fields: dict[str, Any]) -> Emitted:
    """For a model of the trainer's library, of a data set's classes, which main.py asks for."""
    library = "timm" if target == "timm" else "native"
    setting = TrainSetting(**{"batch_size": 16, "precision": "fp32", **fields})
    device = CPU if lever.name.endswith("-on-cpu") else None
    model = tiny(library, num_classes=1000)
    return emit_setting(model, setting, target, device=device)


def written(target: str, lever: Lever, fields: dict[str, Any]) -> str:
    result = emitted(target, lever, fields)
    return "".join((result.text, *result.modules.values()))


@pytest.mark.parametrize(("target", "name", "index", "is_expressed"), CASES)
def test_a_lever_is_in_the_file_or_refused(
    target: str, name: str, index: int, is_expressed: bool
) -> None:
    trainer, lever, fields = TRAINERS[target], BY_NAME[name], ASKED[name][index]
    if is_expressed:
        without = {**fields, **dict(re.findall(r"(\w+)=(\S+)", lever.change))}
        assert written(target, lever, fields) != written(target, lever, without)
        return
    with pytest.raises(UnsupportedError) as raised:
        emitted(target, lever, fields)
    value = str(fields.get(lever.field)).lower()
    assert raised.value.message.startswith(trainer.title)
    assert f"it {lever.law} ({lever.field}={value})" in raised.value.message
    assert f"--set {lever.field}=" in raised.value.way_out  # pasted in test_ways_out.py
    assert "--for pytorch" in raised.value.way_out


def test_each_lever_has_one_law() -> None:
    assert [lever.name for lever in LEVERS] == list(ASKED)


def test_the_page_says_what_each_trainer_cannot_express() -> None:
    for trainer in TRAINERS.values():
        lacks = [f"`{x.name}`" for x in LEVERS if not expresses(trainer, x)]
        section = PAGE.partition(f"\n## {trainer.name}\n")[2].partition("\n## ")[0]
        line = f"- **Cannot express**: {', '.join(lacks) or 'nothing of these'}."
        assert line in re.sub(r"\s+", " ", section), line
