# Written by 'planner emit', which replaces files that begin with this line.
"""Train with accelerate: `accelerate launch train_accelerate.py DATA`; what is trained, and how, is
train.py's, its `Step` too. accelerate places, spreads and saves. Read in accelerate 1.15.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
import train
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    set_seed,
)
from torch.utils.data import DataLoader
from train import SETTING


def accelerator_of(model: torch.nn.Module, cpu: bool) -> Accelerator:
    """It autocasts and accumulates nothing: `train.Step` does."""
    loading = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=SETTING.pin_memory)
    given: dict[str, Any] = {}
    if SETTING.parallelism == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        blocks = {type(block).__name__ for block in train.beside("levers").repeated_blocks(model)}
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=SETTING.fsdp_reshard,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=list(blocks),
            mixed_precision_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False,
        )  # fmt: skip
    return Accelerator(cpu=cpu, dataloader_config=loading, mixed_precision="no", **given)


@torch.no_grad()
def accuracy(accelerator: Accelerator, step: train.Step, loader: Any) -> float:
    """The share of the pictures whose best class is right, over all devices."""
    step.model.eval()
    found = []
    for batch in loader:
        images, targets = train.prepared(*batch, train=False)
        with step.autocast(), step.attending():
            output = step.call(images)
        right = getattr(output, "logits", output).argmax(dim=1) == targets
        found.append(accelerator.gather_for_metrics(right))
    step.model.train()
    return float(torch.cat(found).float().mean().item())


def main() -> None:
    options = train.arguments()
    if options.synthetic or options.steps or options.profile or options.watch:
        raise SystemExit("--synthetic, --steps, --profile and --watch are train.py's alone")
    set_seed(options.seed)  # on every device the same weights
    train.set_up_torch(SETTING)
    built = train.build_model(options.pretrained).train()
    accelerator = accelerator_of(built, options.device == "cpu")
    model = train.prepare(built, SETTING, accelerator.device, None)
    data, collate = train.dataset(options.data, train=True)
    validated, _ = train.dataset(options.data, train=False)
    how: dict[str, Any] = {
        "num_workers": options.workers, "collate_fn": collate, "pin_memory": SETTING.pin_memory,
        "prefetch_factor": SETTING.prefetch_factor if options.workers else None,
    }  # fmt: skip
    seen = DataLoader(data, SETTING.batch_size, shuffle=True, drop_last=True, **how)
    held = DataLoader(validated, SETTING.validation_batch, **how) if validated else None
    groups = train.decay_groups(model, options.weight_decay)
    optimizers = train.build_optimizers(groups, SETTING, options.lr)
    loader, held = accelerator.prepare(seen, held)
    spread, *prepared = accelerator.prepare(model, *optimizers)
    call = train.compiled(spread, model, SETTING, None)
    step = train.Step(model, SETTING, train.image_loss, prepared, spread, call)
    each = len(loader) // SETTING.accumulate
    if not each:
        raise SystemExit("an epoch has fewer batches than a step takes")
    steps = each * options.epochs
    schedules = [train.build_schedule(one.optimizer, steps, options) for one in prepared]
    scalers = [step.scaler] if step.scaler is not None else []
    accelerator.register_for_checkpointing(*schedules, *scalers)
    set_seed(options.seed, device_specific=True)  # each device mixes and drops by itself
    first, best, progress = 0, 0.0, options.output / "progress.json"
    if options.resume and progress.exists():
        first, best = json.loads(progress.read_text())
        accelerator.load_state(options.output / str(first % 2))
    for epoch in range(first, options.epochs):
        loader.set_epoch(epoch)
        batches = (train.prepared(*batch, train=True) for batch in loader)
        step.losses = torch.zeros((), device=accelerator.device)
        run_epoch(step, itertools.islice(batches, each * SETTING.accumulate), each, schedules)
        mean = accelerator.reduce(step.losses, "mean").item() / each
        reached = accuracy(accelerator, step, held) if held is not None else 0.0
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {reached:.2%}")
        accelerator.save_state(options.output / str((epoch + 1) % 2))  # by turns: one is whole
        if reached > best:
            best = reached
            accelerator.save_model(spread, options.output / "best")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            progress.write_text(json.dumps([epoch + 1, best]))
    accelerator.end_training()


def run_epoch(step: train.Step, batches: Iterator[Any], steps: int, schedules: list[Any]) -> None:
    for _ in range(steps):
        step(batches)
        for schedule in schedules:
            schedule.step()


if __name__ == "__main__":
    main()
