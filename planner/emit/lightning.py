"""Lightning: a Python file with a LightningModule and `build_trainer()`.

Argument names as in Lightning 2.6, `Trainer`. Batch, workers, checkpointing, compilation and the
optimizer have no argument there: they are user code, and so in this file.
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
    literal,
    mapping,
    model_source,
    optimizer_source,
    placed,
    precision_source,
)
from planner.schema import TrainSetting

LIBRARY = None
TITLE = "Lightning's Trainer"
PRECISIONS = {
    # Lightning's names: "mixed" is autocast; "true" converts the model and its inputs.
    "fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed",
    "pure-bf16": "bf16-true",
}  # fmt: skip


def write(plan: Plan) -> Emitted:
    """`training.py`: `TRAINER`, `build_model()`, `Training` (a LightningModule)."""
    setting = plan.setting
    return Emitted(
        target="lightning",
        filename="training.py",
        text=_text(plan),
        launch=torchrun("your_script.py", setting),
        warnings=(*plan.warnings, *_warnings(setting)),
    )


def trainer_arguments(setting: TrainSetting) -> dict[str, Any]:
    """The keyword arguments of `Trainer` for `setting`."""
    values: dict[str, Any] = {
        "precision": PRECISIONS[setting.precision],
        "accumulate_grad_batches": setting.accumulate,
        "devices": setting.world_size,
        "strategy": "ddp" if setting.world_size > 1 else "auto",
        "benchmark": True,
    }
    if setting.clip_grad:
        values |= {"gradient_clip_val": CLIP_NORM, "gradient_clip_algorithm": "norm"}
    return values


def _text(plan: Plan) -> str:
    setting = plan.setting
    model = model_source(plan.model, setting)
    optimizer_imports, optimizer = optimizer_source(setting)
    imports = (
        *model.imports,
        *optimizer_imports,
        "from typing import Any",
        "import lightning",
        "from torch.nn import functional as F",
    )
    # "bf16-true" converts the model by itself.
    layout = setting.model_copy(update={"precision": "bf16"})
    rate = learning_rate(setting)
    return "".join(
        (
            plan.comment(
                "",
                "For Lightning 2.6. Use: lightning.Trainer(**TRAINER, max_epochs=…)"
                ".fit(Training(), your_loader)",
                f"Your DataLoader: batch_size=BATCH_SIZE (one device's: {setting.batch_size}), "
                "pin_memory=True, drop_last=True.",
            ),
            import_block(imports),
            "\n" + precision_source(setting) if precision_source(setting) else "",
            f"\nBATCH_SIZE = {setting.batch_size}\n",
            mapping("TRAINER", trainer_arguments(setting)),
            "\n\n" + placed(model.body, layout),
            "\n\n" + optimizer,
            "\n\n" + _module(setting, rate),
        )
    )


def _module(setting: TrainSetting, rate: float | None) -> str:
    compiled = (
        f"        self.model.compile(mode={literal(setting.compile)})\n"
        if setting.compile != "off"
        else ""
    )
    layout = (
        "        images = images.contiguous(memory_format=torch.channels_last)\n"
        if setting.memory_format == "channels_last"
        else ""
    )
    smoothing = f", label_smoothing={LABEL_SMOOTHING}" if setting.loss == "label-smoothing" else ""
    given = f"lr: float = {rate:g}" if rate is not None else "lr: float"
    return (
        "class Training(lightning.LightningModule):\n"
        f"    def __init__(self, {given}) -> None:\n"
        "        super().__init__()\n"
        "        self.lr = lr\n"
        "        self.model = build_model()\n"
        f"{compiled}\n"
        "    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:\n"
        "        images, targets = batch\n"
        f"{layout}"
        "        output = self.model(images)\n"
        '        logits = getattr(output, "logits", output)\n'
        f"        return F.cross_entropy(logits, targets{smoothing})\n"
        "\n"
        "    def configure_optimizers(self) -> torch.optim.Optimizer:\n"
        "        return build_optimizer(self.model, self.lr)\n"
    )


def refusals(plan: Plan) -> list[Refusal]:
    """What it cannot say of the plan's setting."""
    setting = plan.setting
    return unsaid(setting, "the Trainer", "pure-bf16")


def _warnings(setting: TrainSetting) -> tuple[str, ...]:
    found = [learning_rate_warning(setting)]
    if setting.loss == "soft-target":
        found.append("the loss takes soft targets [batch, classes]: mix images up in your loader.")
    return tuple(found)
