"""What a probe trains: the training with its phases, the libraries that it loads, and the world of
ranks that it joins.

Ranks must take the same steps, or one of them waits for ever in a collective. So the ranks decide
together whatever a rank would decide by its own clock.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, distributed, nn

from planner.core.schema.record import Phase
from planner.core.schema.setting import DEEPSPEED
from planner.training import assembly
from planner.training.assembly import add_recipe
from planner.training.step import Training
from planner.training.tasks import task_for
from search.probe.protocol import ProbeRequest, RankPlace, backend_of
from search.probe.worker.verdict import NonFiniteError


class WatchedTraining(Training):
    """A training that can check its losses. While it is `watching`, each check waits for the
    device."""

    watching = False

    def check_loss_value(self, loss: Tensor) -> None:
        if self.watching and not torch.isfinite(loss.detach()).item():
            raise NonFiniteError(f"the loss is {loss.item()}")


@dataclass
class StepPhases:
    """Follows the phases of a step: a call with the phase that ended sets `current` to the next
    one, and passes it to `announce`."""

    accumulate: int = 1
    announce: Callable[[Phase], None] | None = None
    current: Phase = "forward"
    _micro_steps: int = 0

    def __call__(self, ended: Phase) -> None:
        self.current = self._next(ended)
        if self.announce is not None:
            self.announce(self.current)

    def _next(self, ended: Phase) -> Phase:
        if ended == "forward":
            return "backward"
        if ended == "backward":
            self._micro_steps += 1
            return "forward" if self._micro_steps < self.accumulate else "optimizer"
        self._micro_steps = 0
        return "zero_grad" if ended == "optimizer" else "forward"


def load_libraries(request: ProbeRequest) -> None:
    """Starts threads and loads the code that any training needs, before memory is first read. The
    first optimizer of a process imports a hundred megabytes of torch._dynamo."""
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
    """Builds the module of the request on its device, with its optimizer, batch and compiler."""
    setting, device = add_recipe(request.model, request.setting), torch.device(request.device)
    task = task_for(request.model, setting)
    return assembly.build_training(WatchedTraining, task, request.model, setting, device)


# Longer than any probe: a rank that waits is ended by the tuner's deadline, not by a collective's.
_TIMEOUT = timedelta(days=7)


def join_world(request: ProbeRequest, place: RankPlace) -> Any:
    """Makes this process a rank of its world. Returns the process group by which ranks agree. It
    uses gloo, beside the device's own queue, so that no rank waits for a device because of it."""
    is_cpu, size = request.device == "cpu", request.setting.world_size
    # In containers a machine's name may not resolve to itself. All ranks are on this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        backend_of(request.device),
        store=distributed.FileStore(place.store, size),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=None if is_cpu else torch.device(request.device),
    )
    return distributed.new_group(backend="gloo", timeout=_TIMEOUT)


def is_so_on_any(group: Any, flag: bool) -> bool:
    """Whether `flag` is true on any rank of the group; a group of None is this process only."""
    if group is None:
        return flag
    result = torch.tensor(float(flag))
    distributed.all_reduce(result, distributed.ReduceOp.MAX, group=group)
    return bool(result)
