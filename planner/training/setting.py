"""`train.py` as a text, and a setting in the words of its block. Imports no torch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.setting import CLIP_NORM, EMA_DECAY, LABEL_SMOOTHING
from planner.libraries.maps import Trainable
from planner.libraries.registry import find_library

FOLDER = Path(__file__).parent
FIELD = re.compile(r"^    (\w+): ([^=]+) = .*?((?:  #.*)?)$", re.MULTILINE)
"""A field of `train.Setting`: its name, its type, and what is said of it."""


@cache
def probed() -> str:
    """The text of the file whose step is probed."""
    return (FOLDER / "train.py").read_text("utf-8")


def step_values(model: Model, setting: TrainSetting) -> dict[str, Any]:
    """The fields of `train.Setting` that a step reads, of a `setting` that has its recipe."""
    fields = probed().partition("class Setting:")[2].partition("SETTING = ")[0]
    named = [found[1] for found in FIELD.finditer(fields)]
    values = {name: getattr(setting, name) for name in named if hasattr(setting, name)}
    is_8bit = setting.optimizer_implementation == "8bit"
    values |= {
        "optimizer": setting.optimizer if is_8bit else setting.optimizer_family,
        "implementation": setting.optimizer_implementation,
        "clip_norm": CLIP_NORM if setting.clip_grad else 0.0,
        "ema_decay": EMA_DECAY if setting.ema else 0.0,
        "smoothing": 0.0 if setting.loss == "cross-entropy" else LABEL_SMOOTHING,
    }
    if (setting.frozen_stages or setting.lora_rank) and isinstance(model, SwinConfig):
        chosen = Trainable.of(setting, find_library(model.library).frozen_names)
        values |= {"frozen": chosen.frozen, "adapted": chosen.adapted}
    return values
