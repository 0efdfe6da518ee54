"""One of two processes that train a small Swin as a probe does under DeepSpeed, over gloo.

    python -m tests.step.zero.gloo_ranks FOLDER RANK

Reads FOLDER/cases.json (changes to `BASE`, one case each) and writes, of each case, the storages
that the rank made with DeepSpeed and without it, how far its weights went from those of the step
without it, and what it holds of weights and of the optimizer's state, to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from planner import SwinConfig, TrainSetting

WORLD_SIZE = 2
MODEL = SwinConfig(
    library="native", image_size=64, patch_size=4, window_size=4, embed_dim=32, depths=(2, 2),
    num_heads=(2, 4), num_classes=24, drop_path_rate=0.0,
)  # fmt: skip
BASE = TrainSetting(
    batch_size=2, precision="fp32", attention="eager", optimizer="sgd", world_size=WORLD_SIZE,
    zero_overlap=False, zero_reduce_bucket=100_000, parallelism="zero1",
)  # fmt: skip
NUM_STEPS = 2


def train(setting: TrainSetting) -> dict[str, Any]:
    """A rank's step, from the same weights and the same images on all."""
    import torch

    from planner.training.parallel.spread import own_part
    from planner.training.parallel.spreading import spread_as_set
    from planner.training.step import Training
    from planner.training.tasks import as_task
    from planner.training.tasks.blocks import blocks_to_shard
    from tests.building import build_real
    from tests.step.zero.deepspeed_run import Storages

    torch.manual_seed(0)
    storages, cpu = Storages(), torch.device("cpu")
    with storages.mode:
        module = build_real(MODEL, setting).train()
        for parameter in module.parameters():
            storages.note(parameter, "parameter", "parameters")
            if setting.parallelism == "none":
                parameter.register_post_accumulate_grad_hook(
                    lambda p: storages.note(p.grad, "", "gradients", p)
                )
        begun = [parameter.detach().clone() for parameter in module.parameters()]
        task = as_task(module, MODEL, setting)
        batch = task.batch(setting.batch_size, cpu)
        spread = spread_as_set(module, partial(blocks_to_shard, module, task, MODEL), setting, cpu)
        training = Training(module, setting, task, batch, spread=spread)
        storages.mark("build", 0)
        for step in range(NUM_STEPS):
            training.step(lambda phase, step=step: storages.mark(phase, step))  # type: ignore[misc]
    rows = list(storages.rows)
    state = [t for s in training.optimizer.state.values() for t in s.values()]
    whole = weights(training)
    return {
        "rows": rows,
        "went": [new - old for new, old in zip(whole, begun, strict=True)],
        "own": sum(own_part(parameter).numel() for parameter in training.parameters),
        "held": sum(t.numel() for t in state if isinstance(t, torch.Tensor)),
    }


def weights(training: Any) -> list[Any]:
    if training.setting.parallelism != "zero3":
        return [parameter.detach().clone() for parameter in training.module.parameters()]
    import deepspeed

    parameters = list(training.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def work(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from planner.step.zero import on_one_device
    from planner.training.parallel.zero import import_deepspeed

    torch.set_num_threads(1)
    import_deepspeed("cpu")
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    found = []
    for changes in json.loads((folder / "cases.json").read_text()):
        setting = TrainSetting(**{**BASE.model_dump(), **changes})
        alone = on_one_device(setting)
        memory = train(alone)  # of one micro-batch, unclipped: what ZeRO's events are inserted into
        same = alone.model_copy(
            update={"accumulate": setting.accumulate, "clip_grad": setting.clip_grad}
        )
        plain, sharded = train(same), train(setting)
        far = [(a - b).norm() for a, b in zip(plain["went"], sharded["went"], strict=True)]
        norm = torch.stack([went.norm() for went in plain["went"]]).norm()
        found.append(
            {
                "plain": memory["rows"],
                "deepspeed": sharded["rows"],
                "far": float(torch.stack(far).norm() / norm),
                "own": sharded["own"],
                "held": sharded["held"],
                "held_alone": plain["held"],
            }
        )
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
