"""What a training really does, written down from inside its process and ended after two steps.

`python spy.py train.py ARGUMENTS` runs a trainer's script under it; a script of our own imports it
first. At the start of the third optimizer step SPY_REPORT (with the rank behind it) gets a JSON
object, and the process ends. It imports nothing of the planner but what lets torchvision import.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from planner.libraries.missing_operators import declare_missing_operators

declare_missing_operators()
import torch  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader  # noqa: E402

faulthandler.register(signal.SIGUSR1)  # to say where it stands
STEPS = 2
SEEN: dict[str, Any] = {
    "images": [0], "micro_batches": [0], "checkpoints": 0, "sdpa": 0, "losses": [], "clips": [],
    "compiles": [], "averaged": 0, "validation_batches": [], "autocast": None, "saved_bytes": None,
    "steps": [], "drop_path": 0.0, "offloads": False, "loaders": [],
}  # fmt: skip
_outermost: list[nn.Module] = []
_trained: list[nn.Module] = []  # the model
_recording: dict[int, int] | None = None
_kept: set[int] = set()
_optimizers: list[torch.optim.Optimizer] = []  # of each weight one, where they step in backward


def count(where: str, name: str, key: str) -> None:
    """Counts calls of a function under SEEN[key]."""
    place = sys.modules[where]
    original = getattr(place, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        SEEN[key] += torch.is_grad_enabled()  # and not while it validates
        return original(*args, **kwargs)

    setattr(place, name, counted)


def before_forward(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not _outermost and torch.is_grad_enabled() and _trains(module):
        _start_recording(module)
    _outermost.append(module)
    if isinstance(module, nn.Conv2d) and module.in_channels == 3 and inputs[0].ndim == 4:
        _see_images(module, inputs[0])
    if type(module).__name__.endswith(("DropPath", "StochasticDepth")):
        _see_drop_path(module)
    if type(module).__name__.endswith(("CrossEntropy", "SmoothLoss", "CrossEntropyLoss")):
        soft = " soft" if inputs[1].is_floating_point() else ""
        smoothing = getattr(module, "smoothing", getattr(module, "label_smooth_val", None))
        _see_loss(type(module).__name__ + soft, smoothing)


def _trains(module: nn.Module) -> bool:
    """Whether any of it is in training mode: Lightning leaves DDP's own module as it validated."""
    return any(part.training for part in module.modules())


def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
    while _outermost and _outermost.pop() is not module:
        pass
    if isinstance(module, nn.Linear) and SEEN["saved_bytes"] is None:  # no second forward yet
        SEEN["classes"] = module.out_features


def _see_images(module: nn.Module, images: Tensor) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    SEEN["autocast"] = (
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
    )
    # The model's mode, not the layer's: frozen stages hold the patch embedding in eval mode.
    if not (_trains(_outermost[0]) and torch.is_grad_enabled()):
        SEEN["validation_batches"].append(len(images))
        return
    _kept.add(images.untyped_storage().data_ptr())  # the batch is nobody's to save
    SEEN["images"][-1] += len(images)
    SEEN["micro_batches"][-1] += 1


def _see_drop_path(module: nn.Module) -> None:
    found = [getattr(module, name, None) for name in ("drop_prob", "rate", "p")]
    rate = next(float(r) for r in found if r is not None)
    SEEN["drop_path"] = max(SEEN["drop_path"], round(rate, 6))


def _see_loss(name: str, smoothing: float | None) -> None:
    if torch.is_grad_enabled():
        SEEN["losses"].append([name, smoothing])


def _start_recording(module: nn.Module) -> None:
    """Once: what the first micro-batch keeps for backward, without parameters and buffers."""
    global _recording
    if _recording is not None:
        return
    if not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        return
    _trained.append(module)
    _recording = {}
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    SEEN["offloads"] = hooks is not None and "offload_activations" in hooks[0].__qualname__
    # Of a sharded weight, its own part.
    weights = [getattr(p, "_local_tensor", p) for p in (*module.parameters(), *module.buffers())]
    _kept.update(weight.untyped_storage().data_ptr() for weight in weights)
    torch._C._autograd._push_saved_tensors_default_hooks(_pack, lambda tensor: tensor)


def _pack(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if _recording is not None and storage.data_ptr() not in _kept:
        _recording[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
    return tensor


def _stop_recording() -> None:
    if _recording is not None and SEEN["saved_bytes"] is None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        SEEN["saved_bytes"] = sum(_recording.values())


def watch_backward() -> None:
    original = Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        _stop_recording()
        original(self, *args, **kwargs)

    Tensor.backward = backward  # type: ignore[method-assign]


def watch_loss() -> None:
    original = F.cross_entropy

    def cross_entropy(logits: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        soft = "soft" if targets.is_floating_point() else "hard"
        _see_loss(f"cross_entropy {soft}", kwargs.get("label_smoothing", 0.0))
        return original(logits, targets, *args, **kwargs)

    F.cross_entropy = cross_entropy


def watch_clipping() -> None:
    from torch.nn.utils import clip_grad

    original = clip_grad.clip_grad_norm_

    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        if max_norm != float("inf"):  # that only asks for the norm
            SEEN["clips"].append(float(max_norm))
        return original(parameters, max_norm, *args, **kwargs)

    clip_grad.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


def watch_loading() -> None:
    """How each DataLoader that is really gone through was made; the first is the training's."""
    original = DataLoader.__iter__

    def iterate(self: DataLoader[Any]) -> Any:
        SEEN["loaders"].append({
            "workers": self.num_workers, "prefetch_factor": self.prefetch_factor,
            "pin_memory": self.pin_memory, "persistent_workers": self.persistent_workers,
        })  # fmt: skip
        return original(self)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]


def watch_compiling() -> None:
    """Which calls ask for compiled code; whether they get it is torch's matter."""
    original, method = torch.compile, nn.Module.compile

    def compiled(model: Any = None, **kwargs: Any) -> Any:
        if isinstance(model, nn.Module):  # and not adamw-8bit's update
            SEEN["compiles"].append({k: kwargs.get(k) for k in ("mode", "dynamic", "backend")})
        return original(model, **kwargs)

    def compiled_in_place(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        SEEN["compiles"].append({k: kwargs.get(k) for k in ("mode", "dynamic", "backend")})
        method(self, *args, **kwargs)

    torch.compile = compiled  # type: ignore[assignment]
    nn.Module.compile = compiled_in_place  # type: ignore[method-assign]


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if all(optimizer is not known for known in _optimizers):
        _optimizers.append(optimizer)
    if optimizer is not _optimizers[0]:
        return
    if len(SEEN["steps"]) == STEPS:
        finish()
    groups = [
        {
            k: float(v) if isinstance(v, Tensor) else v  # torchao's rate is a tensor
            for k, v in group.items()
            if isinstance(v, int | float | bool | tuple | Tensor | None)
        }
        for group in optimizer.param_groups
    ]
    SEEN["steps"].append({"rate": groups[0]["lr"], "groups": groups})


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer is not _optimizers[0]:
        return
    if len(SEEN["steps"]) < STEPS:
        SEEN["images"].append(0)
        SEEN["micro_batches"].append(0)
    else:  # what comes now is the third step's, or validation
        SEEN["kept"] = {k: list(SEEN[k]) for k in ("images", "micro_batches")}
        SEEN["checkpoints_kept"], SEEN["sdpa_kept"] = SEEN["checkpoints"], SEEN["sdpa"]
        SEEN["clips_kept"] = list(SEEN["clips"])


def finish() -> None:
    """Writes the report and ends the process."""
    world = write_report()
    wait_for_reports(world)
    os._exit(0)


def write_report() -> int:
    """How many ranks there are."""
    parameters = [p for o in _optimizers for group in o.param_groups for p in group["params"]]
    report = {
        **{k: v for k, v in SEEN.items() if not k.endswith("kept")},
        **SEEN.get("kept", {}),
        **{k: SEEN[f"{k}_kept"] for k in ("checkpoints", "sdpa", "clips") if f"{k}_kept" in SEEN},
        "losses": [
            *(list(kind) for kind in dict.fromkeys(map(tuple, SEEN["losses"]))),
        ],
        "num_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "decays": decays(),
        "parameter_dtype": str(parameters[0].dtype),
        "benchmark": torch.backends.cudnn.benchmark,
        "averages": [
            [type(o).__name__, getattr(o, "decay", getattr(o, "momentum", None))]
            for o in gc.get_objects()
            if type(o).__name__ in ("ModelEmaV3", "ExponentialMovingAverage")
        ],
        "world": int(os.environ.get("WORLD_SIZE", "1")),
    }  # fmt: skip
    rank = os.environ.get("RANK", "0")
    Path(f"{os.environ['SPY_REPORT']}.{rank}").write_text(json.dumps(report, default=str))
    return int(report["world"])


def decays() -> dict[str, tuple[float, int]]:
    """name of a trained weight -> (its decay, its number of dimensions)"""
    names = {p: name for model in _trained for name, p in model.named_parameters()}
    return {
        names[p]: (float(group.get("weight_decay", 0.0)), p.dim())
        for o in _optimizers for group in o.param_groups for p in group["params"]
        if p.requires_grad and p in names
    }  # fmt: skip


def wait_for_reports(world: int) -> None:
    """Returns when every rank has written its report: one that lost a peer would write none. The
    deadline is of whoever started the ranks."""
    reports = [Path(f"{os.environ['SPY_REPORT']}.{rank}") for rank in range(world)]
    while not all(report.exists() for report in reports):
        time.sleep(0.05)


def posterize_as_pillow_12() -> None:
    """timm's RandAugment leaves no bits at times, which Pillow 13 refuses; the files ask for one
    before it."""
    from PIL import Image, ImageOps

    original = ImageOps.posterize

    def posterize(image: Image.Image, bits: int) -> Image.Image:
        return original(image, bits) if bits > 0 else image.point(lambda value: 0)

    ImageOps.posterize = posterize


def install() -> None:
    count("torch.utils.checkpoint", "checkpoint", "checkpoints")
    count("torch.nn.functional", "scaled_dot_product_attention", "sdpa")
    average = torch._foreach_lerp_

    def averaged(mine: Any, others: Any, weight: Any) -> Any:
        SEEN["averaged"] += isinstance(weight, float) and weight < 1e-3  # else Adam's moments
        return average(mine, others, weight)

    torch._foreach_lerp_ = averaged
    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    torch.nn.modules.module.register_module_forward_hook(after_forward)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    posterize_as_pillow_12()
    for watch in (watch_backward, watch_loss, watch_clipping, watch_compiling, watch_loading):
        watch()


install()

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
