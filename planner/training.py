"""The training step that is probed, traced and transcribed: one definition for all three.

The step on shapes (`planner.step.training`) is this file's mirror line by line; change both.
Needs torch: imported only by what runs a real or a fake module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import PlannerError, UnsupportedError
from planner.schema import Model, NamedModel, TrainSetting
from planner.schema.setting import CLIP_NORM, EMA_DECAY, LABEL_SMOOTHING

# "forward", "backward", "optimizer", "zero_grad" or "validation": the phase that has just ended
Phase = str
OnPhase = Callable[[Phase], None]


def make_batch(model: Model, setting: TrainSetting, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images [B, in_channels, H, W] and targets ([B] int64, or soft [B, classes] fp32)."""
    if isinstance(model, NamedModel) and model.task != "classification":
        raise UnsupportedError(
            f"{model.title} trains more than images -> logits, which is not followed yet."
        )
    assert model.image_size is not None
    assert model.in_channels is not None
    assert model.num_classes is not None
    height, width = model.image_size
    images = torch.randn(setting.batch_size, model.in_channels, height, width, device=device)
    if setting.precision == "pure-bf16":
        images = images.to(torch.bfloat16)
    if setting.memory_format == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
    if setting.loss == "soft-target":
        targets = torch.rand(setting.batch_size, model.num_classes, device=device)
        return images, targets / targets.sum(dim=1, keepdim=True)
    labels = torch.randint(model.num_classes, (setting.batch_size,), device=device)
    return images, labels


def make_optimizer(setting: TrainSetting, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `setting`: torch's own, but for lion, which is timm's.

    Raises UnsupportedError for an implementation that there is not.
    """
    setting.check_optimizer()
    implementation = setting.optimizer_implementation
    flags: dict[str, bool] = {"foreach": implementation == "foreach"}
    family = setting.optimizer_family
    if family in ("adamw", "adam", "sgd"):
        flags["fused"] = implementation == "fused"
    if family == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **flags)
    if family in ("adamw", "adam"):
        kind = torch.optim.AdamW if family == "adamw" else torch.optim.Adam
        return kind(parameters, lr=1e-4, amsgrad=setting.amsgrad, **flags)  # type: ignore[arg-type]
    if family == "lion":
        return import_lion()(parameters, lr=1e-5, **flags)
    others: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adafactor": torch.optim.Adafactor,
        "rmsprop": torch.optim.RMSprop,
        "nadam": torch.optim.NAdam,
        "radam": torch.optim.RAdam,
    }
    return others[family](parameters, lr=1e-4, **flags)


def import_lion() -> Callable[..., torch.optim.Optimizer]:
    """timm's Lion. Raises PlannerError where timm is not installed."""
    from planner.libraries.missing_operators import declare_missing_operators

    declare_missing_operators()
    try:
        from timm.optim import Lion
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "timm":
            raise
        raise PlannerError(
            "the optimizer lion is timm's, which is not installed.",
            "Install it with: pip install 'planner[timm]'",
        ) from error
    found: Callable[..., torch.optim.Optimizer] = Lion
    return found


class Training:
    """A module, its optimizer and a batch on one device; `step` is one whole optimizer step.

    `module` maps images [B, C, H, W] to logits [B, classes], or to an output with `.logits`.
    `compiled` is what is called in its place when it was compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        setting: TrainSetting,
        images: Tensor,
        targets: Tensor,
        compiled: Callable[[Tensor], object] | None = None,
    ) -> None:
        self.module = module
        # Not `or`: a compiled module has a length, and asking this one for it raises.
        self.call = module if compiled is None else compiled
        self.setting = setting
        self.images = images
        self.targets = targets
        self.device_type = images.device.type
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(setting, self.parameters)
        self.scaler = (
            torch.amp.GradScaler(self.device_type) if setting.precision == "fp16" else None
        )
        self.ema = [p.detach().clone() for p in module.parameters()] if setting.ema else None

    def step(self, on_phase: OnPhase = lambda phase: None) -> None:
        """One optimizer step over `accumulate` micro-batches; `on_phase` hears each phase end.

        `forward` and `backward` end once per micro-batch. At the end of `forward` the logits are
        released and the loss is alive; at the end of `optimizer` the gradients still are.
        """
        for _ in range(self.setting.accumulate):
            self.micro_step(on_phase)
        self.optimizer_step()
        on_phase("optimizer")
        self.optimizer.zero_grad(set_to_none=self.setting.zero_grad_to_none)
        on_phase("zero_grad")

    def micro_step(self, on_phase: OnPhase) -> None:
        loss = self.forward()
        on_phase("forward")
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        del loss
        on_phase("backward")

    def forward(self) -> Tensor:
        """The scalar loss of one micro-batch, divided by the number of them."""
        with self.autocast():
            loss = self.loss(self.logits(self.images))
        if self.setting.accumulate > 1:
            loss = loss / self.setting.accumulate
        return loss

    def logits(self, images: Tensor) -> Tensor:
        output = self.call(images)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise TypeError(f"the model returned {type(output).__name__}, not a tensor of logits")
        return logits

    def loss(self, logits: Tensor) -> Tensor:
        smoothing = LABEL_SMOOTHING if self.setting.loss == "label-smoothing" else 0.0
        return F.cross_entropy(logits, self.targets, label_smoothing=smoothing)

    def optimizer_step(self) -> None:
        if self.setting.clip_grad:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.ema, list(self.module.parameters()), 1 - EMA_DECAY)

    def validate(self, on_phase: OnPhase = lambda phase: None) -> None:
        """A forward as between epochs: evaluation mode, no gradients, hard labels.

        `validation_batch_size` images come to the device and go again; the training batch stays.
        """
        images, labels = self.validation_batch()
        self.module.eval()
        with torch.no_grad(), self.autocast():
            loss = F.cross_entropy(self.logits(images), labels)
        self.module.train()
        del images, labels, loss
        on_phase("validation")

    def validation_batch(self) -> tuple[Tensor, Tensor]:
        """Random images like the training's, and labels of the first class."""
        like, count = self.images, self.setting.validation_batch_size
        images = torch.empty(
            (count, *like.shape[1:]),
            dtype=like.dtype,
            device=like.device,
            memory_format=torch.channels_last
            if self.setting.memory_format == "channels_last"
            else torch.contiguous_format,
        ).normal_()
        return images, torch.zeros(count, dtype=torch.int64, device=like.device)

    def autocast(self) -> AbstractContextManager[object]:
        name = self.setting.autocast_dtype
        if name is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=getattr(torch, name))
