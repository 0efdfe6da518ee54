"""What every trainer's file gets, and what it gives back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from planner.errors import UnsupportedError
from planner.schema import FactoryModel, SwinConfig, TrainSetting

Model = SwinConfig | FactoryModel

BASE_LR, BASE_LR_IMAGES = 5e-4, 512
"""Swin's published rule for AdamW, quoted: microsoft/Swin-Transformer config.py, TRAIN.BASE_LR, and
main.py, which multiplies it by batch × world × accumulation / 512."""

ADAMW_WEIGHT_DECAY = 0.05  # quoted: the same config.py, TRAIN.WEIGHT_DECAY
CLIP_NORM = 5.0  # quoted: the same config.py, TRAIN.CLIP_GRAD; `planner.training` uses it too
LABEL_SMOOTHING = 0.1  # quoted: the same config.py, MODEL.LABEL_SMOOTHING
EMA_DECAY = 0.9999  # as `planner.training`
MIXUP, CUTMIX = 0.8, 1.0  # quoted: the same config.py, AUG.MIXUP and AUG.CUTMIX


@dataclass(frozen=True)
class Emitted:
    """What to write into a trainer. `text` is a whole file, for which `filename` is the usual name.

    `launch` is the command that trains with it. `code` is Python for the user's own script where
    the trainer's file cannot say it all (model, checkpointing wrapper, optimizer), "" where it can.
    """

    target: str
    filename: str
    text: str
    launch: str
    warnings: tuple[str, ...] = ()
    code: str = ""
    code_filename: str = ""


@dataclass(frozen=True)
class Plan:
    """A model of the trainer's own library, the setting to run it with, and what is known of it.

    `heading` says where the setting comes from, one line of a comment each.
    """

    model: Model
    setting: TrainSetting
    heading: tuple[str, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def swin(self) -> SwinConfig:
        """The model of a trainer that builds it by itself (`as_library` has refused factories)."""
        assert isinstance(self.model, SwinConfig)
        return self.model

    def comment(self, *more: str) -> str:
        """The heading as `#` lines."""
        return "".join(f"# {line}".rstrip() + "\n" for line in (*self.heading, *more))


class Refusal(NamedTuple):
    """What a trainer cannot say (the law and the value), and the way out."""

    law: str
    way_out: str


def refuse(trainer: str, refusals: Iterable[Refusal]) -> None:
    """Raises UnsupportedError with every refusal and each one's way out, if there are any."""
    given = list(refusals)
    if given:
        _raise(trainer, given)


def _raise(trainer: str, refusals: list[Refusal]) -> NoReturn:
    laws = [refusal.law for refusal in refusals]
    message = laws[0] if len(laws) == 1 else "\n  ".join(["it cannot say this setting:", *laws])
    ways = list(dict.fromkeys(refusal.way_out for refusal in refusals))
    raise UnsupportedError(f"{trainer}: {message}", "\n".join(ways))


def way_out(change: str = "") -> str:
    """The ways out that always exist: another value (then unmeasured), or the plain script."""
    script = "emit the plain script, which can: --for pytorch"
    return f"Emit with --set {change} (not measured), or {script}." if change else f"Or {script}."


def learning_rate(setting: TrainSetting) -> float | None:
    """Swin's published rate, scaled to the setting's global batch; None where there is none.

    The rule is for AdamW (and Adam, whose steps are of the same size); no other family has one.
    """
    if setting.optimizer_family not in ("adamw", "adam"):
        return None
    return float(f"{BASE_LR * setting.global_batch / BASE_LR_IMAGES:.6g}")


def learning_rate_warning(setting: TrainSetting) -> str:
    """What the global batch means for the learning rate, in figures."""
    rate = learning_rate(setting)
    if rate is None:
        return (
            f"no published Swin learning rate for {setting.optimizer_family}: set yours for a "
            f"global batch of {setting.global_batch}."
        )
    devices = "device" if setting.world_size == 1 else "devices"
    return (
        f"the learning rate is {rate:g}: Swin's own {BASE_LR:g} for {BASE_LR_IMAGES} images, "
        f"scaled to the global batch of {setting.global_batch} ({setting.batch_size} × "
        f"{setting.accumulate} accumulated × {setting.world_size} {devices}). If you had tuned "
        "yours at another global batch, scale that one instead."
    )


def torchrun(script: str, setting: TrainSetting, arguments: str = "") -> str:
    """The command that runs `script` on every device."""
    command = (
        f"torchrun --nproc_per_node {setting.world_size} {script}"
        if setting.world_size > 1
        else f"python {script}"
    )
    return f"{command} {arguments}".rstrip()


def blocks_alone(setting: TrainSetting, trainer: str) -> list[Refusal]:
    """The refusal of a trainer that checkpoints every block or none."""
    if setting.checkpointing in ("none", "blocks"):
        return []
    law = f"{trainer} checkpoints blocks or none, not {setting.checkpointing}"
    return [Refusal(law, way_out("checkpointing=blocks"))]


def unsaid(setting: TrainSetting, trainer: str, *said: str) -> list[Refusal]:
    """Refusals for the fields that most trainers have no word for, but for those in `said`."""
    found = []
    if setting.ema and "ema" not in said:
        found.append(
            Refusal(f"{trainer} keeps no average of the weights (ema)", way_out("ema=false"))
        )
    if setting.frozen_stages and "frozen_stages" not in said:
        found.append(
            Refusal(
                f"{trainer} cannot freeze stages (frozen_stages={setting.frozen_stages})",
                "Freeze them in your own code (requires_grad_(False)), "
                "and emit with --set frozen_stages=0.",
            )
        )
    if setting.lora_rank and "lora_rank" not in said:
        found.append(
            Refusal(
                f"{trainer} has no adapters (lora_rank={setting.lora_rank})",
                "Put them in with your own code (requires_grad_(False) on the rest), "
                "and emit with --set lora_rank=0.",
            )
        )
    if not setting.zero_grad_to_none and "zero_grad_to_none" not in said:
        found.append(
            Refusal(
                f"{trainer} always drops gradients (zero_grad_to_none=false cannot be said)",
                way_out("zero_grad_to_none=true"),
            )
        )
    if setting.precision == "pure-bf16" and "pure-bf16" not in said:
        found.append(Refusal(f"{trainer} has no pure bf16 training", way_out("precision=bf16")))
    return found
