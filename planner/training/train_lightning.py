# Written by 'planner emit', which replaces files that begin with this line.
"""Train with Lightning: `python train_lightning.py DATA`; what is trained, and how, is train.py's.

Lightning autocasts, scales, accumulates, clips and spreads; the rest of a step is train.py's own.
Read in Lightning 2.6, pytorch/trainer/trainer.py and plugins/precision.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import train
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from train import SETTING

PRECISIONS = {
    # "mixed" is autocast; "true" converts the model and its inputs.
    "fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed",
    "pure-bf16": "bf16-true", "fp8": "bf16-mixed",
}  # fmt: skip


class Training(lightning.LightningModule):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        model = train.build_model(options.pretrained).train()
        self.model = train.prepare(model, SETTING, torch.device("cpu"), None)
        self.call = [train.compiled(self.model, self.model, SETTING, None)]  # no second module
        self.loss = train.Step(self.model, SETTING, train.image_loss, [], self.model, self.call[0])

    def on_train_epoch_start(self) -> None:
        # Lightning restores no random numbers: each epoch of each device has its own.
        seed = self.options.seed + self.current_epoch
        torch.manual_seed(seed * self.trainer.world_size + self.global_rank)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        batch = train.prepared(*batch, train=True)
        with self.loss.attending(), self.loss.offloading(batch):
            loss = train.image_loss(self.call[0], batch)
        rest = int(self.trainer.num_training_batches) % SETTING.accumulate
        is_rest = index >= int(self.trainer.num_training_batches) - rest
        return loss * SETTING.accumulate / rest if rest and is_rest else loss

    def validation_step(self, batch: Any, index: int) -> None:
        images, targets = train.prepared(*batch, train=False)
        output = self.model(images)
        right = getattr(output, "logits", output).argmax(dim=1) == targets
        # The last pictures come twice where there are fewer than devices: they count once.
        places = index * SETTING.validation_batch + torch.arange(len(right), device=right.device)
        places = places * self.trainer.world_size + self.global_rank
        right = right[places < len(self.trainer.val_dataloaders.dataset)]
        share = right.float().mean() if len(right) else torch.zeros((), device=right.device)
        self.log("accuracy", share, batch_size=len(right), sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, **given: Any) -> None:
        # Lightning itself clips no fused optimizer under autocast; bf16 scales nothing.
        if SETTING.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), SETTING.clip_norm)

    def configure_optimizers(self) -> Any:
        groups = train.decay_groups(self.model, self.options.weight_decay)
        (optimizer,) = train.build_optimizers(groups, SETTING, self.options.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = train.build_schedule(optimizer, steps, self.options)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    options = train.arguments()
    if options.synthetic or options.steps or options.profile or options.watch:
        raise SystemExit("--synthetic, --steps, --profile and --watch are train.py's alone")
    lightning.seed_everything(options.seed)
    train.set_up_torch(SETTING)
    strategy = "ddp" if SETTING.parallelism == "ddp" else "auto"
    data, collate = train.dataset(options.data, train=True)
    validated, _ = train.dataset(options.data, train=False)
    how: dict[str, Any] = {
        "num_workers": options.workers, "collate_fn": collate,
        "pin_memory": SETTING.pin_memory and options.device == "cuda",
        "prefetch_factor": SETTING.prefetch_factor if options.workers else None,
    }  # fmt: skip
    seen = DataLoader(data, SETTING.batch_size, shuffle=True, drop_last=True, **how)
    held = DataLoader(validated, SETTING.validation_batch, **how) if validated else None
    best = "accuracy" if validated else None
    kept = ModelCheckpoint(options.output, monitor=best, mode="max", save_last=True)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine's devices
    trainer = lightning.Trainer(
        accelerator="cpu" if options.device == "cpu" else "gpu", devices=here,
        num_nodes=SETTING.world_size // here, strategy=strategy,
        precision=PRECISIONS[SETTING.precision],  # type: ignore[arg-type]
        accumulate_grad_batches=SETTING.accumulate, benchmark=SETTING.cudnn_benchmark,
        max_epochs=options.epochs, callbacks=[kept],
    )  # fmt: skip
    trainer.fit(Training(options), seen, held, ckpt_path="last" if options.resume else None)


if __name__ == "__main__":
    main()
