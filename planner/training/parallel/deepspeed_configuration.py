"""DeepSpeed's configuration for a setting: what trainers write and what a probe runs. No torch.

Keys as in DeepSpeed 0.19, runtime/constants.py, runtime/config.py and runtime/zero/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.core.schema import TrainSetting
from planner.core.schema.distribution import Parallelism
from planner.core.schema.setting import CLIP_NORM

STAGES: Mapping[Parallelism, int] = {"zero1": 1, "zero2": 2, "zero3": 3}

_OF_BUCKETS = {
    "zero_reduce_bucket": "reduce_bucket_size", "zero_allgather_bucket": "allgather_bucket_size",
}  # fmt: skip
_OF_STAGE_3 = {
    "zero_reduce_bucket": "reduce_bucket_size",
    "zero_prefetch_bucket": "stage3_prefetch_bucket_size",
    "zero_persistence": "stage3_param_persistence_threshold",
    "zero_max_live": "stage3_max_live_parameters",
    "zero_max_reuse": "stage3_max_reuse_distance",
}
# The fields of a setting that are sizes of a stage, and what DeepSpeed calls them.
SIZES: Mapping[Parallelism, Mapping[str, str]] = {
    "zero1": _OF_BUCKETS, "zero2": _OF_BUCKETS, "zero3": _OF_STAGE_3,
}  # fmt: skip


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
        sizes = SIZES[setting.parallelism]
        zero |= {name: getattr(setting, field) for field, name in sizes.items()}
        zero["overlap_comm"] = setting.zero_overlap
        if setting.zero_overlap is None:
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
