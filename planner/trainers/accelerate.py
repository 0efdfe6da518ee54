"""accelerate: the YAML of `accelerate launch --config_file`, and what belongs in your script.

Keys are the fields of ClusterConfig in accelerate 1.15, commands/config/config_args.py. There is
none for loading data: the script makes the DataLoader, and DataLoaderConfiguration holds what
`prepare` adds to it (utils/dataclasses.py). There is none for accumulation either, and
`--gradient_accumulation_steps` of `accelerate launch` reaches only DeepSpeed: it is an argument of
`Accelerator`, or ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the environment (utils/launch.py,
accelerator.py).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.distribution import DEEPSPEED, SHARDED
from planner.estimation.recipe import learning_rate_note
from planner.trainers.building import FILENAME as CODE_FILENAME
from planner.trainers.building import building_source, forward_source
from planner.trainers.engine import ZERO_PARALLEL, engine_source, on_gpus, zero_notes
from planner.trainers.launch import PORT, launch, nodes_notes, torchrun
from planner.trainers.loader import train_loader
from planner.trainers.parallel_source import block_classes, ddp_arguments, policy_source
from planner.trainers.plan import (
    DDP_OPTIONS,
    FSDP_OPTIONS,
    IN_A_SCRIPT,
    SYNC,
    Parallel,
    Plan,
    Refusal,
    Trainer,
    Written,
    refused,
)
from planner.trainers.pretrained import build_call, fine_tuning_notes
from planner.trainers.source import arguments, compiles_whole, image_lines
from planner.trainers.templates import render

FILENAME = "accelerate.yaml"


def write(plan: Plan) -> Written:
    """`accelerate.yaml`, with `building.py` as code."""
    setting = plan.setting
    several = setting.nodes > 1
    meeting = f" --machine_rank RANK --main_process_ip HOST --main_process_port {PORT}"
    command = (
        f"accelerate launch --config_file {plan.path(FILENAME)}{meeting if several else ''} "
        "your_script.py"
    )
    variables = {}
    by_torchrun = plan.device == "cpu" and setting.parallelism != "none"
    if by_torchrun:
        command = torchrun("your_script.py", plan)
        variables = _environment(plan)
    if setting.accumulate > 1:
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(setting.accumulate)
    run = launch(plan, command, variables)
    tuning = fine_tuning_notes(plan.model, setting)
    machines = nodes_notes(setting)
    machines += (_BY_TORCHRUN,) if by_torchrun else (_RANK,) if several else ()
    notes = (learning_rate_note(setting, plan.model), *machines, *zero_notes(setting))
    notes = (*notes, *tuning)
    batch = {
        "train_micro_batch_size_per_gpu": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "gradient_clipping": plan.recipe.clip_norm or 0.0,
    }
    more = f"The model, the optimizer and what your script does with them: {CODE_FILENAME}."
    text = plan.comment(run, more, notes=notes) + yaml.safe_dump(_values(plan), sort_keys=False)
    code = building_source(plan, run, _script(plan), notes, engine_source(setting, batch))
    return Written(text, run, notes, code)


_BY_TORCHRUN = (
    "On CPUs accelerate's launcher starts one process, unless by mpirun: torchrun starts them, "
    "and what the file says is in the environment."
)
_RANK = "RANK is 0 on the machine called HOST, and 1, 2 … on the others."


def _values(plan: Plan) -> dict[str, Any]:
    setting, cpu = plan.setting, plan.device == "cpu"
    by_deepspeed = setting.parallelism in DEEPSPEED
    # DeepSpeed autocasts by itself: from here it would convert the model instead.
    autocast = setting.autocast_dtype is not None and not by_deepspeed
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(setting, cpu),
        "num_machines": setting.nodes,
        "num_processes": setting.world_size,
        "mixed_precision": _autocast(setting) if autocast else "no",
        "use_cpu": cpu,
    }
    if by_deepspeed:  # its configuration: in building.py
        values["deepspeed_config"] = {"deepspeed_multinode_launcher": "standard"}
    if setting.parallelism in SHARDED:
        values["fsdp_config"] = _fsdp_values(plan)
    if setting.parallelism == "hsdp":
        values["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": setting.num_copies,
            "parallelism_config_dp_shard_size": setting.shard_size,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": 1,
            "parallelism_config_sp_size": 1,
        }
    if compiles_whole(setting):  # blocks: in building.py
        values["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": setting.compile,
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": setting.compile_fullgraph,
        }
    return values


def _autocast(setting: TrainSetting) -> str:
    """Its "fp8" would convert the model by itself: building.py has, and the rest is bf16."""
    return "bf16" if setting.precision == "fp8" else setting.precision


def _environment(plan: Plan) -> dict[str, str]:
    """What its launcher would make of the file (utils/launch.py, prepare_multi_gpu_env)."""
    values = _values(plan)
    return {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": str(values["mixed_precision"]),
        **{
            f"ACCELERATE_{key.upper()}": str(value)
            for key, value in values.get("dynamo_config", {}).items()
        },
    }


def _distributed_type(setting: TrainSetting, cpu: bool) -> str:
    if setting.parallelism in SHARDED:
        return "FSDP"
    if setting.parallelism in DEEPSPEED:
        return "DEEPSPEED"
    if setting.parallelism == "none":
        return "NO"
    return "MULTI_CPU" if cpu else "MULTI_GPU"


def _fsdp_values(plan: Plan) -> dict[str, Any]:
    """Keys of utils/launch.py, prepare_multi_gpu_env. Its own FSDP is version 1 unless told."""
    setting = plan.setting
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(block_classes(plan.swin, setting)),
        "fsdp_reshard_after_forward": setting.fsdp_reshard,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,  # the model checkpoints itself
    }


def _wrapping(setting: TrainSetting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(lines before the Accelerator, its further arguments) that say how the model is wrapped."""
    before: list[str] = []
    given: list[str] = []
    steps = "gradient_accumulation_steps=ACCUMULATE"
    if setting.gradient_sync == "every" and setting.parallelism not in DEEPSPEED:
        before.append("each = GradientAccumulationPlugin(ACCUMULATE, sync_each_batch=True)")
        steps = "gradient_accumulation_plugin=each"
    options = arguments(ddp_arguments(setting))
    if setting.ddp_compression != "none":
        hook = f"comm_hook=DDPCommunicationHookType.{setting.ddp_compression.upper()}"
        options = f"{options}, {hook}" if options else hook
    if options:
        before.append(f"wrapping = DistributedDataParallelKwargs({options})")
        given.append("kwargs_handlers=[wrapping]")
    if setting.parallelism in SHARDED:
        policy = policy_source(setting)
        before += [
            f"policy = MixedPrecisionPolicy({policy})",
            "sharding = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)",
        ]
        given.append("fsdp_plugin=sharding")
    if setting.parallelism in DEEPSPEED:
        before.append("zero = DeepSpeedPlugin(hf_ds_config=DEEPSPEED)")
        given.append("deepspeed_plugin=zero")
    return tuple(before), (steps, *given)


def _script(plan: Plan) -> str:
    """The script that trains with `building.py`."""
    setting = plan.setting
    before, given = _wrapping(setting)
    called = re.findall(r"\b[A-Z]\w+(?=[(.])", " ".join((*before, *given)))
    helpers = {"DataLoaderConfiguration", "set_seed", *called} - {"MixedPrecisionPolicy"}
    return render(
        "accelerate.j2",
        setting=setting,
        recipe=plan.recipe,
        rate=plan.recipe.learning_rate,
        helpers=", ".join(sorted(helpers)),
        sharded=setting.parallelism in SHARDED,
        non_blocking=train_loader(plan).pin_memory,
        before=before,
        given=", ".join(given),
        build=build_call(plan.model, setting),
        image_lines=image_lines(setting),
        forward=forward_source(setting, "model", " " * 16),
    )


def sharded_in_autocast(setting: TrainSetting) -> dict[str, Any]:
    """It gathers and reduces in the dtype of autocast (utils/dataclasses.py,
    set_mixed_precision)."""
    name = {"bfloat16": "bf16", "float16": "fp16"}.get(setting.autocast_dtype or "", "fp32")
    return {"fsdp_param_dtype": name, "fsdp_reduce_dtype": name}


def refusals(plan: Plan) -> list[Refusal]:
    """It finds blocks by the name of their class, which is not known of a factory's; and torch's
    AveragedModel is a copy of the model, which has to be whole."""
    setting = plan.setting
    sharded = setting.parallelism in SHARDED
    unknown = sharded and not isinstance(plan.model, SwinConfig)
    law = "it shards by the names of blocks' classes, which are not known of a factory's model"
    whole = f"its script averages whole weights, and {setting.parallelism} gives a device a part"
    return refused((unknown, law, "parallelism=ddp"), (sharded and setting.ema, whole, "ema=false"))


TRAINER = Trainer(
    name="accelerate",
    title="accelerate",
    filename=FILENAME,
    write=write,
    refusals=refusals,
    parallel={
        "ddp": Parallel(DDP_OPTIONS | SYNC),
        # accelerator.py and state.py look for FSDP and DeepSpeed where there is no `cpu` only.
        "fsdp": Parallel(FSDP_OPTIONS | SYNC, sharded_in_autocast, True),
        "hsdp": Parallel(FSDP_OPTIONS | SYNC | {"fsdp_shard_size"}, sharded_in_autocast, True),
        **on_gpus(ZERO_PARALLEL),
    },
    # Pure bf16 and gradients that stay are up to the script's own loop, which the file shows.
    expresses=(
        *IN_A_SCRIPT,
        "optimizer_in_backward",
        "zero_grad_to_none",
        "ema",
        "pure-bf16",
        "fp8",
    ),
)
