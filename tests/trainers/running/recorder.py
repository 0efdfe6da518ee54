"""What each step of a training learned from: imported by its script before all else.

RECORD gets a JSON object when the process ends, or is killed: with STOP at the start of the step of
that number, counted from 0. A step's `losses` are the mean losses of its micro-batches, and `given`
is the sum of what `backward` was called with.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
from pathlib import Path
from typing import Any

from planner.libraries.missing_operators import declare_missing_operators

declare_missing_operators()
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

RECORD: dict[str, Any] = {"steps": [], "validated": 0, "workers": set(), "clips": set()}
_losses: list[float] = []
_given: list[float] = []
_model: list[nn.Module] = []


def cross_entropy(logits: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    loss = _cross_entropy(logits, targets, *args, **kwargs)
    if torch.is_grad_enabled():
        summed = kwargs.get("reduction") == "sum"
        _losses.append(float(loss.detach()) / (len(logits) if summed else 1))
        RECORD["soft"] = targets.is_floating_point()
    return loss


def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
    _given.append(float(self.detach()))
    _backward(self, *args, **kwargs)


def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
    RECORD["clips"].add(float(max_norm))
    return _clip(parameters, max_norm, *args, **kwargs)


def before_forward(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not torch.is_grad_enabled() and isinstance(module, nn.Conv2d) and module.in_channels == 3:
        RECORD["validated"] += len(inputs[0])
    if not _model and any(isinstance(inner, nn.Conv2d) for inner in module.modules()):
        _model.append(module)


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if len(RECORD["steps"]) == int(os.environ.get("STOP", "-1")):
        write()
        os._exit(0)


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Lightning's step begins with its last backward."""
    rate = max(float(group["lr"]) for group in optimizer.param_groups)
    RECORD["steps"].append({"rate": rate, "losses": list(_losses), "given": sum(_given)})
    _losses.clear()
    _given.clear()
    names = {p: name for name, p in _model[0].named_parameters()}
    RECORD["decayed"] = {
        names[p]: group["weight_decay"]
        for group in optimizer.param_groups for p in group["params"] if group["weight_decay"]
    }  # fmt: skip


def write() -> None:
    """DeepSpeed clips by a function of its own."""
    RECORD["clips"] |= {
        made.gradient_clipping() for made in gc.get_objects()
        if type(made).__name__ == "DeepSpeedEngine"
    }  # fmt: skip
    Path(os.environ["RECORD"]).write_text(json.dumps(RECORD, default=sorted))


_cross_entropy, F.cross_entropy = F.cross_entropy, cross_entropy
_backward, Tensor.backward = Tensor.backward, backward  # type: ignore[method-assign]
_clip, torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_, clip_grad_norm_
nn.modules.module.register_module_forward_pre_hook(before_forward)
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
atexit.register(write)
