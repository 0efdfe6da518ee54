"""What a probe trains: a module with its optimizer, its batch and its compiler."""

from __future__ import annotations

import importlib
import random
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from planner.core.errors import UnsupportedError
from planner.core.schema import SwinConfig
from planner.core.schema.distribution import DEEPSPEED
from planner.libraries.limits import setting_limit, trained_limit
from planner.training.parallel.spreading import spread_as_set
from planner.training.step import Training, lay_out
from planner.training.tasks import task_for
from planner.training.tasks.blocks import blocks_to_shard, checkpoint_as_set
from planner.training.tasks.compiling import compile_as_set
from search.probe.protocol import ProbeRequest
from search.probe.worker.precision import check_matrix_units, set_precision
from search.probe.worker.verdict import NonFiniteError


class WatchedTraining(Training):
    """A training whose losses can be looked at; looking waits for the device."""

    watching = False

    def loss(self) -> Tensor:
        loss = super().loss()
        if self.watching and not torch.isfinite(loss.detach()).item():
            raise NonFiniteError(f"the loss is {loss.item()}")
        return loss


def refuse_unsupported(request: ProbeRequest) -> None:
    """Raise UnsupportedError for settings that a probe cannot stand for."""
    setting = request.setting
    if setting.validation_batch_size:
        raise UnsupportedError(
            "a probe times only training steps, and validation_batch_size is "
            f"{setting.validation_batch_size}.",
            "Probe with validation_batch_size 0.",
        )
    fault = trained_limit(request.model, setting) or setting_limit(setting)
    if fault is not None:
        raise fault.error()
    check_matrix_units(request)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


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
        from planner.training.parallel.zero import import_deepspeed

        import_deepspeed(torch.device(request.device).type)


def build_training(request: ProbeRequest) -> WatchedTraining:
    """The module of the request on its device, with its optimizer, its batch and its compiler.

    Its code, a user's not least, may have set a precision of its own while it was loaded.
    """
    setting = request.setting.with_recipe(isinstance(request.model, SwinConfig))
    device = torch.device(request.device)
    task = task_for(request.model, setting)
    module = task.module().train()
    checkpoint_as_set(module, task, request.model, setting)
    set_precision(request)
    dtype = torch.bfloat16 if setting.precision == "pure-bf16" else None
    module = module.to(device=device, dtype=dtype)
    lay_out(module, setting)
    blocks = partial(blocks_to_shard, module, task, request.model)
    spread = spread_as_set(module, blocks, setting, device)
    whole = module if spread is None else spread.module
    by_block = setting.compile_scope == "blocks"
    compiled = compile_as_set(module if by_block else whole, task, request.model, setting)
    called = whole if compiled is None or by_block else compiled
    batch = task.batch(setting.batch_size, device)
    return WatchedTraining(module, setting, task, batch, called, spread)
