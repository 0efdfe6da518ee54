"""The recipe that goes with a setting, one for every trainer: rates, decay, clipping, loss, data.

Figures are those of the published training of Swin, quoted from microsoft/Swin-Transformer
@f82860b, config.py, where no other source is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schema import TrainSetting
from planner.schema.loading import LoaderSetting
from planner.schema.setting import CLIP_NORM, LABEL_SMOOTHING

BASE_LR, BASE_LR_IMAGES = 5e-4, 512
"""TRAIN.BASE_LR for AdamW; main.py multiplies it by batch × world × accumulation / 512."""

ADAMW_WEIGHT_DECAY = 0.05  # TRAIN.WEIGHT_DECAY
MIXUP, CUTMIX = 0.8, 1.0  # AUG.MIXUP and AUG.CUTMIX
EPOCHS, WARMUP_EPOCHS = 300, 20  # TRAIN.EPOCHS and TRAIN.WARMUP_EPOCHS
WARMUP_START = 1e-3  # TRAIN.WARMUP_LR / TRAIN.BASE_LR: 5e-7 / 5e-4
FINAL_SHARE = 1e-2  # TRAIN.MIN_LR / TRAIN.BASE_LR: 5e-6 / 5e-4
WORKERS = 8  # DATA.NUM_WORKERS


@dataclass(frozen=True)
class Recipe:
    """What a trainer must be told beside the setting, so that it trains what was probed.

    `learning_rate` is None where the optimizer has no published one. `clip_norm` is None where
    gradients are not clipped. `smoothing`, `mixup` and `cutmix` are 0 where they are off.
    """

    learning_rate: float | None
    weight_decay: float
    clip_norm: float | None
    smoothing: float
    mixup: float
    cutmix: float
    validation_batch_size: int

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, and targets soft."""
        return self.mixup > 0


def recipe_of(setting: TrainSetting) -> Recipe:
    """The recipe that goes with `setting`. Decay is AdamW's only: the others were probed with 0."""
    mixes = setting.loss == "soft-target"
    return Recipe(
        learning_rate=learning_rate(setting),
        weight_decay=ADAMW_WEIGHT_DECAY if setting.optimizer_family == "adamw" else 0.0,
        clip_norm=CLIP_NORM if setting.clip_grad else None,
        smoothing=0.0 if setting.loss == "cross-entropy" else LABEL_SMOOTHING,
        mixup=MIXUP if mixes else 0.0,
        cutmix=CUTMIX if mixes else 0.0,
        validation_batch_size=setting.validation_batch_size or setting.batch_size,
    )


def usual_loader(setting: TrainSetting) -> LoaderSetting:
    """How data are loaded where nothing was measured: Swin's own eight workers, and torch's own
    prefetching."""
    return LoaderSetting(batch_size=setting.batch_size, workers=WORKERS)


def learning_rate(setting: TrainSetting) -> float | None:
    """Swin's published rate, scaled to the setting's global batch; None where there is none.

    The rule is for AdamW (and Adam, whose steps are of the same size); no other family has one.
    """
    if setting.optimizer_family not in ("adamw", "adam"):
        return None
    return rounded(BASE_LR * setting.global_batch / BASE_LR_IMAGES)


def rounded(value: float) -> float:
    """Six digits: a rate as a person would write it."""
    return float(f"{value:.6g}")


def learning_rate_note(setting: TrainSetting) -> str:
    """What the global batch means for the learning rate, in figures."""
    rate = learning_rate(setting)
    if rate is None:
        return (
            f"There is no published Swin learning rate for {setting.optimizer_family}: set yours "
            f"(LR) for a global batch of {setting.global_batch}."
        )
    devices = "device" if setting.world_size == 1 else "devices"
    return (
        f"The learning rate is {rate:g}: Swin's own {BASE_LR:g} for {BASE_LR_IMAGES} images, "
        f"scaled to the global batch of {setting.global_batch} ({setting.batch_size} × "
        f"{setting.accumulate} accumulated × {setting.world_size} {devices}). If you tuned "
        "your own at another global batch, scale that instead."
    )
