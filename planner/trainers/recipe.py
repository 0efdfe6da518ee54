"""The recipe that goes with a setting, stated once for every trainer.

A setting says how a step runs; a recipe says what is learned. That of a Swin is its authors', read
in microsoft/Swin-Transformer @f82860b, config.py (where each figure's key stands beside it) and
optimizer.py; other models have no published one here, and only what any training needs.
"""

from dataclasses import dataclass, replace

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.record import Augmentation, LoaderSetting
from planner.core.schema.setting import CLIP_NORM, LABEL_SMOOTHING

SOURCE = "microsoft/Swin-Transformer @f82860b, config.py and optimizer.py"
BASE_LR, BASE_LR_IMAGES = 5e-4, 512
"""TRAIN.BASE_LR for AdamW; main.py multiplies it by batch × world × accumulation / 512."""

FINE_TUNING_LR = 2e-5
"""TRAIN.BASE_LR, for as many images, from the weights of ImageNet-22k (`fine_tuned`)."""

WORKERS = 8  # DATA.NUM_WORKERS


@dataclass(frozen=True)
class Recipe:
    """What a trainer needs beside the setting. Lengths are in epochs.

    - `learning_rate`: for the setting's global batch; None where none is published, and the user
      sets it. It rises from the share `warmup_start` of it over `warmup_epochs`, and falls by half
      a cosine to the share `final_share`.
    - `weight_decay`: of matrices and kernels (`train.decay_groups`).
    - `clip_norm`: None where gradients are not clipped.
    - `smoothing`, `mixup`, `cutmix`: 0 where they are off. Where both of the latter are on, each
      batch is cut and mixed by CutMix with the probability `switch`, else by Mixup.
    - `augmentation`: None where pictures are only cropped and flipped.
    """

    learning_rate: float | None
    weight_decay: float
    clip_norm: float | None
    smoothing: float
    mixup: float
    cutmix: float
    augmentation: Augmentation | None
    epochs: int = 300  # TRAIN.EPOCHS
    warmup_epochs: int = 20  # TRAIN.WARMUP_EPOCHS
    warmup_start: float = 1e-3  # TRAIN.WARMUP_LR / TRAIN.BASE_LR: 5e-7 / 5e-4
    final_share: float = 1e-2  # TRAIN.MIN_LR / TRAIN.BASE_LR: 5e-6 / 5e-4
    switch: float = 0.5  # AUG.MIXUP_SWITCH_PROB

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, and targets soft."""
        return self.mixup > 0


def recipe_of(setting: TrainSetting, model: Model) -> Recipe:
    """The recipe that goes with `setting`: what the setting says, else what the authors of `model`
    did. Only AdamW has weight decay. Frozen stages and adapters are trained by `fine_tuned`."""
    of_swin = isinstance(model, SwinConfig)
    setting = setting.with_recipe(of_swin)
    mixes = setting.loss == "soft-target"
    recipe = Recipe(
        learning_rate=learning_rate(setting) if of_swin else None,
        weight_decay=0.05 if setting.optimizer_family == "adamw" else 0.0,  # TRAIN.WEIGHT_DECAY
        clip_norm=CLIP_NORM if setting.clip_grad else None,
        smoothing=0.0 if setting.loss == "cross-entropy" else LABEL_SMOOTHING,
        mixup=0.8 if mixes else 0.0,  # AUG.MIXUP
        cutmix=1.0 if mixes else 0.0,  # AUG.CUTMIX
        augmentation=Augmentation() if of_swin else None,
    )
    return fine_tuned(recipe) if is_fine_tuning(setting) else recipe


def is_fine_tuning(setting: TrainSetting) -> bool:
    """Whether a setting trains only a part of the model."""
    return bool(setting.frozen_stages or setting.lora_rank)


def fine_tuned(recipe: Recipe) -> Recipe:
    """The authors' recipe from the weights of ImageNet-22k (@f0ca48c, configs/swin/
    swin_base_patch4_window7_224_22kto1k_finetune.yaml): a 25th of the rate, 30 epochs with 5 of
    warm-up, hardly any decay."""
    rate = recipe.learning_rate
    return replace(
        recipe,
        learning_rate=None if rate is None else round_rate(rate * FINE_TUNING_LR / BASE_LR),
        weight_decay=1e-8 if recipe.weight_decay else 0.0,
        epochs=30,
        warmup_epochs=5,
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
    return round_rate(BASE_LR * setting.global_batch / BASE_LR_IMAGES)


def round_rate(value: float) -> float:
    """`value` with six digits: a rate as a person would write it."""
    return float(f"{value:.6g}")


def learning_rate_note(setting: TrainSetting, model: Model) -> str:
    """What the global batch means for the learning rate, in figures."""
    rate = recipe_of(setting, model).learning_rate
    if rate is None:
        of_swin = isinstance(model, SwinConfig)
        what = f"for {setting.optimizer_family}" if of_swin else "of this model"
        return (
            f"There is no published learning rate {what}: set yours "
            f"(LR) for a global batch of {setting.global_batch}."
        )
    base, whose = BASE_LR, "Swin's own"
    if is_fine_tuning(setting):
        base, whose = FINE_TUNING_LR, "the authors' for fine-tuning"
    devices = "device" if setting.world_size == 1 else "devices"
    return (
        f"The learning rate is {rate:g}: {whose} {base:g} for {BASE_LR_IMAGES} images, "
        f"scaled to the global batch of {setting.global_batch} ({setting.batch_size} × "
        f"{setting.accumulate} accumulated × {setting.world_size} {devices}). If you tuned "
        "your own at another global batch, scale that instead."
    )
