# Written by 'planner emit', which replaces files that begin with this line.
"""Train with accelerate: `accelerate launch train_accelerate.py DATA`.

train.py says what is trained and how, and its `Step` runs here. accelerate moves the model and the
batches to the devices, distributes and saves them. Written for accelerate 1.15.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
import train
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from train import SETTING


def build_accelerator(model: torch.nn.Module, cpu: bool) -> Accelerator:
    """An accelerator without autocast and accumulation, which `train.Step` does."""
    loading = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=SETTING.pin_memory)
    plugins: dict[str, Any] = {}
    if SETTING.parallelism == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        blocks = train.import_beside("levers").repeated_blocks(model)
        names = {type(block).__name__ for block in blocks}
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=SETTING.fsdp_reshard,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=list(names),
            mixed_precision_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False,
        )  # fmt: skip
    return Accelerator(cpu=cpu, dataloader_config=loading, mixed_precision="no", **plugins)


@torch.no_grad()
def measure_accuracy(accelerator: Accelerator, step: train.Step, loader: Any) -> float:
    """The share of pictures that are classified correctly, over all devices."""
    step.model.eval()
    matches = []
    for batch in loader:
        images, targets = train.prepare_images(*batch, train=False)
        with step.autocast_context(), step.attention_context():
            output = step.compiled_model(images)
        is_correct = getattr(output, "logits", output).argmax(dim=1) == targets
        matches.append(accelerator.gather_for_metrics(is_correct))
    step.model.train()
    return float(torch.cat(matches).float().mean().item())


def main() -> None:
    options = train.parse_trainer_arguments()
    set_seed(options.seed)  # the same weights on every device
    train.set_up_torch(SETTING)
    module = train.build_model(options.pretrained).train()
    accelerator = build_accelerator(module, options.device == "cpu")
    model = train.prepare_model(module, SETTING, accelerator.device, None)
    loader, validation = accelerator.prepare(*train.plain_loaders(options))
    groups = train.decay_groups(model, options.weight_decay)
    optimizers = train.build_optimizers(groups, SETTING, options.lr)
    parallel_model, *optimizers = accelerator.prepare(model, *optimizers)
    compiled_model = train.compile_model(parallel_model, model, SETTING, None)
    step = train.Step(model, SETTING, train.image_loss, optimizers, parallel_model, compiled_model)
    num_steps = len(loader) // SETTING.accumulate  # of an epoch
    if not num_steps:
        raise SystemExit("an epoch has fewer batches than a step takes: emit a smaller batch_size")
    steps = num_steps * options.epochs
    schedules = [train.build_schedule(o.optimizer, steps, options) for o in optimizers]
    scalers = [step.scaler] if step.scaler is not None else []
    accelerator.register_for_checkpointing(*schedules, *scalers)
    set_seed(options.seed, device_specific=True)  # mixing and dropping differ between devices
    first_epoch, best, progress = 0, 0.0, options.output / "progress.json"
    if options.resume and progress.exists():
        first_epoch, best = json.loads(progress.read_text())
        accelerator.load_state(options.output / str(first_epoch % 2))
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        batches = (train.prepare_images(*batch, train=True) for batch in loader)
        step.losses = torch.zeros((), device=accelerator.device)
        batches = itertools.islice(batches, num_steps * SETTING.accumulate)
        for _ in range(num_steps):
            step(batches)
            for schedule in schedules:
                schedule.step()
        mean = accelerator.reduce(step.losses, "mean").item() / num_steps
        share = measure_accuracy(accelerator, step, validation) if validation is not None else 0.0
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {share:.2%}")
        # Two folders in turns: one of them is always complete.
        accelerator.save_state(options.output / str((epoch + 1) % 2))
        if share > best:
            best = share
            accelerator.save_model(parallel_model, options.output / "best")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            progress.write_text(json.dumps([epoch + 1, best]))
    accelerator.end_training()


if __name__ == "__main__":
    main()
