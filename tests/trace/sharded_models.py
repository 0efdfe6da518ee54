"""A small model in blocks, and what a real rank of gloo allocates for it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.core.schema import FactoryModel, TrainSetting

IMAGES = FactoryModel(factory="tests:none", image_size=(16, 16), num_classes=10)
WIDTH, BLOCKS = 64, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(nn.functional.gelu(self.fc1(x)))
        return out


class Blocks(nn.Module):
    """Tokens of 4 x 4 patches through a few blocks; nothing but matrix products and GELU."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(48, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.reshape(-1, 16, 48))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.sum(1))
        return logits


def measure_rank(rank: int, setting: TrainSetting, folder: Path) -> None:
    """One real rank under gloo: writes the sizes of what it allocated in the steady step."""
    from torch import distributed

    from planner.ledger.ledger import Allocated, Marked
    from tests.cpu_memory import measure_cpu_memory_events

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=setting.world_size,
        timeout=timedelta(seconds=60),
    )
    trace = measure_cpu_memory_events(Blocks, IMAGES, setting, num_steps=3)
    sizes: list[str] = []
    for event in trace.events:
        if isinstance(event, Marked) and (event.phase, event.step) == ("zero_grad", 1):
            sizes.clear()
        if isinstance(event, Allocated):
            sizes.append(f"{event.num_bytes} {event.label}")
    (folder / f"rank{rank}").write_text("\n".join(sizes))
    distributed.destroy_process_group()
