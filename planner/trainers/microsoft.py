"""microsoft/Swin-Transformer: a yacs YAML file for `main.py --cfg`.

The keys are those of its config.py @f82860b. What the trainer does by itself was read in main.py,
optimizer.py, utils.py and data/build.py: autocast is fp16 only, with a GradScaler also in fp32; the
learning rate is BASE_LR × batch × world × accumulation / 512; the classes are those of the data
set, 1000 or 21841, whatever MODEL.NUM_CLASSES says; it validates with the training batch; its SGD
is Nesterov's; biases and norms are not decayed; the model is always wrapped in DDP, and needs CUDA.
"""

from typing import Any

from planner.core.errors import Fault
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.record import Augmentation
from planner.trainers.faults import IN_THE_LOOP, IN_THE_STEP
from planner.trainers.launch import (
    OLD_PILLOW,
    RESUME_ENVIRONMENT,
    RESUME_NOTE,
    launch_line,
    node_notes,
    tf32_environment,
    tf32_notes,
    torchrun_line,
    train_loader,
)
from planner.trainers.plan import PLAIN_SCRIPT, Plan, Trainer, Written, list_faults
from planner.trainers.recipe import BASE_LR, Recipe, learning_rate_note, round_rate

FILENAME = "swin_microsoft.yaml"
_DATA_SETS = {1000: "imagenet", 21841: "imagenet22K"}  # data/build.py, build_dataset


def write(plan: Plan) -> Written:
    """`swin_microsoft.yaml`."""
    setting, recipe, loader = plan.setting, plan.recipe, train_loader(plan)
    run = torchrun_line("main.py", plan, f"--cfg {plan.path(FILENAME)} --data-path DATA")
    command = launch_line(plan, run, {**RESUME_ENVIRONMENT, **tf32_environment(plan)})
    augmentation = recipe.augmentation
    assert augmentation is not None, "a Swin's authors have one"
    values = {
        "DATA": {
            "BATCH_SIZE": setting.batch_size,
            "IMG_SIZE": plan.swin.image_size[0],
            "DATASET": _DATA_SETS[plan.swin.num_classes],
            "INTERPOLATION": augmentation.interpolation,
            "NUM_WORKERS": loader.workers,
            "PIN_MEMORY": loader.pin_memory,
        },
        "MODEL": {**_model_values(plan.swin), "LABEL_SMOOTHING": recipe.smoothing},
        "TRAIN": _train_values(plan),
        "AUG": _augmentation_values(recipe, augmentation),
        "TEST": {"CROP": True},  # of build.py's 224 / 256, the recipe's share
        "AMP_ENABLE": setting.precision == "fp16",
    }
    advice = (
        "DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, in the authors' checkout.",
        "With timm==0.4.12, which their get_started.md asks for: later ones refuse its t_mul.",
        OLD_PILLOW,
    )
    return plan.write_yaml(values, command, advice, _notes(plan))


def _model_values(model: SwinConfig) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "PATCH_SIZE": model.patch_size,
        "IN_CHANS": model.in_channels,
        "EMBED_DIM": model.embed_dim,
        "DEPTHS": list(model.depths),
        "NUM_HEADS": list(model.num_heads),
        "WINDOW_SIZE": model.windows[0],
        "MLP_RATIO": model.mlp_ratio,
        "QKV_BIAS": model.qkv_bias,
        "APE": model.absolute_position_embedding,
        "PATCH_NORM": model.patch_norm,
    }
    if model.version == 2:
        shape["PRETRAINED_WINDOW_SIZES"] = list(model.pretrained_windows)
    return {
        "TYPE": "swin" if model.version == 1 else "swinv2",
        "NAME": model.name or "swin",
        "NUM_CLASSES": model.num_classes,
        "DROP_RATE": model.drop_rate,
        "DROP_PATH_RATE": model.drop_path_rate,
        "SWIN" if model.version == 1 else "SWINV2": shape,
    }


def _train_values(plan: Plan) -> dict[str, Any]:
    setting, recipe = plan.setting, plan.recipe
    return {
        "EPOCHS": recipe.epochs,
        "WARMUP_EPOCHS": recipe.warmup_epochs,
        "BASE_LR": BASE_LR,  # for 512 images: main.py scales the three
        "WARMUP_LR": round_rate(BASE_LR * recipe.warmup_start),
        "MIN_LR": round_rate(BASE_LR * recipe.final_share),
        # Before 22e57f4 the cosine began with the warm-up: such a checkout refuses the key.
        "LR_SCHEDULER": {"NAME": "cosine", "WARMUP_PREFIX": True},
        "WEIGHT_DECAY": recipe.weight_decay,
        "CLIP_GRAD": recipe.clip_norm,
        "ACCUMULATION_STEPS": setting.accumulate,
        "USE_CHECKPOINT": setting.checkpointing == "blocks",
        "OPTIMIZER": {"NAME": setting.optimizer_family},
    }


def _augmentation_values(recipe: Recipe, augmentation: Augmentation) -> dict[str, Any]:
    """The values of config.py, except for the mixing, which a setting may leave out."""
    return {
        "COLOR_JITTER": augmentation.color_jitter,
        "AUTO_AUGMENT": augmentation.auto_augment,
        "REPROB": augmentation.erasing,
        "REMODE": "pixel",
        "RECOUNT": 1,
        "MIXUP": recipe.mixup,
        "CUTMIX": recipe.cutmix,
        "MIXUP_SWITCH_PROB": recipe.switch,
    }


def faults(plan: Plan) -> list[Fault]:
    """What the trainer cannot express of the model and the setting."""
    on_cpu = (plan.device == "cpu", "main.py needs CUDA, and this was probed on the CPU", "")
    return [*_model_faults(plan.swin), *_setting_faults(plan.setting), *list_faults(on_cpu)]


def _model_faults(model: SwinConfig) -> list[Fault]:
    (height, width), drop = model.image_size, model.attn_drop_rate
    found = list_faults(
        (height != width, f"its data loader makes square images, not {height}x{width}", ""),
        (drop, f"config.py has no key for attn_drop_rate={drop:g}", ""),
    )
    if model.num_classes not in _DATA_SETS:
        law = (
            "it takes the number of classes from its data set, 1000 (imagenet) or 21841 "
            f"(imagenet22K), not {model.num_classes}"
        )
        way_out = f"Tune with --num-classes 1000, or {PLAIN_SCRIPT}."
        found.append(Fault(law, way_out=way_out))
    return found


def _setting_faults(setting: TrainSetting) -> list[Fault]:
    is_sgd = setting.optimizer_family == "sgd"
    other = not is_sgd and setting.optimizer not in ("adamw", "adamw-foreach")
    return list_faults(
        (setting.precision == "bf16", "its autocast is fp16 only, not bf16", "precision=fp16"),
        (is_sgd, "its sgd is Nesterov's, not the one that was probed", "optimizer=adamw"),
        (other, f"it has only torch's default adamw, not {setting.optimizer}", "optimizer=adamw"),
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    model, setting = plan.swin, plan.setting
    rate = plan.recipe.learning_rate
    assert rate is not None, "only adamw is left"
    notes = [
        *node_notes(setting),
        "main.py scales the learning rate by itself: BASE_LR × "
        f"{setting.batch_size} × {setting.world_size} × {setting.accumulate} / 512 = {rate:g}. "
        "Do not change TRAIN.BASE_LR when the batch changes.",
        learning_rate_note(setting, plan.model),
        "main.py wraps the model in DDP even on one device, applies no weight decay to biases and "
        "norms, and keeps a GradScaler even in fp32.",
        RESUME_NOTE,
    ]
    if setting.accumulate > 1:
        notes.append(
            f"What is left of an epoch's batches after whole steps of {setting.accumulate} is not "
            "learned from: main.py begins each epoch without gradients."
        )
    if model.image_size[0] <= 32:  # data/build.py, build_transform
        notes.append(
            "main.py resizes nothing to 32 pixels or fewer: its images must have that size."
        )
    return (*notes, *tf32_notes(plan, "main.py has no key for it"))


TRAINER = Trainer(
    name="microsoft",
    title="microsoft's main.py",
    filename=FILENAME,
    write=write,
    lacks=(*IN_THE_STEP, *IN_THE_LOOP, "compile", "ema", "memory_format", "pure-bf16"),
    faults=faults,
    library="microsoft",
    always_ddp=True,
    always_syncs=True,  # no `no_sync`
    # data/build.py sets no prefetch factor, and keeps no workers between epochs.
    own_loader="timm 0.4.12's transforms, prefetch 2, new workers each epoch",
)
