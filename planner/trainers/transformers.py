"""transformers: a Python file with the model and `TrainingArguments` for its Trainer.

Argument names as in transformers 5.23, training_args.py; `activation_checkpointing` is what was
called `gradient_checkpointing` before. What the Trainer does by itself, read there: it clips
gradients at 1.0, decays nothing, warms nothing up and keeps the last, smaller batch; its learning
rate is 5e-5 whatever the batch, its optimizer is `adamw_torch_fused` and `num_labels` is 2.
"""

from __future__ import annotations

from string import Template
from typing import Any

from planner.parallel.deepspeed_configuration import engine_values
from planner.schema import TrainSetting
from planner.schema.distribution import DEEPSPEED
from planner.trainers.accelerate import sharded_in_autocast
from planner.trainers.copies import Source, before_return, sections
from planner.trainers.engine import ZERO_PARALLEL, on_gpus, zero_notes
from planner.trainers.fine_tuning import trained_source
from planner.trainers.imports import import_block
from planner.trainers.launch import launch, nodes_notes, torchrun
from planner.trainers.loader import training_load
from planner.trainers.parallel_source import block_classes
from planner.trainers.plan import (
    DDP_OPTIONS,
    IN_A_SCRIPT,
    SYNC,
    Parallel,
    Plan,
    Refusal,
    Trainer,
    Written,
    refused,
)
from planner.trainers.pretrained import fine_tuning_notes, weights_name
from planner.trainers.recipe import (
    EPOCHS,
    FINAL_SHARE,
    WARMUP_EPOCHS,
    WARMUP_START,
    learning_rate_note,
    recipe_of,
    rounded,
)
from planner.trainers.source import (
    BENCHMARK,
    arguments,
    budget_source,
    image_lines,
    mapping,
    offloaded,
    placed,
    transformers_own,
)
from planner.trainers.steps import MIXING, optimizer_source
from planner.units import format_bytes

FILENAME = "training_transformers.py"

_OPTIMIZERS = {
    # The Trainer's names for the very optimizer that was probed; every other is built in the file.
    "adamw": "adamw_torch", "adamw-foreach": "adamw_torch", "adamw-fused": "adamw_torch_fused",
    "adamw-8bit": "adamw_torch_8bit",  # torchao's, in the same blocks (trainer_optimizer.py)
    "rmsprop": "rmsprop", "rmsprop-foreach": "rmsprop",
}  # fmt: skip


def write(plan: Plan) -> Written:
    """`training_transformers.py`: `ARGUMENTS`, `build_model()`, `build_trainer(train_dataset)`."""
    run = launch(plan, torchrun("your_script.py", plan))
    notes = (*_notes(plan), *fine_tuning_notes(plan.model, plan.setting))
    return Written(_text(plan, run, notes), run, notes)


def training_arguments(plan: Plan) -> dict[str, Any]:
    """The keyword arguments of `TrainingArguments` for the setting, `output_dir` left to you."""
    setting, recipe = plan.setting, recipe_of(plan.setting)
    values: dict[str, Any] = {
        "per_device_train_batch_size": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "per_device_eval_batch_size": recipe.validation_batch_size,
        # DeepSpeed autocasts by itself: from here it would convert the model instead.
        "bf16": setting.precision == "bf16" and setting.parallelism not in DEEPSPEED,
        "fp16": setting.precision == "fp16" and setting.parallelism not in DEEPSPEED,
    }
    if plan.device == "cpu":
        values["use_cpu"] = True
    elif setting.precision in ("fp32", "tf32"):
        values["tf32"] = setting.precision == "tf32"
    values["activation_checkpointing"] = transformers_own(plan.swin, setting)
    values["torch_compile"] = setting.compile != "off" and not _compiles_itself(setting)
    if values["torch_compile"]:
        values["torch_compile_mode"] = setting.compile
    if _optimizer_name(setting) is not None:
        values["optim"] = _optimizer_name(setting)
    if recipe.learning_rate is not None:
        values["learning_rate"] = recipe.learning_rate
    values |= {
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.clip_norm or 0.0,
        "num_train_epochs": EPOCHS,
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "warmup_steps": rounded(WARMUP_EPOCHS / EPOCHS),  # below 1, a share of all steps
        "lr_scheduler_kwargs": {"min_lr_rate": FINAL_SHARE, "warmup_lr_rate": WARMUP_START},
        **_loader_values(plan),
    }
    values |= _parallel_values(plan)
    if setting.loss == "label-smoothing":
        values["label_smoothing_factor"] = recipe.smoothing
    # Images pass through a transform, whose columns the Trainer would drop before it sees them.
    return {**values, "remove_unused_columns": False}


def _parallel_values(plan: Plan) -> dict[str, Any]:
    """What the Trainer is told of several devices; by itself it looks for unused parameters
    wherever it does not checkpoint (trainer.py, _build_accelerator_args)."""
    setting = plan.setting
    found: dict[str, Any] = {}
    if setting.gradient_sync == "every" and setting.parallelism not in ("none", *DEEPSPEED):
        found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if setting.parallelism == "ddp":
        found |= {
            "ddp_find_unused_parameters": setting.ddp_find_unused,
            "ddp_broadcast_buffers": setting.ddp_broadcast_buffers,
        }
        if setting.ddp_static_graph:
            found["ddp_static_graph"] = True
        if setting.ddp_bucket_mb is not None:
            found["ddp_bucket_cap_mb"] = setting.ddp_bucket_mb
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


def _own_ddp(setting: TrainSetting) -> dict[str, Any]:
    """trainer.py, _build_accelerator_args: what checkpoints inside the model it cannot see."""
    by_itself = "nested", "stages"
    return {"ddp_find_unused": setting.checkpointing not in by_itself}


def _loader_values(plan: Plan) -> dict[str, Any]:
    """The Trainer loads what it validates on with the same values."""
    given = training_load(plan)
    del given["batch_size"]
    return {f"dataloader_{name}": value for name, value in given.items()}


def _compiles_itself(setting: TrainSetting) -> bool:
    """Whether `build_model` compiles: the Trainer has arguments for the whole model and its mode
    only (transformers 5.23, `TrainingArguments`)."""
    own = setting.compile_scope == "blocks"
    return own or setting.compile_dynamic or setting.compile_fullgraph


def _optimizer_name(setting: TrainSetting) -> str | None:
    return None if setting.amsgrad else _OPTIMIZERS.get(setting.optimizer)


def _text(plan: Plan, run: str, notes: tuple[str, ...]) -> str:
    setting = plan.setting
    own = transformers_own(plan.swin, setting)  # then the Trainer turns it on, from its argument
    built = setting.model_copy(update={"checkpointing": "none"}) if own else setting
    model = trained_source(plan.model, built, by_peft=True)
    body = model.body
    if _compiles_itself(setting) and setting.compile_scope == "model":
        line = f"    model.compile({arguments(setting.compile_arguments)})\n"
        body = before_return(body, line)
    optimizer_imports, optimizer = optimizer_source(setting)
    own_optimizer = _optimizer_name(setting) is None
    mixing_imports, mixing = MIXING if _soft(setting) else Source()
    config = "SwinConfig" if plan.swin.version == 1 else "Swinv2Config"
    imports = [
        "from typing import Any",
        *(line for line in model.imports if "transformers" not in line),
        *(optimizer_imports if own_optimizer else ()),
        *mixing_imports,
        f"from transformers import AutoModelForImageClassification, {config}",
        "from transformers import Trainer, TrainingArguments",
    ]
    rate = "" if recipe_of(setting).learning_rate is not None else ", learning_rate=LR"
    use = (
        f"In your script: from {plan.module(FILENAME)} import build_trainer",
        f"                build_trainer(train_dataset, eval_dataset{rate}).train()",
        f"For transformers 5.23{' and peft 0.21' if setting.lora_rank else ''}.",
    )
    head = (
        plan.comment(run, *use, notes=notes),
        import_block(tuple(imports)) + "\n",
        BENCHMARK + budget_source(setting),
        f"NUM_CLASSES = {plan.model.num_classes}\n" if mixing else "",
        mapping("ARGUMENTS", training_arguments(plan)),
    )
    return sections(
        "".join(head),
        placed(body, setting),
        optimizer if own_optimizer else "",
        _collate(setting),
        mixing,
        _MIXING_TRAINER if mixing else "",
        _offloading_trainer(setting) if setting.offload != "none" else "",
        _trainer(setting, own_optimizer, weights_name(plan.model, setting) is not None),
    )


def _soft(setting: TrainSetting) -> bool:
    return setting.loss == "soft-target"


def _collate(setting: TrainSetting) -> str:
    lines = '    images = torch.stack([example["pixel_values"] for example in examples])\n'
    lines += "".join(f"    {line}\n" for line in image_lines(setting))
    return (
        "def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:\n"
        '    """One example: pixel_values [channels, height, width], and labels, its class."""\n'
        f"{lines}"
        '    labels = torch.tensor([example["labels"] for example in examples])\n'
        '    return {"pixel_values": images, "labels": labels}\n'
    )


_MIXING_TRAINER = '''class MixingTrainer(Trainer):
    """Mixes the images of each training batch, on the device."""

    def training_step(self, model: Any, inputs: dict[str, Any], *more: Any) -> torch.Tensor:
        inputs = self._prepare_inputs(inputs)
        images, labels = mix(inputs["pixel_values"], inputs["labels"])
        return super().training_step(model, {"pixel_values": images, "labels": labels}, *more)


def soft_target_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Cross-entropy with soft targets, over all the images of an optimizer step while training."""
    if num_items_in_batch is None:
        return F.cross_entropy(outputs.logits, labels)
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
'''


def _offloading_trainer(setting: TrainSetting) -> str:
    lines = "        return super().compute_loss(model, inputs, *more, **given)\n"
    return (
        f"class OffloadingTrainer({_mixing(setting)}):\n"
        '    """What backward needs waits in the memory of the host."""\n\n'
        "    def compute_loss(self, model: Any, inputs: Any, *more: Any, **given: Any) -> Any:\n"
        "        tensors = [t for t in inputs.values() if isinstance(t, torch.Tensor)]\n"
        + offloaded(lines, setting, "model", "*tensors")
    )


def _mixing(setting: TrainSetting) -> str:
    return "MixingTrainer" if _soft(setting) else "Trainer"


def _trainer(setting: TrainSetting, own_optimizer: bool, pretrained: bool) -> str:
    keywords, given = [], "output_dir, **{**ARGUMENTS, **more}"
    if recipe_of(setting).learning_rate is None:
        keywords = ["    learning_rate: float,\n"]
        given = (
            '\n        output_dir, **{**ARGUMENTS, "learning_rate": learning_rate, **more}\n    '
        )
    if pretrained:
        keywords.append("    pretrained: bool = True,\n")
    more = "        compute_loss_func=soft_target_loss,\n" if _soft(setting) else ""
    return _TRAINER.substitute(
        keywords="".join(["    *,\n", *keywords]) if keywords else "",
        given=given,
        pretrained="pretrained" if pretrained else "",
        moved=_MOVED if own_optimizer else "",
        kind="OffloadingTrainer" if setting.offload != "none" else _mixing(setting),
        more=_OPTIMIZER + more if own_optimizer else more,
    )


_MOVED = "    model.to(arguments.device)  # before the optimizer takes its parameters\n"
_OPTIMIZER = "        optimizers=(build_optimizer(model, arguments.learning_rate), None),\n"
_TRAINER = Template(
    '''\
def build_trainer(
    train_dataset: Any,
    eval_dataset: Any = None,
    output_dir: str = "output",
$keywords\
    **more: Any,
) -> Trainer:
    """`more` are further TrainingArguments, or others than those above."""
    arguments = TrainingArguments($given)
    model = build_model($pretrained)
$moved\
    return $kind(
        model,
        arguments,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=collate,
$more\
    )
'''
)


def _notes(plan: Plan) -> tuple[str, ...]:
    model, setting = plan.swin, plan.setting
    found = [learning_rate_note(setting), *nodes_notes(setting), *zero_notes(setting)]
    if setting.lora_rank:
        classifier = model.stage_channels(model.num_stages - 1) + 1
        copy = format_bytes(4 * classifier * model.num_classes)
        found.append(
            f"The adapters are peft's, which must be installed. It keeps the classifier as it was "
            f"beside the trained one: {copy} more than estimated."
        )
    if recipe_of(setting).weight_decay and _optimizer_name(setting) is not None:
        found.append("The Trainer applies no weight decay to biases and norms.")
    return tuple(found)


def refusals(plan: Plan) -> list[Refusal]:
    """An optimizer built in the file, where the Trainer takes none (trainer.py, __init__)."""
    setting = plan.setting
    law = f"it takes no optimizer of yours under fsdp, and {setting.optimizer} is none of its own"
    own = setting.parallelism == "fsdp" and _optimizer_name(setting) is None
    return refused((own, law, "optimizer=adamw"))


TRAINER = Trainer(
    name="transformers",
    title="transformers' Trainer",
    filename=FILENAME,
    write=write,
    expresses=(*IN_A_SCRIPT, "pure-bf16"),
    refusals=refusals,
    library="transformers",
    parallel={
        "ddp": Parallel(DDP_OPTIONS - {"ddp_bucket_view", "ddp_compression"} | SYNC, _own_ddp),
        "fsdp": Parallel(frozenset(("fsdp_reshard",)) | SYNC, sharded_in_autocast, True),
        **on_gpus(ZERO_PARALLEL),
    },
)
