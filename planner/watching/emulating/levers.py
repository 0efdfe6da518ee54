"""Which levers would help a program that ran out of memory, where its model is one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.core.errors import PlannerError
from planner.core.schema import SwinConfig
from planner.estimation.estimate import estimate
from planner.libraries.registry import SPECS
from planner.libraries.resolve import override
from planner.machine.hardware import find_gpu
from planner.watching.emulating.reading import EmulatedRun, KnownRelief
from planner.watching.explaining.explanation import find_relief

CLASSES = {  # how the module of a class begins
    "timm.models.": "timm", "torchvision.models.": "torchvision",
    "transformers.models.": "transformers", "planner.libraries.native.": "native",
}  # fmt: skip
PRECISIONS = {"": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def find_levers(run: EmulatedRun, gpu: str) -> KnownRelief | None:
    """None where the model is not known, or planner's own step would not have run out of memory
    too: then it is another step. The model is known by its library, and by its parameters, to the
    last one."""
    failed = run.out_of_memory
    if failed is None or failed.subject is None or len(run.processes) > 1:
        return None
    setting, card = _setting(failed.subject), find_gpu(gpu)
    model = _model(failed.subject) if setting else None
    if model is None or setting is None:
        return None
    room = run.free_bytes
    try:
        predicted = estimate(model, setting, gpu=card)
        if predicted.device_total_bytes <= room:
            return None
        relief = find_relief(predicted, predicted.device_total_bytes - room, room)
    except PlannerError:
        return None
    return KnownRelief(model.title, setting, relief)


def _setting(subject: Mapping[str, Any]) -> dict[str, Any] | None:
    options = subject["optimizer_options"]
    is_plain = not (options.get("amsgrad") or options.get("fused") or options.get("capturable"))
    names = {"Adam": "adam", "AdamW": "adamw"} | ({"SGD": "sgd"} if options.get("momentum") else {})
    optimizer = names.get(subject["optimizer"])
    precision = PRECISIONS.get(subject["autocast"])
    is_plain &= subject["is_trained"] and not subject["is_frozen"] and len(subject["shape"]) == 4
    if not (optimizer and precision and is_plain):
        return None
    return {
        "batch_size": subject["shape"][0], "precision": precision,
        "optimizer": f"{optimizer}-forloop" if options.get("foreach") is False else optimizer,
    }  # fmt: skip


def _model(subject: Mapping[str, Any]) -> SwinConfig | None:
    library = next((n for m, n in CLASSES.items() if subject["class"].startswith(m)), None)
    if library is None or "Swin" not in subject["class"]:
        return None
    changes = {"num_classes": subject["num_classes"], "image_size": tuple(subject["shape"][2:])}
    version = 2 if "v2" in subject["class"].lower() else 1
    for config in SPECS[library].published.values():
        if config.version == version:
            try:
                changed = override(config, changes)
                found = estimate(changed, batch_size=1).num_parameters
            except PlannerError:
                continue
            if found == subject["num_parameters"]:
                return changed
    return None
