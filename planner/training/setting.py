"""`train.py` as a text, and a setting in the words of its block. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.setting import CLIP_NORM, EMA_DECAY, LABEL_SMOOTHING, Parallelism
from planner.libraries.maps import Trainable

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
        chosen = Trainable.of(setting)
        values |= {"frozen": chosen.frozen, "adapted": chosen.adapted}
    return values


# DeepSpeed's configuration for a setting: what trainers write and what a probe runs. No torch.
#
# Keys as in DeepSpeed 0.19, runtime/constants.py, runtime/config.py and runtime/zero/config.py.

STAGES: Mapping[Parallelism, int] = {"zero1": 1, "zero2": 2, "zero3": 3}

# Of a bucket of gradients: DDP's 25 MiB (torch/nn/parallel/distributed.py), in fp32. DeepSpeed's
# own of 500,000,000 elements takes 2 GB whatever the model. A larger weight crosses by itself.
BUCKET_ELEMENTS = 25 * 2**20 // 4
_SIZES = {
    1: ("reduce_bucket_size", "allgather_bucket_size"),
    2: ("reduce_bucket_size", "allgather_bucket_size"),
    # What was gathered goes as soon as this many elements are used before it is again.
    3: ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"),
}


def configuration(setting: TrainSetting) -> dict[str, Any]:
    """The whole of it: what `deepspeed.initialize(config=…)` takes."""
    return {
        "train_batch_size": setting.global_batch,
        "train_micro_batch_size_per_gpu": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "gradient_clipping": CLIP_NORM if setting.clip_grad else 0.0,  # DeepSpeed's own is 1.0
        **engine_values(setting),
    }


def engine_values(setting: TrainSetting) -> dict[str, Any]:
    """What of a configuration no trainer above DeepSpeed fills in: the stage and its buckets, and
    autocast, which those trainers would turn into a model of 16 bits."""
    stage = STAGES.get(setting.parallelism, 0)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= dict.fromkeys(_SIZES[stage], BUCKET_ELEMENTS)
        zero["overlap_comm"] = stage == 3  # DeepSpeed's own
    if stage and setting.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    values: dict[str, Any] = {"zero_optimization": zero}
    if "offload_optimizer" in zero:
        values["zero_force_ds_cpu_optimizer"] = False  # else it wants its own Adam, which compiles
    if stage:
        values["zero_allow_untested_optimizer"] = True  # ours is torch's
    if setting.autocast_dtype is not None:
        values["torch_autocast"] = {"enabled": True, "dtype": setting.autocast_dtype}
    return values
