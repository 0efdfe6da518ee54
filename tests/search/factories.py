"""Models with faults, for probes: each is a `package.module:factory` of a user's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.search.probes import CLASSES


class Tiny(nn.Module):
    """Images [B, 3, 16, 16] to logits [B, 10]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        tokens = tokens + self.mlp(self.norm(tokens))
        logits: Tensor = self.head(tokens.mean(1))
        return logits


class Faulty(Tiny):
    """Does `act` in its forward, or in its backward."""

    def __init__(self, act: Callable[[], object], in_backward: bool = False) -> None:
        super().__init__()
        self.act, self.in_backward = act, in_backward

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if self.in_backward:
            logits.register_hook(lambda gradient: self.act() and None)
        else:
            self.act()
        return logits


def take_all_memory() -> None:
    """Ask for tensors until there is no more; under a cap this is soon."""
    held = []
    for _ in range(4096):
        held.append(torch.ones(1 << 22))


def out_of_memory_in_backward() -> nn.Module:
    return Faulty(take_all_memory, in_backward=True)


def rank_1_holds_more() -> nn.Module:
    module = Tiny()
    if torch.distributed.get_rank() == 1:
        module.held = torch.ones(1 << 24)  # type: ignore[assignment]  # 64 MiB
    return module


class OneLargeWeight(Tiny):
    """Fits forward and backward under a cap of 3 times the weight, but not Adam's two states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 24))  # 64 MiB

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.weight.sum()


def kill_itself() -> nn.Module:
    return Faulty(lambda: os.kill(os.getpid(), signal.SIGKILL))


class NoLogits(Tiny):
    """Returns a dictionary, as detectors do."""

    def forward(self, images: Tensor) -> Tensor:
        return {"loss": super().forward(images)}  # type: ignore[return-value]


def leave_children_and_hang() -> nn.Module:
    """A forked child, one in a session of its own that ignores SIGTERM, and a grandchild."""
    sleeper = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork(); time.sleep(600)"
    )
    subprocess.Popen([sys.executable, "-S", "-c", sleeper], start_new_session=True)
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return Faulty(lambda: time.sleep(600))


class NotANumber(Tiny):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * float("nan")


def raises() -> nn.Module:
    raise ValueError("the checkpoint is not there")


def no_module() -> object:
    return "a string"


def exits() -> nn.Module:
    sys.exit(3)


def ask_precision() -> None:
    """As Inductor does where it chooses between kernels."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest" or torch.backends.cudnn.allow_tf32:
        raise ValueError(f"fp32 is {precision}, and cuDNN's is TF32")


def sets_tf32_anew() -> nn.Module:
    """A user who sets TF32 by the API of torch 2.9, for everything and for matmul."""
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    return Faulty(ask_precision)


def sets_tf32_of_old() -> nn.Module:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    return Faulty(ask_precision)
