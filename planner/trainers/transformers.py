"""transformers: a Python file with the model and `TrainingArguments` for its Trainer.

Argument names as in transformers 5.23, training_args.py. What the Trainer does by itself, read
there: it clips gradients at 1.0, decays nothing, warms nothing up and keeps the last, smaller
batch; its learning rate is 5e-5 whatever the batch, its optimizer is `adamw_torch_fused` and
`num_labels` is 2. The last step of an epoch may have fewer micro-batches, and it takes their mean.
"""

from __future__ import annotations

from typing import Any

from planner.core.schema.distribution import DEEPSPEED
from planner.core.units import format_bytes
from planner.estimation.recipe import learning_rate_note, rounded
from planner.trainers.accelerate import sharded_in_autocast
from planner.trainers.building import shown
from planner.trainers.copies import before_return, sections
from planner.trainers.engine import ZERO_PARALLEL, on_gpus, zero_notes
from planner.trainers.fine_tuning import trained_source
from planner.trainers.imports import import_block
from planner.trainers.launch import launch, nodes_notes, torchrun
from planner.trainers.loader import training_load
from planner.trainers.parallel_source import block_classes
from planner.trainers.plan import (
    IN_A_SCRIPT,
    SYNC,
    Parallel,
    Plan,
    Trainer,
    Written,
)
from planner.trainers.pretrained import fine_tuning_notes, weights_name
from planner.trainers.source import (
    arguments,
    benchmark_source,
    budget_source,
    compiles_whole,
    image_lines,
    mapping,
    offloaded,
    placed,
)
from planner.trainers.steps import mixing_source, optimizer_source, transforms_source
from planner.trainers.templates import render
from planner.training.parallel.deepspeed_configuration import engine_values

FILENAME = "training_transformers.py"


def write(plan: Plan) -> Written:
    """`training_transformers.py`: `ARGUMENTS`, `build_model()`, `build_trainer(train_dataset)`."""
    run = launch(plan, torchrun("your_script.py", plan))
    notes = (*_notes(plan), *fine_tuning_notes(plan.model, plan.setting))
    return Written(_text(plan, run, notes), run, notes)


def training_arguments(plan: Plan) -> dict[str, Any]:
    """The keyword arguments of `TrainingArguments` for the setting, `output_dir` left to you."""
    setting, recipe = plan.setting, plan.recipe
    values: dict[str, Any] = {
        "per_device_train_batch_size": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "per_device_eval_batch_size": recipe.validation_batch_size,
        # DeepSpeed autocasts by itself: from here it would convert the model instead.
        "bf16": setting.precision in ("bf16", "fp8") and setting.parallelism not in DEEPSPEED,
        "fp16": setting.precision == "fp16" and setting.parallelism not in DEEPSPEED,
    }
    if plan.device == "cpu":
        values["use_cpu"] = True
    elif setting.precision in ("fp32", "tf32"):
        values["tf32"] = setting.precision == "tf32"
    if recipe.learning_rate is not None:
        values["learning_rate"] = recipe.learning_rate
    values |= {
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.clip_norm or 0.0,
        "num_train_epochs": recipe.epochs,
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        # Below 1, a share of all steps.
        "warmup_steps": rounded(recipe.warmup_epochs / recipe.epochs),
        "lr_scheduler_kwargs": {
            "min_lr_rate": recipe.final_share,
            "warmup_lr_rate": recipe.warmup_start,
        },
        **_loader_values(plan),
    }
    values |= _parallel_values(plan)
    return {
        **values,
        "save_strategy": "epoch",
        "save_total_limit": 2,  # the best and the last
        "label_names": ["labels"],  # which it does not find in a model of peft's
        # Images pass through a transform, whose columns it would drop before it sees them.
        "remove_unused_columns": False,
    }


VALIDATION = {
    "eval_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
}
"""Further arguments where there are pictures to validate."""


def _parallel_values(plan: Plan) -> dict[str, Any]:
    """What the Trainer is told of several devices."""
    setting = plan.setting
    found: dict[str, Any] = {}
    if setting.gradient_sync == "every" and setting.parallelism not in ("none", *DEEPSPEED):
        found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if setting.parallelism == "ddp":
        found |= {
            "ddp_find_unused_parameters": False,  # by itself it looks for them
            "ddp_broadcast_buffers": True,
        }
    if setting.parallelism == "fsdp":
        found["fsdp"] = True
        found["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": block_classes(plan.swin, setting),
            "reshard_after_forward": setting.fsdp_reshard,
            "state_dict_type": "FULL_STATE_DICT",
        }
    if setting.parallelism in DEEPSPEED:
        found["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            **engine_values(setting),
        }
    return found


def _loader_values(plan: Plan) -> dict[str, Any]:
    """The Trainer loads what it validates on with the same values."""
    given = training_load(plan)
    del given["batch_size"]
    return {f"dataloader_{name}": value for name, value in given.items()}


def _text(plan: Plan, run: str, notes: tuple[str, ...]) -> str:
    setting, recipe = plan.setting, plan.recipe
    model = trained_source(plan.model, setting, by_peft=True)
    body = model.body
    if compiles_whole(setting):  # the Trainer itself compiles graphs of any batch
        line = f"    model.compile({arguments(setting.compile_arguments)})\n"
        body = before_return(body, line)
    step = (
        transforms_source(recipe, plan.model),
        optimizer_source(plan),
        mixing_source(recipe),
    )
    config = "SwinConfig" if plan.swin.version == 1 else "Swinv2Config"
    imports = (
        "from typing import Any",
        "from torch.nn import functional as F",
        *(line for line in model.imports if "transformers" not in line),
        *(line for piece in step for line in piece.imports),
        f"from transformers import AutoModelForImageClassification, {config}",
        "from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed",
    )
    rate = recipe.learning_rate is not None
    script = render("transformers.j2", module=plan.module(FILENAME), rate=rate)
    versions = f"for transformers 5.23{' and peft 0.21' if setting.lora_rank else ''}"
    head = (
        plan.comment(run, *shown(script, versions), notes=notes),
        import_block(imports) + "\n",
        benchmark_source(setting) + budget_source(setting),
        f"NUM_CLASSES = {plan.model.num_classes}\n" if recipe.mixes else "",
        mapping("ARGUMENTS", training_arguments(plan)),
        mapping("VALIDATION", VALIDATION),
    )
    trainer = render(
        "transformers_trainer.j2",
        setting=setting,
        recipe=recipe,
        rate=rate,
        image_lines=image_lines(setting),
        compute_loss=offloaded(_COMPUTE_LOSS, setting, "model", "*tensors"),
        pretrained=weights_name(plan.model, setting) is not None,
    )
    bodies = (piece.body for piece in step)
    return sections("".join(head), placed(body, setting), *bodies, trainer)


_COMPUTE_LOSS = "        return super().compute_loss(model, inputs, *more, **given)\n"


def _notes(plan: Plan) -> tuple[str, ...]:
    model, setting = plan.swin, plan.setting
    found = [learning_rate_note(setting, plan.model), *nodes_notes(setting), *zero_notes(setting)]
    if setting.lora_rank:
        classifier = model.stage_channels(model.num_stages - 1) + 1
        copy = format_bytes(4 * classifier * model.num_classes)
        found.append(
            f"The adapters are peft's, which must be installed. It keeps the classifier as it was "
            f"beside the trained one: {copy} more than estimated."
        )
    found.append(
        "The optimizer is build_optimizer's, not one that `optim` names: those decay position "
        "embeddings and v2's logit_scale, which the recipe does not."
    )
    return tuple(found)


TRAINER = Trainer(
    name="transformers",
    title="transformers' Trainer",
    filename=FILENAME,
    write=write,
    expresses=(*IN_A_SCRIPT, "pure-bf16", "fp8"),
    library="transformers",
    parallel={
        "ddp": Parallel(SYNC),
        "fsdp": Parallel(frozenset(("fsdp_reshard",)) | SYNC, sharded_in_autocast, True),
        **on_gpus(ZERO_PARALLEL),
    },
)
