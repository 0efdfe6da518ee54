"""DeepSpeed: `ds_config.json` for `deepspeed.initialize(config=…)`.

Keys as in DeepSpeed 0.19, runtime/constants.py and runtime/config.py. Autocast is the block
`torch_autocast` (with fp16 and without ZeRO the engine keeps a GradScaler); `bf16.enabled` and
`fp16.enabled` convert the model instead, which is another setting. Gradients are clipped at 1.0
unless told. Its `activation_checkpointing` block does nothing for these models: checkpointing is in
the model, and so in `building.py`.
"""

from __future__ import annotations

import json
from typing import Any

from planner.emit.accelerate import loop_warnings
from planner.emit.plan import (
    CLIP_NORM,
    Emitted,
    Plan,
    Refusal,
    learning_rate_warning,
    unsaid,
)
from planner.emit.source import building_source
from planner.schema import TrainSetting

LIBRARY = None
TITLE = "DeepSpeed"
CODE_FILENAME = "building.py"


def write(plan: Plan) -> Emitted:
    """`ds_config.json`, with `building.py` as code: build the optimizer and hand it over."""
    setting = plan.setting
    return Emitted(
        target="deepspeed",
        filename="ds_config.json",
        text=json.dumps(_values(setting), indent=2) + "\n",
        launch=f"deepspeed --num_gpus {setting.world_size} your_script.py",
        warnings=(*plan.warnings, *_warnings(setting)),
        code=building_source(plan),
        code_filename=CODE_FILENAME,
    )


def _values(setting: TrainSetting) -> dict[str, Any]:
    values: dict[str, Any] = {
        "train_batch_size": setting.global_batch,
        "train_micro_batch_size_per_gpu": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "gradient_clipping": CLIP_NORM if setting.clip_grad else 0.0,
        "zero_optimization": {"stage": 0},
    }
    if setting.autocast_dtype is not None:
        values["torch_autocast"] = {"enabled": True, "dtype": setting.autocast_dtype}
    return values


def refusals(plan: Plan) -> list[Refusal]:
    """What it cannot say of the plan's setting."""
    setting = plan.setting
    # In pure bf16 the engine would add fp32 masters of its own: another setting.
    return unsaid(setting, "its engine", "ema")


def _warnings(setting: TrainSetting) -> tuple[str, ...]:
    found = [
        "hand the engine the optimizer of building.py (deepspeed.initialize(optimizer=…)): its own "
        '"AdamW" is another kernel.',
        learning_rate_warning(setting),
    ]
    if setting.autocast_dtype is not None:
        found.append(
            "torch_autocast is what was probed; bf16.enabled or fp16.enabled would convert the "
            "model instead."
        )
    if setting.checkpointing != "none":
        found.append(
            "its activation_checkpointing block does nothing for these models: "
            f"checkpointing={setting.checkpointing} is in building.py."
        )
    if setting.compile != "off":
        found.append(
            f"compile is a call: engine.compile(compile_kwargs={{'mode': '{setting.compile}'}})."
        )
    if not setting.clip_grad:
        found.append("gradient_clipping is 0.0, as probed: DeepSpeed clips at 1.0 unless told.")
    return (*found, *loop_warnings(setting.model_copy(update={"clip_grad": False})))
