"""DeepSpeed itself on this CPU, as one of N ranks of a fake process group, recorded beside the
plain step of the same module: a process of its own, since DeepSpeed leaves state of its own behind.

Prints one JSON object: the events of the plain step and of DeepSpeed's, both as events of a ledger.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from functools import partial
from typing import Any

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "DS_BUILD_OPS": "0", "LOCAL_RANK": "0",
}  # fmt: skip

# Fields of a setting, as DeepSpeed calls them (runtime/zero/config.py).
_STAGE_3 = {
    "zero_persistence": "stage3_param_persistence_threshold",
    "zero_prefetch_bucket": "stage3_prefetch_bucket_size",
    "zero_max_reuse": "stage3_max_reuse_distance",
}


def main(cases: list[dict[str, Any]]) -> None:
    """Each case in a child of its own, so that DeepSpeed is imported once."""
    os.environ |= ENVIRONMENT
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Its collectives between processes on one CPU, which it would compile: nothing is sent here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.disable(logging.CRITICAL)
    for case in cases:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                run(case)
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(child, 0)


def run(case: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, world_size = case.get("rank", 0), case["world_size"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    plain = record(make_model(case), case, engine=False)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    engine = record(make_model(case), case, engine=True)
    print("RESULT" + json.dumps({"case": case, "plain": plain, "deepspeed": engine}))


def make_model(case: dict[str, Any]) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    if case["model"] == "mlp":
        model = nn.Sequential(
            nn.Linear(64, 128), *(Block(128) for _ in range(3)), nn.Linear(128, 24)
        )
    else:
        from planner.core.schema import SwinConfig, TrainSetting
        from planner.libraries.native.module import build

        config = SwinConfig(
            library="native", image_size=64, patch_size=4, window_size=4, embed_dim=32,
            depths=(2, 2), num_heads=(2, 4), num_classes=24, drop_path_rate=0.0,
        )  # fmt: skip
        model = build(config, TrainSetting(attention="eager"))
    dtype = torch.bfloat16 if case["precision"] == "pure-bf16" else torch.float32
    return model.to(dtype)


class Storages:
    """Every storage that operations on real tensors make, as events of a ledger: a dispatch mode
    that knows nothing of DeepSpeed."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        self.rows: list[list[Any]] = []
        self.numbers: dict[int, int] = {}  # of the living, by the address of the C++ object
        self.references: dict[int, Any] = {}
        self.count = 0
        noted = self.note

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                for tensor in tree_leaves((args, kwargs, result)):
                    noted(tensor, str(func))
                return result

        self.mode = Mode()

    def note(self, tensor: Any, label: str, category: str = "", weight: Any = None) -> None:
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            return
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        address = storage._cdata
        if address not in self.numbers and storage.nbytes():
            self.count += 1
            self.numbers[address] = self.count
            self.references[address] = weakref.ref(storage, partial(self.free, address))
            self.rows.append(["Allocated", self.count, storage.nbytes(), label])
        if category and address in self.numbers:
            of = 0 if weight is None else self.numbers[weight.untyped_storage()._cdata]
            self.rows.append(["Tagged", self.numbers[address], category, of])

    def free(self, address: int, _: Any) -> None:
        del self.references[address]
        self.rows.append(["Freed", self.numbers.pop(address)])

    def mark(self, phase: str, step: int) -> None:
        self.rows.append(["Marked", phase, step])


def record(model: Any, case: dict[str, Any], engine: bool) -> list[list[Any]]:
    import torch

    storages = Storages()
    dtype = next(model.parameters()).dtype
    shape = (4, 64) if case["model"] == "mlp" else (4, 3, 64, 64)
    with storages.mode:
        for parameter in model.parameters():
            storages.note(parameter, "parameter", "parameters")
            if not engine:
                parameter.register_post_accumulate_grad_hook(
                    lambda p: storages.note(p.grad, "", "gradients", p)
                )
        for buffer in model.buffers():
            storages.note(buffer, "buffer", "buffers")
        batch = torch.randn(shape).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        make = engine_step if engine else plain_step
        train = make(model, optimizer, case)
        storages.mark("build", 0)
        for step in range(2):
            train(storages, batch, step)
        return list(storages.rows)


def plain_step(model: Any, optimizer: Any, case: dict[str, Any]) -> Any:
    import torch

    cast = {"bf16": torch.bfloat16}.get(case["precision"])

    def train(storages: Any, batch: Any, step: int) -> None:
        count = case.get("accumulate", 1) if case["stage"] == 1 else 1
        for _ in range(count):
            with torch.autocast("cpu", dtype=cast, enabled=cast is not None):
                output = model(batch)
            loss = output.float().sum() / case.get("accumulate", 1)
            del output
            storages.mark("forward", step)
            loss.backward()
            del loss
            storages.mark("backward", step)
        optimizer.step()
        storages.mark("optimizer", step)
        optimizer.zero_grad()
        storages.mark("zero_grad", step)

    return train


def engine_step(model: Any, optimizer: Any, case: dict[str, Any]) -> Any:
    import deepspeed

    accumulate = case.get("accumulate", 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {
            "stage": case["stage"],
            "reduce_bucket_size": case["bucket"],
            "overlap_comm": case.get("overlap", False),
            **{_STAGE_3[field]: value for field, value in case.get("fields", {}).items()},
        },
        "bf16": {"enabled": case["precision"] == "pure-bf16"},
    }
    if case["precision"] == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def train(storages: Any, batch: Any, step: int) -> None:
        for _ in range(accumulate):
            loss = engine(batch).float().sum()
            storages.mark("forward", step)
            engine.backward(loss)
            del loss
            storages.mark("backward", step)
            if _ < accumulate - 1:
                engine.step()
        engine.step()
        storages.mark("optimizer", step)
        storages.mark("zero_grad", step)

    return train


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
