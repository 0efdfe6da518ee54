"""transformers: a Python file with the model and `TrainingArguments` for its Trainer.

Argument names as in transformers 5.23, training_args.py; `activation_checkpointing` is what was
called `gradient_checkpointing` before. What the Trainer does by itself, read there: it clips
gradients at 1.0, its learning rate is 5e-5 whatever the batch, its optimizer is `adamw_torch_fused`
and `num_labels` is 2.
"""

from __future__ import annotations

from typing import Any

from planner.emit.plan import (
    CLIP_NORM,
    LABEL_SMOOTHING,
    Emitted,
    Plan,
    Refusal,
    learning_rate,
    learning_rate_warning,
    torchrun,
    unsaid,
)
from planner.emit.source import (
    import_block,
    mapping,
    model_source,
    optimizer_source,
    placed,
    transformers_own,
)
from planner.schema import Library, SwinConfig, TrainSetting

LIBRARY: Library = "transformers"
TITLE = "transformers' Trainer"
FILENAME = "training.py"

_OPTIMIZERS = {
    # The Trainer's names for the very optimizer that was probed; every other is built in the file.
    "adamw": "adamw_torch", "adamw-foreach": "adamw_torch", "adamw-fused": "adamw_torch_fused",
    "rmsprop": "rmsprop", "rmsprop-foreach": "rmsprop",
}  # fmt: skip


def write(plan: Plan) -> Emitted:
    """`training.py`: `ARGUMENTS`, `build_model()`, `build_trainer(train_dataset)`."""
    setting = plan.setting
    launch = torchrun("your_script.py", setting)
    return Emitted(
        target="transformers",
        filename=FILENAME,
        text=_text(plan),
        launch=launch,
        warnings=(*plan.warnings, *_warnings(setting)),
    )


def training_arguments(model: SwinConfig, setting: TrainSetting) -> dict[str, Any]:
    """The keyword arguments of `TrainingArguments` for `setting`, `output_dir` left to you."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": setting.batch_size,
        "gradient_accumulation_steps": setting.accumulate,
        "bf16": setting.precision == "bf16",
        "fp16": setting.precision == "fp16",
    }
    if setting.precision in ("fp32", "tf32"):
        values["tf32"] = setting.precision == "tf32"
    values["activation_checkpointing"] = transformers_own(model, setting)
    values["torch_compile"] = setting.compile != "off"
    if setting.compile != "off":
        values["torch_compile_mode"] = setting.compile
    if _optimizer_name(setting) is not None:
        values["optim"] = _optimizer_name(setting)
    rate = learning_rate(setting)
    if rate is not None:
        values["learning_rate"] = rate
    if setting.clip_grad:
        values["max_grad_norm"] = CLIP_NORM
    if setting.loss == "label-smoothing":
        values["label_smoothing_factor"] = LABEL_SMOOTHING
    if setting.validation_batch_size:
        values["per_device_eval_batch_size"] = setting.validation_batch_size
    # Images pass through a transform, whose columns the Trainer would drop before it sees them.
    return {**values, "remove_unused_columns": False}


def _optimizer_name(setting: TrainSetting) -> str | None:
    return None if setting.amsgrad else _OPTIMIZERS.get(setting.optimizer)


def _text(plan: Plan) -> str:
    setting = plan.setting
    own = transformers_own(plan.swin, setting)  # then the Trainer turns it on, from its argument
    built = setting.model_copy(update={"checkpointing": "none"}) if own else setting
    model = model_source(plan.model, built)
    optimizer_imports, optimizer = optimizer_source(setting)
    own_optimizer = _optimizer_name(setting) is None
    imports = [
        "from typing import Any",
        *(line for line in model.imports if "transformers" not in line),
        *(optimizer_imports if own_optimizer else ()),
        *(["from torch.nn import functional as F"] if _soft(setting) else []),
        "from transformers import (\n    AutoModelForImageClassification,\n"
        f"    {_config_class(plan)},\n    Trainer,\n    TrainingArguments,\n)",
    ]
    return "".join(
        (
            plan.comment("", "For transformers 5.23. Use: build_trainer(your_dataset).train()"),
            import_block(tuple(imports)) + "\n",
            mapping("ARGUMENTS", training_arguments(plan.swin, setting)) + "\n\n",
            placed(model.body, setting),
            "\n\n" + optimizer if own_optimizer else "",
            "\n\n" + _collate(setting),
            "\n\n" + _SOFT_LOSS.format(accumulate=setting.accumulate) if _soft(setting) else "",
            "\n\n" + _trainer(setting, own_optimizer),
        )
    )


def _soft(setting: TrainSetting) -> bool:
    return setting.loss == "soft-target"


def _config_class(plan: Plan) -> str:
    return "SwinConfig" if plan.swin.version == 1 else "Swinv2Config"


def _collate(setting: TrainSetting) -> str:
    lines = '    images = torch.stack([example["pixel_values"] for example in examples])\n'
    if setting.precision == "pure-bf16":
        lines += "    images = images.to(torch.bfloat16)\n"
    if setting.memory_format == "channels_last":
        lines += "    images = images.contiguous(memory_format=torch.channels_last)\n"
    join = "stack" if _soft(setting) else "tensor"
    lines += f'    labels = torch.{join}([example["labels"] for example in examples])\n'
    kind = "soft targets [classes]" if _soft(setting) else "a class"
    return (
        "def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:\n"
        f'    """One example: pixel_values [channels, height, width] and labels, {kind}."""\n'
        f'{lines}    return {{"pixel_values": images, "labels": labels}}\n'
    )


_SOFT_LOSS = '''def soft_target_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Cross-entropy with soft targets; the Trainer leaves the division by accumulation to it."""
    return F.cross_entropy(outputs.logits, labels) / {accumulate}
'''


def _trainer(setting: TrainSetting, own_optimizer: bool) -> str:
    optimizer = (
        "        optimizers=(build_optimizer(model, arguments.learning_rate), None),\n"
        if own_optimizer
        else ""
    )
    loss = "        compute_loss_func=soft_target_loss,\n" if _soft(setting) else ""
    return (
        "def build_trainer("
        'train_dataset: Any, output_dir: str = "output", **more: Any) -> Trainer:\n'
        '    """`more` are further TrainingArguments."""\n'
        "    arguments = TrainingArguments(output_dir, **{**ARGUMENTS, **more})\n"
        "    model = build_model()\n"
        + ("    model.to(arguments.device)  # before the optimizer takes its parameters\n"
           if own_optimizer else "")
        + "    return Trainer(\n"
        "        model,\n"
        "        arguments,\n"
        "        train_dataset=train_dataset,\n"
        "        data_collator=collate,\n"
        f"{optimizer}{loss}"
        "    )\n"
    )  # fmt: skip


def refusals(plan: Plan) -> list[Refusal]:
    """What it cannot say of the plan's setting."""
    setting = plan.setting
    return unsaid(setting, "the Trainer", "pure-bf16")


def _warnings(setting: TrainSetting) -> tuple[str, ...]:
    found = [learning_rate_warning(setting)]
    if learning_rate(setting) is None:
        found.append("without learning_rate the Trainer takes 5e-05, whatever the batch.")
    if not setting.clip_grad:
        found.append(
            "the Trainer clips gradients at 1.0 unless told (max_grad_norm=0.0), and the probe "
            "did not clip."
        )
    return tuple(found)
