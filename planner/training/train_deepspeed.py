# Written by 'planner emit', which replaces files that begin with this line.
"""Train with DeepSpeed: `deepspeed train_deepspeed.py DATA`.

train.py and ds_config.json say what is trained and how. DeepSpeed's engine scales the loss,
accumulates and clips gradients, shards and saves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import train
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler
from train import SETTING

CONFIGURATION = Path(__file__).with_name("ds_config.json")


class EngineStep(train.Step):
    """A step with the engine's backward and update. `parallel_model` is the engine."""

    def backward(self, loss: torch.Tensor) -> None:
        self.parallel_model.backward(loss, scale_wrt_gas=False)  # `forward` divided by `accumulate`
        if not self.parallel_model.is_gradient_accumulation_boundary():
            self.parallel_model.step()  # which only counts the micro-batch

    def update(self) -> None:
        self.parallel_model.step()
        self.update_average()

    def zero_grad(self) -> None:
        """The engine has dropped the gradients."""


@torch.no_grad()
def measure_accuracy(step: EngineStep, loader: DataLoader[Any]) -> float:
    """The share of pictures that are classified correctly, over all devices."""
    step.model.eval()
    counts = torch.zeros(2, device=step.parallel_model.device)
    for index, batch in enumerate(loader):
        images, targets = train.prepare_images(*(t.to(counts.device) for t in batch), train=False)
        with step.attention_context():
            output = step.compiled_model(images)
        correct = getattr(output, "logits", output).argmax(dim=1) == targets
        # The sampler repeats pictures so that each device has equally many: a repeated one does
        # not count.
        places = index * (loader.batch_size or 1) + torch.arange(len(correct), device=counts.device)
        places = places * distributed.get_world_size() + distributed.get_rank()
        correct = correct[places < len(loader.dataset)]  # type: ignore[arg-type]
        counts += torch.tensor([correct.sum(), len(correct)], device=counts.device)
    distributed.all_reduce(counts)
    step.model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    options = train.parse_trainer_arguments()
    if options.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(options.seed)  # the same weights on every device
    train.set_up_torch(SETTING)
    data, collate = train.load_dataset(options.data, train=True)
    held_out, _ = train.load_dataset(options.data, train=False)
    loading: dict[str, Any] = {"num_workers": options.workers, "collate_fn": collate}
    sampler: Any = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(data, SETTING.batch_size, sampler=sampler, drop_last=True, **loading)
    validation = None
    if held_out is not None:
        in_order = DistributedSampler(held_out, shuffle=False)
        validation = DataLoader(held_out, SETTING.validation_batch, sampler=in_order, **loading)
    module = train.build_model(options.pretrained).train()
    device = torch.device(options.device)
    # Before the optimizer is built: it must get the weights on their device.
    model = train.prepare_model(module, SETTING, device, None)
    groups = train.decay_groups(model, options.weight_decay)
    (optimizer,) = train.build_optimizers(groups, SETTING, options.lr)
    num_steps = len(loader) // SETTING.accumulate  # of an epoch
    if not num_steps:
        raise SystemExit("an epoch has fewer batches than a step takes: emit a smaller batch_size")
    schedule = train.build_schedule(optimizer, num_steps * options.epochs, options)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=str(CONFIGURATION)
    )
    if SETTING.compile != "off":
        engine.compile(compile_kwargs={"mode": SETTING.compile, "dynamic": False})
    step = EngineStep(model, SETTING, train.image_loss, [optimizer], engine, engine)
    first_epoch, best = 0, 0.0
    path, state = engine.load_checkpoint(str(options.output)) if options.resume else (None, {})
    if path is not None:
        first_epoch, best = state["epoch"], state["best"]
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        # The engine saves no random states: each epoch of each device has its own seed.
        torch.manual_seed((options.seed + epoch) * world + rank)
        step.losses = torch.zeros((), device=engine.device)
        batches = (
            train.prepare_images(*(t.to(engine.device) for t in batch), train=True)
            for batch in loader
        )
        for _ in range(num_steps):
            step(batches)
        share = measure_accuracy(step, validation) if validation is not None else 0.0
        mean = step.losses.item() / num_steps
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {share:.2%}", flush=True)
        best = max(best, share)
        state = {"epoch": epoch + 1, "best": best}
        if share == best:
            engine.save_checkpoint(str(options.output), "best", state, save_latest=False)
        # Two folders in turns: one of them is always complete.
        engine.save_checkpoint(str(options.output), str((epoch + 1) % 2), state)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
