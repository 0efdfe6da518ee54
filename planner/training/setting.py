"""`train.py` as text, the values of its `Setting`, and the configuration of DeepSpeed. Imports no
torch.
"""

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
# A field of `train.Setting`: its name, its type, and its comment.
FIELD = re.compile(r"^    (\w+): ([^=]+) = .*?((?:  #.*)?)$", re.MULTILINE)


@cache
def train_source() -> str:
    """The text of `train.py`, whose step is probed."""
    return (FOLDER / "train.py").read_text("utf-8")


def step_values(model: Model, setting: TrainSetting) -> dict[str, Any]:
    """The values of `train.Setting` that a step reads, from a `setting` with its recipe."""
    fields = train_source().partition("class Setting:")[2].partition("SETTING = ")[0]
    names = [match[1] for match in FIELD.finditer(fields)]
    values = {name: getattr(setting, name) for name in names if hasattr(setting, name)}
    is_8bit = setting.optimizer_implementation == "8bit"
    values |= {
        "optimizer": setting.optimizer if is_8bit else setting.optimizer_family,
        "implementation": setting.optimizer_implementation,
        "clip_norm": CLIP_NORM if setting.clip_grad else 0.0,
        "ema_decay": EMA_DECAY if setting.ema else 0.0,
        "smoothing": 0.0 if setting.loss == "cross-entropy" else LABEL_SMOOTHING,
    }
    if (setting.frozen_stages or setting.lora_rank) and isinstance(model, SwinConfig):
        trainable = Trainable.from_setting(setting)
        values |= {"frozen": trainable.frozen, "adapted": trainable.adapted}
    return values


# DeepSpeed's configuration of a setting, which `emit` writes and a probe runs. The keys are those
# of DeepSpeed 0.19: runtime/constants.py, runtime/config.py and runtime/zero/config.py.

STAGES: Mapping[Parallelism, int] = {"zero1": 1, "zero2": 2, "zero3": 3}

# The size of a bucket of gradients: DDP's 25 MiB (torch/nn/parallel/distributed.py), in fp32.
# DeepSpeed's default of 500,000,000 elements takes 2 GB whatever the model. A larger weight is sent
# by itself.
BUCKET_ELEMENTS = 25 * 2**20 // 4
_SIZES = ("reduce_bucket_size", "allgather_bucket_size")  # of stages 1 and 2
# The last is a distance: gathered weights are released if so many elements are used before they are
# used again.
_STAGE_3_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance")


def configuration(setting: TrainSetting) -> dict[str, Any]:
    """The whole configuration: what `deepspeed.initialize(config=…)` takes."""
    return {
        "train_batch_size": setting.global_batch,
        "train_micro_batch_size_per_gpu": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "gradient_clipping": CLIP_NORM if setting.clip_grad else 0.0,  # DeepSpeed's own is 1.0
        **engine_values(setting),
    }


def engine_values(setting: TrainSetting) -> dict[str, Any]:
    """The part of a configuration that no trainer above DeepSpeed fills in: the stage with its
    buckets, and autocast, which such trainers would turn into a model of 16 bits."""
    stage = STAGES.get(setting.parallelism, 0)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= dict.fromkeys(_STAGE_3_SIZES if stage == 3 else _SIZES, BUCKET_ELEMENTS)
        zero["overlap_comm"] = stage == 3  # DeepSpeed's default
    if stage and setting.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    values: dict[str, Any] = {"zero_optimization": zero}
    if "offload_optimizer" in zero:
        # By default DeepSpeed demands its own Adam here, which it would compile first.
        values["zero_force_ds_cpu_optimizer"] = False
    if stage:
        values["zero_allow_untested_optimizer"] = True  # ours is torch's
    if setting.autocast_dtype is not None:
        values["torch_autocast"] = {"enabled": True, "dtype": setting.autocast_dtype}
    return values
