"""Models with faults, for probes: each is a `package.module:factory` of a user's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.search.probes import CLASSES

Act = Callable[[], object]


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


def tiny() -> nn.Module:
    return Tiny()


class _Backward(torch.autograd.Function):
    """The identity, whose backward does `act`."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor, act: object) -> Tensor:
        ctx.act = act  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()  # type: ignore[attr-defined]
        return gradient, None


class Faulty(Tiny):
    """Does `act` in the `call`-th forward (0-based), or in its backward."""

    def __init__(self, act: Act, call: int = 0, in_backward: bool = False) -> None:
        super().__init__()
        self.act, self.call, self.in_backward, self.calls = act, call, in_backward, 0

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if self.calls == self.call:
            if self.in_backward:
                logits = _Backward.apply(logits, self.act)  # type: ignore[no-untyped-call]
            else:
                self.act()
        self.calls += 1
        return logits


def take_all_memory() -> None:
    """Ask for tensors until there is no more; under a cap this is soon."""
    held = []
    for _ in range(4096):
        held.append(torch.ones(1 << 22))


def out_of_memory_in_forward() -> nn.Module:
    return Faulty(take_all_memory)


def out_of_memory_in_backward() -> nn.Module:
    return Faulty(take_all_memory, in_backward=True)


def on_rank_1(act: Act, call: int = 0, in_backward: bool = False) -> nn.Module:
    """One rank of a world that does `act`; the others train."""
    is_it = torch.distributed.get_rank() == 1
    return Faulty(act if is_it else lambda: None, call, in_backward)


def rank_1_out_of_memory() -> nn.Module:
    return on_rank_1(take_all_memory)


def rank_1_is_killed() -> nn.Module:
    return on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL), in_backward=True)


def rank_1_exits() -> nn.Module:
    return on_rank_1(lambda: os._exit(0), call=1)


def rank_1_hangs() -> nn.Module:
    return on_rank_1(lambda: time.sleep(600))


def rank_1_raises() -> nn.Module:
    def act() -> None:
        raise ValueError("the fault of rank 1")

    return on_rank_1(act, call=1, in_backward=True)


def rank_1_loses_the_others() -> nn.Module:
    """It says at once that others are gone, as ranks do whose neighbour is killed."""

    def act() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    return on_rank_1(act)


class Slow(Tiny):
    """Takes longer for a forward on rank 1."""

    def forward(self, images: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.3)
        return super().forward(images)


def rank_1_is_slow() -> nn.Module:
    return Slow()


def rank_1_holds_more() -> nn.Module:
    module = Tiny()
    if torch.distributed.get_rank() == 1:
        module.held = torch.ones(1 << 24)  # type: ignore[assignment]  # 64 MiB
    return module


def out_of_memory_in_late_forward() -> nn.Module:
    """After the warm-up, among the timed steps."""
    return Faulty(take_all_memory, call=4)


class OneLargeWeight(Tiny):
    """Fits forward and backward under a cap of 3 times the weight, but not Adam's two states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 24))  # 64 MiB

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.weight.sum()


def out_of_memory_in_optimizer() -> nn.Module:
    return OneLargeWeight()


def segmentation_fault() -> nn.Module:
    return Faulty(lambda: ctypes.string_at(0), in_backward=True)


def abort() -> nn.Module:
    return Faulty(os.abort)


def kill_itself() -> nn.Module:
    return Faulty(lambda: os.kill(os.getpid(), signal.SIGKILL))


def exit_quietly() -> nn.Module:
    return Faulty(lambda: os._exit(0))


def hang_in_build() -> nn.Module:
    time.sleep(600)
    return Tiny()


def hang_in_forward() -> nn.Module:
    return Faulty(lambda: time.sleep(600))


def hang_while_timed() -> nn.Module:
    return Faulty(lambda: time.sleep(600), call=4)


def hang_and_ignore_sigterm() -> nn.Module:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Faulty(lambda: time.sleep(600))


def hang_at_the_end() -> nn.Module:
    """The answer is told, and the process does not end."""
    os._exit = lambda status: time.sleep(600)  # type: ignore[assignment, misc]
    return Tiny()


def _write_much() -> None:
    """64 MiB on standard output and as much on standard error."""
    line = b"x" * 1023 + b"\n"
    for _ in range(1 << 16):
        os.write(1, line)
        os.write(2, line)


def flood() -> nn.Module:
    """Much output, then a thread that goes on with it."""

    def write_for_ever() -> None:
        while True:
            os.write(1, b"x" * 1024)
            time.sleep(0.0001)

    threading.Thread(target=write_for_ever, daemon=True).start()
    return Faulty(_write_much)


def flood_and_abort() -> nn.Module:
    def act() -> None:
        _write_much()
        os.abort()

    return Faulty(act)


def _write_on_every_channel() -> None:
    """Garbage on every file descriptor that is open for writing, among them the result channel."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        fd = int(name)
        if fd > 2:
            with contextlib.suppress(OSError):
                os.write(fd, b'{"format": 1, "type": "outcome", \xff garbage')


def write_on_every_channel() -> nn.Module:
    return Faulty(_write_on_every_channel)


def write_on_every_channel_and_exit() -> nn.Module:
    def act() -> None:
        _write_on_every_channel()
        os._exit(0)

    return Faulty(act)


class NoLogits(Tiny):
    """Returns a dictionary, as detectors do."""

    def forward(self, images: Tensor) -> Tensor:
        return {"loss": super().forward(images)}  # type: ignore[return-value]


def no_logits() -> nn.Module:
    return NoLogits()


def leave_children() -> nn.Module:
    """A forked child, one in a session of its own that ignores SIGTERM, and a grandchild."""
    sleeper = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork(); time.sleep(600)"
    )
    subprocess.Popen([sys.executable, "-S", "-c", sleeper], start_new_session=True)
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return Tiny()


def leave_compile_workers() -> nn.Module:
    """A process under the name of Inductor's, one that it forks, and one that it executes."""
    command = (
        "import os, subprocess, sys, time; os.fork(); subprocess.Popen(['sleep', '600']).wait()"
    )
    file = "/site-packages/torch/_inductor/compile_worker/__main__.py"
    subprocess.Popen([sys.executable, "-S", "-c", command, file, "--workers=2"])
    return Tiny()


def leave_children_and_hang() -> nn.Module:
    leave_children()
    return Faulty(lambda: time.sleep(600))


class NotANumber(Tiny):
    """The loss is NaN from the `call`-th forward on."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        logits = super().forward(images)
        return logits * float("nan") if self.calls > self.call else logits


def nan_at_once() -> nn.Module:
    return NotANumber(0)


def nan_while_timed() -> nn.Module:
    return NotANumber(3)


def raises() -> nn.Module:
    raise ValueError("the checkpoint is not there")


def prints() -> nn.Module:
    print("hello from the factory")
    print('{"format": 1, "type": "outcome", "status": "crashed"}')
    return Tiny()


def no_module() -> object:
    return "a string"


def exits() -> nn.Module:
    sys.exit(3)


def compile_fails() -> nn.Module:
    """A compiler's backend that raises as one of its passes would."""
    from torch._inductor import config

    def failing_pass(graph: object) -> None:
        raise RuntimeError("this pass does not know the graph")

    config.post_grad_custom_post_pass = failing_pass  # type: ignore[attr-defined]
    config.force_disable_caches = True  # type: ignore[attr-defined]
    return Tiny()


def compile_hangs() -> nn.Module:
    from torch._inductor import config

    config.post_grad_custom_post_pass = lambda graph: time.sleep(600)  # type: ignore[attr-defined]
    config.force_disable_caches = True  # type: ignore[attr-defined]
    return Tiny()


class Recompiling(Tiny):
    """Is another function at each call, as models with a Python counter are."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "0"

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits + 0 * len(self.mode) if self.mode else logits


def recompiles_over_the_limit() -> nn.Module:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 1
    model = Recompiling()

    def change(module: Recompiling, *_: object) -> None:
        module.mode += "0"

    model.register_forward_pre_hook(change)
    return model


class AsksPrecision(Tiny):
    """Asks how fp32 is computed, as Inductor does where it chooses between kernels."""

    def forward(self, images: Tensor) -> Tensor:
        precision = torch.get_float32_matmul_precision()
        if precision != "highest" or torch.backends.cudnn.allow_tf32:
            raise ValueError(f"fp32 is {precision}, and cuDNN's is TF32")
        return super().forward(images)


def sets_tf32_anew() -> nn.Module:
    """A user who sets TF32 by the API of torch 2.9, for everything and for matmul."""
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    return AsksPrecision()


def sets_tf32_of_old() -> nn.Module:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    return AsksPrecision()


def needs_sound_fork() -> nn.Module:
    if torch.cuda._is_in_bad_fork():
        raise ValueError("CUDA cannot be used in this process")
    return Tiny()
