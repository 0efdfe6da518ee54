"""FSDP1 and FSDP2 beside each other on this CPU, as one of N ranks of a fake process group.

Prints one JSON object a line: the live bytes at the peak of a steady step, and the largest unit's.
Each runs in a child of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

from tests.step.zero.deepspeed_run import Storages, make_model


def main(cases: list[dict[str, Any]]) -> None:
    import torch

    torch.set_num_threads(1)
    for case in cases:
        for version in (1, 2):
            sys.stdout.flush()
            child = os.fork()
            if not child:
                try:
                    print("RESULT" + json.dumps({**case, "version": version, **run(case, version)}))
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            os.waitpid(child, 0)


def run(case: dict[str, Any], version: int) -> dict[str, int]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["world_size"])
    model = make_model({**case, "precision": "fp32"})
    blocks = [m for m in model.modules() if type(m).__name__.startswith("Block")]
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    batch = torch.randn((4, 64) if case["model"] == "mlp" else (4, 3, 64, 64))
    storages = Storages()
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        address = storage._cdata
        if address in storages.numbers:
            storages.free(address, None)
        result = resize(storage, size)
        if size:
            storages.note(torch.empty(0, dtype=torch.uint8).set_(storage), "resize_")
        return result

    with storages.mode, mock.patch.object(torch.UntypedStorage, "resize_", resized):
        sharded = shard(model, blocks, version, case["world_size"])
        optimizer = torch.optim.AdamW(sharded.parameters(), foreach=True)
        for step in range(3):
            storages.mark("zero_grad", step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case["autocast"]):
                output = sharded(batch)
            loss = output.float().sum()
            del output
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        storages.mark("zero_grad", 3)
        rows = list(storages.rows)
    return {"peak": steady_peak(rows), "largest": 4 * largest}


def shard(model: Any, blocks: list[Any], version: int, world_size: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if version == 1:
        policy = ModuleWrapPolicy({type(block) for block in blocks})
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
        )
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def steady_peak(rows: list[list[Any]]) -> int:
    sizes: dict[int, int] = {}
    total = peak = 0
    for name, *fields in rows:
        if name == "Allocated":
            sizes[fields[0]] = fields[1]
            total += fields[1]
        elif name == "Freed":
            total -= sizes.pop(fields[0])
        elif name == "Marked" and fields[1] < 3:
            peak = 0
        peak = max(peak, total)
    return peak


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
