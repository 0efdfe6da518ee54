"""accelerate: the YAML of `accelerate launch --config_file`, and what belongs in your script.

Keys are the fields of ClusterConfig in accelerate 1.15, commands/config/config_args.py. There is
none for loading data: the script makes the DataLoader, and DataLoaderConfiguration holds what
`prepare` adds to it (utils/dataclasses.py). There is none for accumulation either, and
`--gradient_accumulation_steps` of `accelerate launch` reaches only DeepSpeed: it is an argument of
`Accelerator`, or ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the environment (utils/launch.py,
accelerator.py).
"""

from __future__ import annotations

from typing import Any

import yaml

from planner.schema import SwinConfig, TrainSetting
from planner.schema.distribution import DEEPSPEED, SHARDED
from planner.trainers.building import FILENAME as CODE_FILENAME
from planner.trainers.building import building_source
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
from planner.trainers.recipe import learning_rate_note, recipe_of
from planner.trainers.source import arguments, compiles_whole, image_lines, offloaded

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
    notes = (learning_rate_note(setting), *machines, *zero_notes(setting))
    notes = (*notes, *loop_notes(setting), *tuning)
    batch = {
        "train_micro_batch_size_per_gpu": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "gradient_clipping": recipe_of(setting).clip_norm or 0.0,
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
        "mixed_precision": setting.precision if autocast else "no",
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
            "dynamo_use_dynamic": setting.compile_dynamic,
            "dynamo_use_fullgraph": setting.compile_fullgraph,
        }
    return values


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
    """Keys of utils/launch.py, prepare_multi_gpu_env. Version 1 calls `reshard_after_forward` by
    its strategy."""
    setting = plan.setting
    reshard: bool | str = setting.fsdp_reshard
    if setting.fsdp_version == 1:
        reshard = "FULL_SHARD" if setting.fsdp_reshard else "SHARD_GRAD_OP"
    return {
        "fsdp_version": setting.fsdp_version,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(block_classes(plan.swin, setting)),
        "fsdp_reshard_after_forward": reshard,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,  # the model checkpoints itself
        **({"fsdp_use_orig_params": True} if setting.fsdp_version == 1 else {}),
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
        kind = "MixedPrecisionPolicy" if setting.fsdp_version == 2 else "MixedPrecision"
        policy = policy_source(setting)
        before += [
            f"policy = {kind}({policy})  # of torch.distributed.fsdp",
            "sharding = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)",
        ]
        given.append("fsdp_plugin=sharding")
    if setting.parallelism in DEEPSPEED:
        before.append("zero = DeepSpeedPlugin(hf_ds_config=DEEPSPEED)")
        given.append("deepspeed_plugin=zero")
    return tuple(before), (steps, *given)


def _script(plan: Plan) -> tuple[str, ...]:
    """The lines of a script that trains with `building.py`."""
    setting, recipe = plan.setting, recipe_of(plan.setting)
    rate = "LEARNING_RATE" if recipe.learning_rate is not None else "LR"
    built, stepped = _stepping(setting)
    before, given = _wrapping(setting)
    clip = (
        "        if accelerator.sync_gradients:",
        "            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)",
    )
    return (
        "loader = DataLoader(data, shuffle=True, **LOADER)",
        "# What Accelerator is given is in accelerate.utils.",
        f"loading = DataLoaderConfiguration(non_blocking={train_loader(plan).pin_memory})",
        *before,
        "accelerator = Accelerator(",
        f"    {', '.join((*given, 'dataloader_config=loading'))})",
        f"model = {build_call(plan.model, setting)}.to(accelerator.device)",
        *(line.replace("RATE", rate) for line in built),
        "for images, targets in loader:",
        *(("    images, targets = mix(images, targets)",) if recipe.mixes else ()),
        *(f"    {line}" for line in image_lines(setting)),
        "    with accelerator.accumulate(model):",
        *loss_lines(setting, "model", "        accelerator.backward"),
        *(clip if recipe.clip_norm is not None else ()),
        *stepped,
    )


def _own_sharding(setting: TrainSetting) -> dict[str, Any]:
    """Its FSDP is version 1 unless told, and gathers and reduces in the dtype of autocast
    (utils/dataclasses.py, set_mixed_precision)."""
    return {"fsdp_version": 1, **sharded_in_autocast(setting)}


def sharded_in_autocast(setting: TrainSetting) -> dict[str, Any]:
    name = {"bfloat16": "bf16", "float16": "fp16"}.get(setting.autocast_dtype or "", "fp32")
    return {"fsdp_param_dtype": name, "fsdp_reduce_dtype": name}


def refusals(plan: Plan) -> list[Refusal]:
    """It finds blocks by the name of their class, which is not known of a factory's."""
    unknown = plan.setting.parallelism in SHARDED and not isinstance(plan.model, SwinConfig)
    law = "it shards by the names of blocks' classes, which are not known of a factory's model"
    return refused((unknown, law, "parallelism=ddp"))


def _stepping(setting: TrainSetting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The lines that build the optimizer of rate RATE and its schedule, and those that step both;
    in backward each weight has its own, and `accelerator` knows of none."""
    if setting.optimizer_in_backward:
        return (
            "optimizers = build_optimizers(model, RATE)  # keep them: backward steps each",
            "schedules = [build_schedule(optimizer, steps) for optimizer in optimizers]",
            "model, loader = accelerator.prepare(model, loader)",
        ), ("        for schedule in schedules:", "            schedule.step()")
    return (
        "optimizer = build_optimizer(model, RATE)",
        "schedule = build_schedule(optimizer, steps)  # of the optimizer, on one device",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    ), (
        "        optimizer.step()",
        f"        optimizer.zero_grad(set_to_none={setting.zero_grad_to_none})",
        "        if accelerator.sync_gradients:",
        "            schedule.step()",
    )


def loss_lines(setting: TrainSetting, model: str, backward: str) -> tuple[str, ...]:
    """The forward of a loop and its backward, which `backward` calls (as far in as it is written).
    What is called in the model's place is `model`."""
    margin = " " * (len(backward) - len(backward.lstrip()))
    loss = f"training_loss({model}(images), targets)"
    if setting.offload == "none":
        return (f"{backward}({loss})",)
    forward = offloaded(f"{margin}loss = {loss}\n", setting, model, "images, targets")
    return (*forward.splitlines(), f"{backward}(loss)")


def loop_notes(setting: TrainSetting) -> tuple[str, ...]:
    """What the setting asks of a script that the file does not write out."""
    found = []
    if setting.ema:
        found.append("Keep an average of the weights in your loop (ema), as the probe did.")
    if setting.validation_batch_size:
        found.append(
            f"Validate with batches of {setting.validation_batch_size} images "
            "(VALIDATION_BATCH_SIZE), as probed."
        )
    return tuple(found)


TRAINER = Trainer(
    name="accelerate",
    title="accelerate",
    filename=FILENAME,
    write=write,
    refusals=refusals,
    parallel={
        "ddp": Parallel(DDP_OPTIONS | SYNC),
        # accelerator.py and state.py look for FSDP and DeepSpeed where there is no `cpu` only.
        "fsdp": Parallel(FSDP_OPTIONS | SYNC | {"fsdp_version"}, _own_sharding, True),
        "hsdp": Parallel(FSDP_OPTIONS | SYNC | {"fsdp_shard_size"}, sharded_in_autocast, True),
        **on_gpus(ZERO_PARALLEL),
    },
    # Pure bf16 and gradients that stay are up to the script's own loop, which the file shows.
    expresses=(*IN_A_SCRIPT, "optimizer_in_backward", "zero_grad_to_none", "ema", "pure-bf16"),
)
