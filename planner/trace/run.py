"""A real module trained for two steps on fake tensors: what it allocates, in order."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.schema import FactoryModel, SwinConfig, TrainSetting
from planner.step.ledger import Allocated, Event, Freed, Marked
from planner.trace.building import build_module, make_fake
from planner.trace.cuda_rules import as_on_cuda
from planner.trace.recorder import Recorder
from planner.trace.sums import GradientSums
from planner.training import Training, make_batch

Build = Callable[[], nn.Module]
ROUNDING = 512  # bytes: what the CUDA caching allocator rounds a request up to


def rounded(num_bytes: int) -> int:
    """The bytes that a request of `num_bytes` holds: the next multiple of 512."""
    return -(-num_bytes // ROUNDING) * ROUNDING


@dataclass(frozen=True)
class Trace:
    """What building a model and training it for `num_steps` optimizer steps allocates and frees."""

    events: tuple[Event, ...]
    num_parameters: int
    num_steps: int

    def live(self) -> Iterator[tuple[Event, int]]:
        """Each event with the live bytes after it, every request rounded up to 512 B."""
        sizes: dict[int, int] = {}
        total = 0
        for event in self.events:
            if isinstance(event, Allocated):
                sizes[event.storage] = rounded(event.num_bytes)
                total += sizes[event.storage]
            elif isinstance(event, Freed):
                total -= sizes.pop(event.storage)
            yield event, total

    def phase_ends(self, step: int | None = None) -> list[tuple[str, int]]:
        """(phase, live bytes at its end) of optimizer step `step` (None: the last), in order."""
        step = self.num_steps - 1 if step is None else step
        return [
            (event.phase, total)
            for event, total in self.live()
            if isinstance(event, Marked) and event.step == step and event.phase != "build"
        ]

    def peak_live_bytes(self, step: int | None = None) -> int:
        """Most bytes alive at once in optimizer step `step` (the last when None)."""
        step = self.num_steps - 1 if step is None else step
        peak = start = 0
        for event, total in self.live():
            peak = max(peak, total)
            if isinstance(event, Marked):
                if event.step == step and event.phase == "zero_grad":
                    return max(peak, start)
                if event.phase in ("build", "zero_grad"):
                    peak = start = total
        raise ValueError(f"the trace has no step {step}")

    def saved_bytes(self) -> int:
        """Live at the end of the first forward of the steady step, less live before it."""
        before = 0
        for event, total in self.live():
            if isinstance(event, Marked):
                if event.step == self.num_steps - 1 and event.phase == "forward":
                    return total - before
                before = total
        raise ValueError("the trace has no forward")


def trace_training(
    build: Build,
    model: SwinConfig | FactoryModel,
    setting: TrainSetting,
    num_steps: int = 2,
    gradient_sums: GradientSums = "out_of_place",
) -> Trace:
    """Runs `Training.step` of the module that `build` makes on fake tensors; records storages."""
    recorder = Recorder(gradient_sums)
    module = build_module(build, setting)
    with collector_off(), FakeTensorMode(allow_non_fake_inputs=True) as mode, as_on_cuda():
        make_fake(module, mode)
        num_parameters = sum(p.numel() for p in module.parameters())
        add_module(recorder, module)
        with recorder, scaler_as_on_cuda():
            images, targets = make_batch(model, setting, torch.device("cpu"))
            training = Training(module, setting, images, targets)
            watch_optimizer(recorder, training)
            recorder.mark("build", 0)
            for step in range(num_steps):
                training.step(lambda phase, step=step: recorder.mark(phase, step))  # type: ignore[misc]
        events = tuple(recorder.events)
        del module, training, images, targets, mode
    return Trace(events, num_parameters, num_steps)


def add_module(recorder: Recorder, module: nn.Module) -> None:
    """Parameters and buffers in the order in which `module.to(device)` would allocate them."""
    for child in module.children():
        add_module(recorder, child)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            recorder.add(parameter, name)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            recorder.add(buffer, name)


def watch_optimizer(recorder: Recorder, training: Training) -> None:
    """`step` scalars stay on the host unless the implementation is fused or capturable."""
    on_device = any(g.get("fused") or g.get("capturable") for g in training.optimizer.param_groups)
    if on_device:
        return

    def enter(*_: Any) -> None:
        recorder.host_storages = True

    def leave(*_: Any) -> None:
        recorder.host_storages = False

    training.optimizer.register_step_pre_hook(enter)
    training.optimizer.register_step_post_hook(leave)


@contextlib.contextmanager
def scaler_as_on_cuda() -> Iterator[None]:
    """GradScaler takes its step whatever it found: no value of a fake tensor can be read."""
    original = torch.amp.GradScaler._maybe_opt_step

    def take_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    torch.amp.GradScaler._maybe_opt_step = take_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler._maybe_opt_step = original  # type: ignore[method-assign]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Lifetimes must be those of reference counts: the cyclic collector would hide a leak."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
