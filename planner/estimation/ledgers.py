"""What an estimate stands on, in three parts: the ledger of any model and setting at a batch, from
the step on shapes or from a recording; the recipe that goes with a setting, stated once for every
trainer; and what an estimate leaves out, in words.

A setting says how a step runs; a recipe says what is learned. That of a Swin is its authors', read
in microsoft/Swin-Transformer @f82860b, config.py (where each figure's key stands beside it) and
optimizer.py; other models have no published one here, and only what any training needs.

Imports no torch: steps are recorded in a process of their own (`planner.recording.recordings`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.record import Augmentation, LoaderSetting
from planner.core.schema.setting import CLIP_NORM, GRAPH_MODES, LABEL_SMOOTHING, SHARDED
from planner.core.torch_version import torch_version
from planner.ledger.ledger import LEDGER_MICRO_BATCHES, Ledger, ShapeLedgers
from planner.libraries.names import find_library
from planner.machine.hardware import Gpu
from planner.memory.compiled import has_known_graphs, is_compiled, pool_graph_memory
from planner.memory.scratch import PATCH_EMBEDDING, ConvolutionWorkspace
from planner.recording import recordings
from planner.step.ranks import is_closed_form
from planner.step.training import has_step, run_on_shapes

MAX_SHAPE_LEDGERS = 128  # steps on shapes whose ledgers a process keeps
Request = tuple[Model, ResolvedSetting, Gpu | None]


def step_ledger(
    model: Model, setting: ResolvedSetting, recorded: bool = False, gpu: Gpu | None = None
) -> Ledger:
    """The events of building the model and of its first optimizer steps: two, under a recorded DDP
    three.

    A `SwinConfig` runs on shapes unless `recorded` is set; any other model is recorded on a card
    like `gpu`. On shapes a compiled step is the recording of it that is kept; where none is, the
    eager step stands for it (`planner.memory.compiled` says how far to trust that). At most
    `LEDGER_MICRO_BATCHES` micro-batches are run, since the third repeats the second. On
    several GPUs the ledger is one rank's: a closed form on shapes; recorded, torch's own DDP and
    FSDP2, and DeepSpeed's own ZeRO.

    Raises PlannerError for what cannot be recorded.
    """
    if is_on_shapes(model, setting, recorded):
        assert isinstance(model, SwinConfig)
        ledger = _kept_compiled(model, setting, gpu) or _eager_on_shapes(model, setting)
    else:
        ledger = recordings.ledger_of(recordings.step_of(model, setting, gpu))
    is_graphed = setting.compile in GRAPH_MODES and is_compiled(ledger)
    return pool_graph_memory(ledger) if is_graphed else ledger


def _kept_compiled(config: SwinConfig, setting: ResolvedSetting, gpu: Gpu | None) -> Ledger | None:
    if not has_known_graphs(setting):
        return None
    ledger = recordings.find(recordings.step_of(config, setting, gpu))
    return ledger if isinstance(ledger, Ledger) else None


def _eager_on_shapes(config: SwinConfig, setting: ResolvedSetting) -> Ledger:
    ledger = _shared_ledgers(config, setting).ledger(setting.batch_size)
    drift = find_library(config.library).drift(config)
    return replace(ledger, notes=(*ledger.notes, *drift)) if drift else ledger


def _shared_ledgers(config: SwinConfig, setting: ResolvedSetting) -> ShapeLedgers:
    """Settings whose events are the same share their ledgers."""
    alone = {"world_size": 1, "nodes": 1} if setting.parallelism in ("none", "ddp") else {}
    num_micro_batches = min(setting.accumulate, LEDGER_MICRO_BATCHES)
    updates = {"batch_size": 1, "accumulate": num_micro_batches, **alone}
    eager = setting.uncompiled().model_copy(update=updates)
    return _ledgers(config, eager, torch_version())


def is_on_shapes(model: Model, setting: TrainSetting, recorded: bool = False) -> bool:
    """Whether the ledger comes from the step on shapes: at once, and without torch.

    Other than that are recorded: what torchao does (linear layers that multiply in 8 bits,
    `adamw-8bit`, optimizers on the host), optimizers without a step on shapes, ZeRO, and steps
    under FSDP2 that have no closed form, as those of a block that is checkpointed reentrantly and
    gathers its weights twice."""
    if not isinstance(model, SwinConfig) or recorded or not has_step(setting):
        return False
    reentrant = find_library(model.library).reentrant
    gathers_twice = setting.parallelism in SHARDED and setting.checkpointing in reentrant
    return is_closed_form(setting) and not gathers_twice


def record_ledgers(
    requests: Sequence[Request],
    say: Callable[[str], None] | None = None,
    limit_seconds: float | None = None,
    recorded: bool = True,
) -> list[PlannerError | None]:
    """Records the steps of `requests` that are not kept, for at most `limit_seconds`, and returns
    for each request the error that it ended with. Steps on shapes are left out unless `recorded`.
    `say` hears how long it takes (None: standard error)."""
    steps = {r: recordings.step_of(*r) for r in requests if not is_on_shapes(r[0], r[1], recorded)}
    recordings.record(list(steps.values()), say, limit_seconds)
    results = [recordings.find(steps[r]) if r in steps else None for r in requests]
    return [result if isinstance(result, PlannerError) else None for result in results]


@lru_cache(MAX_SHAPE_LEDGERS)
def _ledgers(config: SwinConfig, setting: ResolvedSetting, torch: tuple[int, int]) -> ShapeLedgers:
    """The ledgers of a step at any batch; what they hold differs with the version of `torch`."""
    build = find_library(config.library).on_shapes(config, setting)

    def run(batch_size: int) -> Ledger:
        return run_on_shapes(build, config, setting.model_copy(update={"batch_size": batch_size}))

    return ShapeLedgers(run)


SOURCE = "microsoft/Swin-Transformer @f82860b, config.py and optimizer.py"
BASE_LR, BASE_LR_IMAGES = 5e-4, 512
"""TRAIN.BASE_LR for AdamW; main.py multiplies it by batch × world × accumulation / 512."""

FINE_TUNING_LR = 2e-5
"""TRAIN.BASE_LR, for as many images, from the weights of ImageNet-22k (`fine_tuning`)."""

WORKERS = 8  # DATA.NUM_WORKERS


@dataclass(frozen=True)
class Recipe:
    """What a trainer is told beside the setting. Lengths are in epochs.

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
    did. Only AdamW has weight decay. Frozen stages and adapters are trained by `fine_tuning`."""
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
    return fine_tuning(recipe) if fine_tunes(setting) else recipe


def fine_tunes(setting: TrainSetting) -> bool:
    """Whether a setting trains only a part of the model."""
    return bool(setting.frozen_stages or setting.lora_rank)


def fine_tuning(recipe: Recipe) -> Recipe:
    """The authors' recipe from the weights of ImageNet-22k (@f0ca48c, configs/swin/
    swin_base_patch4_window7_224_22kto1k_finetune.yaml): a 25th of the rate, 30 epochs with 5 of
    warm-up, hardly any decay."""
    rate = recipe.learning_rate
    return replace(
        recipe,
        learning_rate=None if rate is None else rounded(rate * FINE_TUNING_LR / BASE_LR),
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
    return rounded(BASE_LR * setting.global_batch / BASE_LR_IMAGES)


def rounded(value: float) -> float:
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
    if fine_tunes(setting):
        base, whose = FINE_TUNING_LR, "the authors' for fine-tuning"
    devices = "device" if setting.world_size == 1 else "devices"
    return (
        f"The learning rate is {rate:g}: {whose} {base:g} for {BASE_LR_IMAGES} images, "
        f"scaled to the global batch of {setting.global_batch} ({setting.batch_size} × "
        f"{setting.accumulate} accumulated × {setting.world_size} {devices}). If you tuned "
        "your own at another global batch, scale that instead."
    )


FusedAttention = Literal["flash", "efficient"]
_CUDNN_ATTENTION = (
    "cuDNN's attention, whose memory differs: torch 2.11 and later use it in 16 bits on capability "
    "9.0 and 10.x where"
)
NCCL_ALONE = "what NCCL keeps for itself on one GPU, which is less than on several"


def left_out(
    setting: TrainSetting,
    convolutions: ConvolutionWorkspace = PATCH_EMBEDDING,
    kernels: Collection[FusedAttention] = (),
    capability: tuple[int, int] | None = None,
    is_recorded: bool = False,
) -> list[str]:
    """What an estimate leaves out, a line each. `kernels` are the kernels of fused attention that
    a recorded step runs; `capability` is None where no GPU was named."""
    lines = [convolutions.left_out]
    if setting.lora_rank and setting.attention == "sdpa":
        lines.append(f"{_CUDNN_ATTENTION} the position bias is not trained, as with LoRA")
    if kernels and setting.autocast_dtype and (capability is None or capability[0] in (9, 10)):
        lines.append(f"{_CUDNN_ATTENTION} no mask is trained")
    if "flash" in kernels and capability is not None and capability < (8, 0):
        lines.append(
            f"that flash attention, which is counted, does not run on capability "
            f"{capability[0]}.{capability[1]}: the memory-efficient kernel does in fp16, and the "
            "plain formula in bf16, which keeps the scores of all tokens"
        )
    if setting.optimizer_implementation == "8bit":
        lines.append(
            "what adamw-8bit compiles at its first step: one kernel for each shape of weights, in "
            "memory of the host"
        )
    if setting.parallelism != "none" and setting.world_size == 1:
        lines.append(NCCL_ALONE)
    if setting.parallelism in SHARDED and not is_recorded:
        lines.append(
            "a table of CUDA's copy out of what FSDP2 gathers, which its number of multiprocessors "
            "sizes: some tens of KiB, freed at once (aten/src/ATen/native/cuda/TensorShape.cu)"
        )
    if setting.parallelism == "none" and setting.world_size > 1:
        lines.append(
            "communication between devices (NCCL's buffers, gradient buckets): "
            "--parallelism ddp counts them"
        )
    return lines


def fused_attention(ledger: Ledger) -> set[FusedAttention]:
    """The kernels of fused attention that a step runs."""
    names = {operation.name for _, operation in ledger.operations()}
    kernels: tuple[FusedAttention, ...] = ("flash", "efficient")
    return {k for k in kernels if any(f"product_{k}_att" in name for name in names)}
