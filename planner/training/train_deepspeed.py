# Written by 'planner emit', which replaces files that begin with this line.
"""Train with DeepSpeed: `deepspeed train_deepspeed.py DATA`. What is trained, and how, is in
train.py and ds_config.json. The engine scales, accumulates, clips, shards and saves.
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


class Step(train.Step):
    """The engine's backward and update in the place of torch's. `spread` is the engine."""

    def backward(self, loss: torch.Tensor) -> None:
        self.spread.backward(loss, scale_wrt_gas=False)  # it was divided by `accumulate`
        if not self.spread.is_gradient_accumulation_boundary():
            self.spread.step()  # only counts

    def update(self) -> None:
        self.spread.step()
        self.follow()

    def zero_grad(self) -> None:
        """The engine lets go of gradients by itself."""


@torch.no_grad()
def accuracy(step: Step, loader: DataLoader[Any]) -> float:
    """The share of the pictures whose best class is right, over all devices."""
    step.model.eval()
    counts = torch.zeros(2, device=step.spread.device)
    for index, batch in enumerate(loader):
        images, targets = train.prepared(*(t.to(counts.device) for t in batch), train=False)
        with step.attending():
            output = step.call(images)
        right = getattr(output, "logits", output).argmax(dim=1) == targets
        # The last pictures come twice where there are fewer than devices: they count once.
        places = index * (loader.batch_size or 1) + torch.arange(len(right), device=counts.device)
        places = places * distributed.get_world_size() + distributed.get_rank()
        right = right[places < len(loader.dataset)]  # type: ignore[arg-type]
        counts += torch.tensor([right.sum(), len(right)], device=counts.device)
    distributed.all_reduce(counts)
    step.model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    options = train.arguments()
    if options.synthetic or options.steps or options.profile or options.watch:
        raise SystemExit("--synthetic, --steps, --profile and --watch are train.py's alone")
    if options.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(options.seed)  # on every device the same weights
    train.set_up_torch(SETTING)
    data, collate = train.dataset(options.data, train=True)
    validated, _ = train.dataset(options.data, train=False)
    how: dict[str, Any] = {"num_workers": options.workers, "collate_fn": collate}
    sampler: Any = DistributedSampler(data, seed=options.seed)
    seen = DataLoader(data, SETTING.batch_size, sampler=sampler, drop_last=True, **how)
    held = None
    if validated is not None:
        shares = DistributedSampler(validated, shuffle=False)
        held = DataLoader(validated, SETTING.validation_batch, sampler=shares, **how)
    built = train.build_model(options.pretrained).train()
    device = torch.device(options.device)
    model = train.prepare(built, SETTING, device, None)  # before the optimizer takes its weights
    groups = train.decay_groups(model, options.weight_decay)
    (optimizer,) = train.build_optimizers(groups, SETTING, options.lr)
    each = len(seen) // SETTING.accumulate
    if not each:
        raise SystemExit("an epoch has fewer batches than a step takes")
    steps = each * options.epochs
    schedule = train.build_schedule(optimizer, steps, options)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=str(CONFIGURATION)
    )
    if SETTING.compile != "off":
        engine.compile(compile_kwargs={"mode": SETTING.compile, "dynamic": False})
    step = Step(model, SETTING, train.image_loss, [optimizer], engine, engine)
    first, best = 0, 0.0
    loaded, state = engine.load_checkpoint(str(options.output)) if options.resume else (None, {})
    if loaded:
        first, best = state["epoch"], state["best"]
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed((options.seed + epoch) * world + rank)  # which the engine does not save
        step.losses = torch.zeros((), device=engine.device)
        batches = iter(seen)
        prepared = (
            train.prepared(*(t.to(engine.device) for t in batch), train=True) for batch in batches
        )
        for _ in range(each):
            step(prepared)
        reached = accuracy(step, held) if held is not None else 0.0
        mean = step.losses.item() / each
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {reached:.2%}", flush=True)
        best = max(best, reached)
        state = {"epoch": epoch + 1, "best": best}
        if reached == best:
            engine.save_checkpoint(str(options.output), "best", state, save_latest=False)
        engine.save_checkpoint(str(options.output), str((epoch + 1) % 2), state)  # one is whole
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
