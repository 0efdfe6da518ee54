# Written by 'planner emit', which replaces files that begin with this line.
"""Train with transformers' Trainer: `python train_transformers.py DATA`.

train.py says what is trained and how. The Trainer autocasts, scales the loss, accumulates, clips
and distributes (transformers 5.24). Its defaults are changed here: it would clip at 1.0, decay
other weights, take a rate of 5e-5 whatever the batch, and keep the last, smaller batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import train
from train import SETTING
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


def training_arguments(options: Any, has_validation: bool) -> TrainingArguments:
    extra: dict[str, Any] = {"tf32": SETTING.precision == "tf32"} if options.device != "cpu" else {}
    if SETTING.parallelism == "ddp":
        extra["ddp_find_unused_parameters"] = False  # by default the Trainer looks for them
    if SETTING.gradient_sync == "every":
        sync = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        extra["accelerator_config"] = sync
    if has_validation:
        extra |= {"eval_strategy": "epoch", "load_best_model_at_end": True}
        extra["metric_for_best_model"] = "accuracy"
    return TrainingArguments(
        str(options.output), seed=options.seed, use_cpu=options.device == "cpu",
        per_device_train_batch_size=SETTING.batch_size,
        per_device_eval_batch_size=SETTING.validation_batch,
        gradient_accumulation_steps=SETTING.accumulate,
        bf16=SETTING.precision in ("bf16", "fp8"), fp16=SETTING.precision == "fp16",
        learning_rate=options.lr, weight_decay=options.weight_decay,
        max_grad_norm=SETTING.clip_norm, num_train_epochs=options.epochs,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        # A number below 1 is a share of all steps. It is at most a fifth, as in train.py.
        warmup_steps=min(options.warmup_epochs / options.epochs, 0.2),
        lr_scheduler_kwargs={
            "min_lr_rate": SETTING.final_share, "warmup_lr_rate": SETTING.warmup_start,
        },
        dataloader_num_workers=options.workers, dataloader_pin_memory=SETTING.pin_memory,
        dataloader_prefetch_factor=SETTING.prefetch_factor if options.workers else None,
        dataloader_persistent_workers=options.workers > 0, dataloader_drop_last=True,
        save_strategy="epoch", save_total_limit=2, logging_steps=options.log_every,
        label_names=["targets"], remove_unused_columns=False, **extra,
    )  # fmt: skip


class ImageTrainer(Trainer):
    step: train.Step  # only its contexts are used

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = train.decay_groups(model or self.model, self.args.weight_decay)
            (self.optimizer,) = train.build_optimizers(groups, SETTING, self.args.learning_rate)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        images, targets = train.prepare_images(inputs["images"], inputs["targets"], model.training)
        with self.step.attention_context(), self.step.offload_context((images, targets)):
            output = model(images)
            logits = getattr(output, "logits", output)
            loss = train.image_loss(lambda _: logits, (images, targets))
        return (loss, {"logits": logits}) if return_outputs else loss

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of every picture. The Trainer's own would drop a last, smaller batch if the
        training loader does."""
        self.args.dataloader_drop_last = False
        loader = super().get_eval_dataloader(eval_dataset)
        self.args.dataloader_drop_last = True
        return loader


def measure_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    options = train.parse_trainer_arguments()
    data, collate = train.load_dataset(options.data, train=True)
    held_out, _ = train.load_dataset(options.data, train=False)
    arguments = training_arguments(options, held_out is not None)
    if SETTING.world_size == 1:  # or the Trainer would use all GPUs that it finds
        arguments._n_gpu = min(arguments.n_gpu, 1)
    set_seed(options.seed)  # the same weights on every device
    train.set_up_torch(SETTING)
    module = train.build_model(options.pretrained).train()
    model = train.prepare_model(module, SETTING, arguments.device, None)
    if SETTING.compile != "off":  # the Trainer's own option would compile dynamic shapes
        model.compile(mode=SETTING.compile, dynamic=False)
    collate = collate or torch.utils.data.default_collate
    trainer = ImageTrainer(
        model, arguments, train_dataset=data, eval_dataset=held_out,
        compute_metrics=measure_accuracy,
        data_collator=lambda items: dict(zip(("images", "targets"), collate(items), strict=True)),
    )  # fmt: skip
    trainer.step = train.Step(model, SETTING, train.image_loss, [], model, model)
    last = get_last_checkpoint(str(options.output)) if Path(options.output).is_dir() else None
    trainer.train(resume_from_checkpoint=last if options.resume else None)


if __name__ == "__main__":
    main()
