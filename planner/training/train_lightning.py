# Written by 'planner emit', which replaces files that begin with this line.
"""Train with Lightning: `python train_lightning.py DATA`.

train.py says what is trained and how. Lightning autocasts, scales the loss, accumulates, clips and
distributes; the rest of a step is train.py's. Written for Lightning 2.6 (pytorch/trainer/trainer.py
and plugins/precision).
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import train
from lightning.pytorch.callbacks import ModelCheckpoint
from train import SETTING

PRECISIONS = {
    # "mixed" is autocast; "true" converts the model and its inputs.
    "fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed",
    "pure-bf16": "bf16-true", "fp8": "bf16-mixed",
}  # fmt: skip


class LitModel(lightning.LightningModule):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        model = train.build_model(options.pretrained).train()
        self.model = train.prepare_model(model, SETTING, torch.device("cpu"), None)
        compiled_model = train.compile_model(self.model, self.model, SETTING, None)
        self.compiled_model = [compiled_model]  # in a list, or torch would register it as a module
        # A step of which only the contexts are used.
        self.contexts = train.Step(model, SETTING, train.image_loss, [], model, compiled_model)

    def on_train_epoch_start(self) -> None:
        # Lightning restores no random states: each epoch of each device has its own seed.
        seed = self.options.seed + self.current_epoch
        torch.manual_seed(seed * self.trainer.world_size + self.global_rank)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        batch = train.prepare_images(*batch, train=True)
        with self.contexts.attention_context(), self.contexts.offload_context(batch):
            loss = train.image_loss(self.compiled_model[0], batch)
        # The last step of an epoch may have fewer micro-batches, and Lightning divides by all.
        num_batches = int(self.trainer.num_training_batches)
        num_last = num_batches % SETTING.accumulate
        is_last_step = index >= num_batches - num_last
        return loss * SETTING.accumulate / num_last if num_last and is_last_step else loss

    def validation_step(self, batch: Any, index: int) -> None:
        images, targets = train.prepare_images(*batch, train=False)
        output = self.model(images)
        correct = getattr(output, "logits", output).argmax(dim=1) == targets
        # The sampler repeats pictures so that each device has equally many: a repeated one does
        # not count.
        places = index * SETTING.validation_batch + torch.arange(len(correct), device=self.device)
        places = places * self.trainer.world_size + self.global_rank
        correct = correct[places < len(self.trainer.val_dataloaders.dataset)]
        share = correct.float().mean() if len(correct) else torch.zeros((), device=self.device)
        self.log("accuracy", share, batch_size=len(correct), sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, **arguments: Any) -> None:
        # Lightning refuses to clip for a fused optimizer under autocast, though bf16 is not scaled.
        if SETTING.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), SETTING.clip_norm)

    def configure_optimizers(self) -> Any:
        groups = train.decay_groups(self.model, self.options.weight_decay)
        (optimizer,) = train.build_optimizers(groups, SETTING, self.options.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = train.build_schedule(optimizer, steps, self.options)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    options = train.parse_trainer_arguments()
    lightning.seed_everything(options.seed)
    train.set_up_torch(SETTING)
    loader, validation = train.plain_loaders(options)
    monitor = "accuracy" if validation is not None else None
    checkpoints = ModelCheckpoint(options.output, monitor=monitor, mode="max", save_last=True)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine
    trainer = lightning.Trainer(
        accelerator="cpu" if options.device == "cpu" else "gpu", devices=devices,
        num_nodes=SETTING.world_size // devices,
        strategy="ddp" if SETTING.parallelism == "ddp" else "auto",
        precision=PRECISIONS[SETTING.precision],  # type: ignore[arg-type]
        accumulate_grad_batches=SETTING.accumulate, benchmark=SETTING.cudnn_benchmark,
        max_epochs=options.epochs, callbacks=[checkpoints],
    )  # fmt: skip
    trainer.fit(LitModel(options), loader, validation, ckpt_path="last" if options.resume else None)


if __name__ == "__main__":
    main()
