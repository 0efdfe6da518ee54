"""accelerate: the YAML of `accelerate launch --config_file`, and what belongs in your script.

Keys are the fields of ClusterConfig in accelerate 1.15, commands/config/config_args.py. There is
none for accumulation, and `--gradient_accumulation_steps` of `accelerate launch` reaches only
DeepSpeed: it is an argument of `Accelerator`, or ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the
environment (utils/launch.py, accelerator.py).
"""

from __future__ import annotations

from typing import Any

import yaml

from planner.emit.plan import Emitted, Plan, Refusal, learning_rate_warning, unsaid
from planner.emit.source import building_source
from planner.schema import TrainSetting

LIBRARY = None
TITLE = "accelerate"
CODE_FILENAME = "building.py"


def write(plan: Plan) -> Emitted:
    """`accelerate.yaml`, with `building.py` as code."""
    setting = plan.setting
    launch = "accelerate launch --config_file accelerate.yaml your_script.py"
    if setting.accumulate > 1:
        launch = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={setting.accumulate} {launch}"
    notes = (
        "",
        f"Run: {launch}",
        f"Your DataLoader: batch_size={setting.batch_size} (one device's), drop_last=True.",
        f"Your script: Accelerator(gradient_accumulation_steps={setting.accumulate}), and "
        "`with accelerator.accumulate(model):` around each micro-batch.",
        f"The model and the optimizer: {CODE_FILENAME}.",
    )
    return Emitted(
        target="accelerate",
        filename="accelerate.yaml",
        text=plan.comment(*notes) + yaml.safe_dump(_values(setting), sort_keys=False),
        launch=launch,
        warnings=(*plan.warnings, *_warnings(setting)),
        code=building_source(plan),
        code_filename=CODE_FILENAME,
    )


def _values(setting: TrainSetting) -> dict[str, Any]:
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if setting.world_size > 1 else "NO",
        "num_machines": 1,
        "num_processes": setting.world_size,
        "mixed_precision": setting.precision if setting.autocast_dtype else "no",
        "use_cpu": False,
    }
    if setting.compile != "off":
        values["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": setting.compile,
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
        }
    return values


def refusals(plan: Plan) -> list[Refusal]:
    """What it cannot say of the plan's setting."""
    setting = plan.setting
    # ema, pure bf16 and gradients that stay are a matter of the user's own loop.
    return unsaid(setting, "accelerate", "ema", "pure-bf16", "zero_grad_to_none")


def _warnings(setting: TrainSetting) -> tuple[str, ...]:
    found = [learning_rate_warning(setting)]
    if setting.accumulate > 1:
        found.append(
            "`accelerate launch --gradient_accumulation_steps` is read by DeepSpeed alone: set "
            f"Accelerator(gradient_accumulation_steps={setting.accumulate}) or the environment."
        )
    if setting.precision == "tf32":
        found.append("TF32 has no key: building.py sets it.")
    return (*found, *loop_warnings(setting))


def loop_warnings(setting: TrainSetting) -> tuple[str, ...]:
    """What the setting asks of a loop that the user writes."""
    asked = []
    if setting.clip_grad:
        asked.append("clip gradients at a norm of 5.0")
    if setting.ema:
        asked.append("keep an average of the weights (ema)")
    if setting.loss != "cross-entropy":
        asked.append(f"use the {setting.loss} loss")
    if setting.precision == "pure-bf16":
        asked.append("cast the images to bfloat16")
    if setting.memory_format == "channels_last":
        asked.append("lay the images out channels_last")
    if not setting.zero_grad_to_none:
        asked.append("call zero_grad(set_to_none=False)")
    return (f"in your own loop: {'; '.join(asked)}.",) if asked else ()
