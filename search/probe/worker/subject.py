"""What a probe trains: a module with its optimizer, its batch and its compiler; and the phases that
its step goes through."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from planner.core.schema.setting import DEEPSPEED
from planner.libraries.limits import setting_limit, trained_limit
from planner.training import building
from planner.training.building import recipe_of
from planner.training.step import Training
from planner.training.tasks import task_for
from search.probe.protocol import ProbeRequest
from search.probe.worker.verdict import NonFiniteError


class WatchedTraining(Training):
    """A training whose losses can be looked at; looking waits for the device."""

    watching = False

    def look_at(self, loss: Tensor) -> None:
        if self.watching and not torch.isfinite(loss.detach()).item():
            raise NonFiniteError(f"the loss is {loss.item()}")


@dataclass
class StepPhases:
    """Names the phase that is running, told of each that has ended. `announce` hears each begin."""

    accumulate: int = 1
    announce: Callable[[str], None] | None = None
    current: str = "forward"
    _micro_steps: int = 0

    def __call__(self, ended: str) -> None:
        self.current = self._next(ended)
        if self.announce is not None:
            self.announce(self.current)

    def _next(self, ended: str) -> str:
        if ended == "forward":
            return "backward"
        if ended == "backward":
            self._micro_steps += 1
            return "forward" if self._micro_steps < self.accumulate else "optimizer"
        self._micro_steps = 0
        return "zero_grad" if ended == "optimizer" else "forward"


def refuse_unsupported(request: ProbeRequest) -> None:
    """Raise UnsupportedError for settings that a probe cannot stand for."""
    setting = request.setting
    fault = trained_limit(request.model, setting) or setting_limit(setting)
    if fault is not None:
        raise fault.error()


def touch_libraries(request: ProbeRequest) -> None:
    """Start threads and load the code that any training needs, before memory is first read.

    (The first optimizer of a process imports a hundred megabytes of torch._dynamo.)
    """
    layers = nn.Sequential(nn.Conv2d(3, 8, 2), nn.GELU(), nn.Flatten(), nn.Linear(72, 8))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.randn(64, 3, 4, 4)).logsumexp(1).sum().backward()
    optimizer.step()
    torch.ones(1 << 20).sum()
    if request.setting.compiles:
        importlib.import_module("torch._inductor.compile_fx")
    if request.setting.parallelism in DEEPSPEED and find_spec("deepspeed") is not None:
        from planner.training.zero import import_deepspeed

        import_deepspeed(torch.device(request.device).type)


def build_training(request: ProbeRequest) -> WatchedTraining:
    """The module of the request on its device, with its optimizer, its batch and its compiler."""
    setting, device = recipe_of(request.model, request.setting), torch.device(request.device)
    task = task_for(request.model, setting)
    return building.build_training(WatchedTraining, task, request.model, setting, device)
