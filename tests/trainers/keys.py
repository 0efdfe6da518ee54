"""Names that a trainer knows, recorded where its package does not install what reads them.

Facts, one list a trainer; each says where it was read.
"""

from typing import Any

# huggingface/pytorch-image-models train.py at aa4b585 (timm 1.0.29.dev0): the `dest` of arguments,
# which `-c args.yaml` overrides through `parser.set_defaults`: those that concern the model, data,
# device, optimizer, loss and averaging. That train.py itself trained for an epoch with an emitted
# file, by hand (tiny model, CPU, 2026-11-20).
_TIMM = """
data data_dir dataset train_split val_split class_map model pretrained initial_checkpoint
resume num_classes gp img_size in_chans input_size crop_pct batch_size validation_batch_size
channels_last fuser grad_accum_steps grad_checkpointing fast_norm model_kwargs torchcompile_mode
torchscript torchcompile device amp amp_dtype model_dtype no_ddp_bb synchronize_step opt opt_eps
opt_betas momentum weight_decay clip_grad clip_mode layer_decay opt_kwargs sched lr lr_base
lr_base_size lr_base_scale warmup_lr min_lr epochs warmup_epochs warmup_prefix sched_on_updates
aa color_jitter reprob remode recount train_interpolation interpolation smoothing mixup cutmix
mixup_prob mixup_switch_prob drop drop_path drop_block model_ema model_ema_force_cpu
model_ema_decay seed workers worker_seeding pin_mem no_prefetcher use_multi_epochs_loader output
"""
TIMM_ARGUMENTS = frozenset(_TIMM.split())


def microsoft_config() -> dict[str, Any]:
    """The key tree of microsoft/Swin-Transformer config.py at f82860b, with a value of each key's
    type (yacs refuses unknown keys and other types)."""
    shape = {
        "PATCH_SIZE": 4, "IN_CHANS": 3, "EMBED_DIM": 96, "DEPTHS": [2], "NUM_HEADS": [3],
        "WINDOW_SIZE": 7, "MLP_RATIO": 4.0, "QKV_BIAS": True, "APE": False, "PATCH_NORM": True,
    }  # fmt: skip
    return {
        "BASE": [""],
        "DATA": {
            "BATCH_SIZE": 128, "DATA_PATH": "", "DATASET": "imagenet", "IMG_SIZE": 224,
            "INTERPOLATION": "bicubic", "PIN_MEMORY": True, "NUM_WORKERS": 8,
        },
        "MODEL": {
            "TYPE": "swin", "NAME": "", "NUM_CLASSES": 1000, "DROP_RATE": 0.0,
            "DROP_PATH_RATE": 0.1, "LABEL_SMOOTHING": 0.1,
            "SWIN": {**shape, "QK_SCALE": None},
            "SWINV2": {**shape, "PRETRAINED_WINDOW_SIZES": [0]},
        },
        "TRAIN": {
            "EPOCHS": 300, "WARMUP_EPOCHS": 20, "WEIGHT_DECAY": 0.05, "BASE_LR": 5e-4,
            "WARMUP_LR": 5e-7, "MIN_LR": 5e-6,
            "LR_SCHEDULER": {"NAME": "cosine", "WARMUP_PREFIX": True},
            "CLIP_GRAD": 5.0, "ACCUMULATION_STEPS": 1, "USE_CHECKPOINT": False,
            "OPTIMIZER": {"NAME": "adamw", "EPS": 1e-8, "BETAS": (0.9, 0.999), "MOMENTUM": 0.9},
        },
        "AUG": {
            "COLOR_JITTER": 0.4, "AUTO_AUGMENT": "rand-m9-mstd0.5-inc1", "REPROB": 0.25,
            "REMODE": "pixel", "RECOUNT": 1, "MIXUP": 0.8, "CUTMIX": 1.0, "CUTMIX_MINMAX": None,
            "MIXUP_PROB": 1.0, "MIXUP_SWITCH_PROB": 0.5, "MIXUP_MODE": "batch",
        },
        "TEST": {"CROP": True},
        "AMP_ENABLE": True,
    }  # fmt: skip
