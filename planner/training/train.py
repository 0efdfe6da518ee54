# Written by 'planner emit', which replaces files that begin with this line.
"""Train a model: `python train.py DATA`, or `python train.py --synthetic --steps 20` to try it.

DATA is a folder with train/CLASS/*.jpg and, to validate, val/CLASS/*.jpg. What is trained, and how,
stands in the block below; the rest is the same in every such file. From `prepare` to `Step` it is
what `planner tune` measures and `planner estimate` records.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

# ---- What is trained, and how -------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A batch is that of one device; lengths are in epochs."""

    batch_size: int = 64  # of a micro-batch
    accumulate: int = 1  # micro-batches of an optimizer step
    precision: str = "bf16"  # fp32, tf32, bf16, fp16, pure-bf16, fp8
    attention: str = "library"  # eager, sdpa
    checkpointing: str = "none"  # blocks, blocks:6, blocks:every-2, selective, stages, stages:0,1
    offload: str = "none"  # activations: what backward needs waits in the host's memory
    compile: str = "off"  # a mode of torch.compile
    compile_scope: str = "model"  # blocks: each by itself
    activation_memory_budget: float = 1.0
    memory_format: str = "contiguous"  # channels_last
    cudnn_benchmark: bool = True
    zero_grad_to_none: bool = True
    ema_decay: float = 0.0  # of an average of the weights; 0: none
    world_size: int = 1  # devices
    parallelism: str = "none"  # ddp, fsdp, hsdp
    shard_size: int = 1  # devices that hold one copy of the weights
    gradient_sync: str = "last"  # every: after each micro-batch
    fsdp_reshard: bool = True
    frozen: str = ""  # a regex: weights whose names begin so are not trained
    adapted: str = ""  # a regex: linear layers whose whole names match get adapters
    lora_rank: int = 0
    optimizer: str = "adamw"  # or another of OPTIMIZERS; own: the task's
    implementation: str = "foreach"  # fused, forloop
    optimizer_in_backward: bool = False
    offload_optimizer: str = "none"  # state, state-and-gradients: on the host
    clip_norm: float = 0.0
    learning_rate: float | None = None  # for the images of a whole step
    weight_decay: float = 0.0
    epochs: int = 300
    warmup_epochs: int = 20
    warmup_start: float = 0.001  # of the learning rate
    final_share: float = 0.01  # of the learning rate
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    auto_augment: str = ""  # in timm's words
    erasing: float = 0.0
    interpolation: str = "bilinear"
    crop_share: float = 1.0  # of a validated picture, of which the middle is seen
    height: int = 224
    width: int = 224
    channels: int = 3
    num_classes: int = 1000
    unit: str = "images"
    is_task: bool = False  # build_task() makes module, batches and loss
    validation_batch: int = 64
    pipeline: str = "torchvision"  # timm, own
    workers: int = 8  # of each process
    prefetch_factor: int = 2  # batches of each worker
    pin_memory: bool = True


SETTING = Setting()
FINE_TUNING: dict[str, float] = {}  # options that --pretrained sets


def build_model(pretrained: bool = False) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", pretrained=pretrained)
    return model


def build_task() -> Any:
    """What makes module, batches and loss, where these are not images, classes and logits."""


def task_batches(task: Any, device: torch.device) -> Iterator[Any]:
    """Put your own loader here: it yields SETTING.batch_size items, as task.batch() makes them."""
    while True:
        yield task.batch(SETTING.batch_size, device)


def own_dataset() -> Any:
    """A Dataset to train on, or a DataLoader of one, in the place of pictures in folders."""


# ---- The same in every file from here on --------------------------------------------------------

AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
SHARDED = ("fsdp", "hsdp")
Blocks = Callable[[], Sequence[nn.Module]] | None
Groups = list[dict[str, Any]]


def beside(name: str) -> Any:
    """levers.py and pictures.py, which lie beside this file where a setting needs them."""
    return import_module(f"{__package__}.{name}" if __package__ else name)


def set_up_torch(setting: Setting) -> None:
    """What holds for a whole process. Autocast leaves convolutions that stay fp32 in TF32."""
    torch.set_float32_matmul_precision("high" if setting.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = setting.precision != "fp32"
    torch.backends.cudnn.benchmark = setting.cudnn_benchmark
    torch._functorch.config.activation_memory_budget = setting.activation_memory_budget


# ---- The model and its optimizer ----------------------------------------------------------------


def prepare(
    model: nn.Module, setting: Setting, device: torch.device, blocks: Blocks, to: Any = nn.Module.to
) -> nn.Module:
    """`model` on its device as the setting trains it: what is recomputed, what is frozen, where it
    lies. `blocks` are what its author names so; else they are found."""
    if setting.checkpointing != "none":
        named = blocks() if blocks is not None else None
        beside("levers").checkpoint_model(model, setting.checkpointing, named)
    if setting.frozen or setting.lora_rank:
        adapters = setting.adapted, setting.lora_rank
        beside("levers").freeze_and_adapt(model, setting.frozen, *adapters)
    model = to(model, device, torch.bfloat16 if setting.precision == "pure-bf16" else None)
    if setting.precision == "fp8":
        beside("levers").use_float8(model)
    if setting.memory_format == "channels_last":
        beside("levers").lay_channels_last(model)
    return model


# Of torch, but for Lion, which is timm's, and AdamW in 8 bits, which is torchao's.
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW", "adam": "torch.optim.Adam", "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor", "rmsprop": "torch.optim.RMSprop",
    "nadam": "torch.optim.NAdam", "radam": "torch.optim.RAdam", "lion": "timm.optim.Lion",
    "adamw-8bit": "torchao.optim.AdamW8bit",
}  # fmt: skip
# Parts of the names of weights without decay, in the words of Swin's libraries; beside these what
# has at most one dimension, and biases (microsoft/Swin-Transformer @f82860b, optimizer.py and the
# models' no_weight_decay).
UNDECAYED = ("position_bias", "absolute_pos", "position_embeddings", "cpb_mlp", "logit_scale")


def decay_groups(model: nn.Module, decay: float) -> Groups:
    """Matrices and kernels decay; biases, norms and what stands for positions do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spared = name.endswith("bias") or any(part in name for part in UNDECAYED)
            groups[parameter.dim() > 1 and not spared].append(parameter)
    decays = {True: decay, False: 0.0}
    return [{"params": p, "weight_decay": decays[key]} for key, p in groups.items() if p]


def build_optimizers(groups: Groups, setting: Setting, lr: float) -> list[Optimizer]:
    """One for all weights; with `optimizer_in_backward` one for each, which steps as soon as
    backward has its gradient, and drops that. Each lives as long as it is held here."""
    if not setting.optimizer_in_backward:
        return [make_optimizer(groups, setting, lr)]
    made = []
    for group in groups:
        for weight in group["params"]:
            optimizer = make_optimizer([{**group, "params": [weight]}], setting, lr)
            weight.register_post_accumulate_grad_hook(partial(step_once, weakref.ref(optimizer)))
            made.append(optimizer)
    return made


def step_once(held: weakref.ref[Optimizer], weight: Tensor) -> None:
    optimizer = held()
    assert optimizer is not None, "the optimizers of weights that are trained are kept"
    optimizer.step()
    weight.grad = None


def make_optimizer(groups: Groups, setting: Setting, lr: float) -> Optimizer:
    name, given = setting.optimizer, {"lr": lr}
    if name != "adamw-8bit":
        given["foreach"] = setting.implementation == "foreach"
    if name in ("adamw", "adam", "sgd"):
        given["fused"] = setting.implementation == "fused"
    if name == "sgd":
        given["momentum"] = 0.9
    package, _, kind = OPTIMIZERS[name].rpartition(".")
    make: Any = getattr(import_module(package), kind)
    if setting.offload_optimizer != "none" and groups[0]["params"][0].device.type != "cpu":
        frees = setting.offload_optimizer == "state-and-gradients"
        offload = import_module("torchao.optim").CPUOffloadOptimizer
        make = partial(offload, optimizer_class=make, offload_gradients=frees)
    made: Optimizer = make(groups, **given)
    return made


def build_schedule(optimizer: Optimizer, steps: int, options: argparse.Namespace) -> LambdaLR:
    """A linear warm-up over the first optimizer steps, a fifth at most; then half a cosine."""
    start, final = SETTING.warmup_start, SETTING.final_share
    warmup: int = max(1, min(steps * options.warmup_epochs // options.epochs, steps // 5))

    def rate(step: int) -> float:
        if step < warmup:
            return start + (1 - start) * step / warmup
        share = min(1.0, (step - warmup) / max(1, steps - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))

    return LambdaLR(optimizer, rate)


# ---- Devices and the compiler -------------------------------------------------------------------


def distribute(model: nn.Module, setting: Setting, device: torch.device, blocks: Blocks) -> Any:
    """What is called in the model's place where several devices train it: sharded it is `model`
    itself, of which each block is a unit."""
    if setting.parallelism == "ddp":
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if setting.parallelism in SHARDED:
        copies = setting.world_size // setting.shard_size
        shape = (setting.shard_size,) if copies == 1 else (copies, setting.shard_size)
        found = blocks() if blocks is not None else beside("levers").repeated_blocks(model)
        beside("levers").shard(model, found, device.type, shape, setting.fsdp_reshard)
    return model


def compiled(called: nn.Module, model: nn.Module, setting: Setting, blocks: Blocks) -> Any:
    """What is called in the place of `called`; by itself torch would guess which sizes change."""
    if setting.compile == "off":
        return called
    how: dict[str, Any] = {"mode": setting.compile, "dynamic": False}
    if setting.compile_scope == "model":
        return torch.compile(called, **how)
    found = blocks() if blocks is not None else beside("levers").repeated_blocks(model)
    beside("levers").compile_blocks(found, how)
    return called


# ---- The step -----------------------------------------------------------------------------------


class Step:
    """A model with its optimizers; a call is one optimizer step over `accumulate` micro-batches.

    `loss(call, batch)` is a scalar; `spread` is what `distribute` and `call` what `compiled` made
    of `model`. `losses`, where it is a tensor, has each micro-batch's loss added to it.
    """

    def __init__(
        self, model: nn.Module, setting: Setting, loss: Callable[[Any, Any], Tensor],
        optimizers: list[Optimizer], spread: Any, call: Any,
    ) -> None:  # fmt: skip
        self.model, self.setting, self.loss, self.optimizers = model, setting, loss, optimizers
        self.spread, self.call = spread, call
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device_type = next(model.parameters()).device.type
        scaled = setting.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device_type) if scaled else None
        average = [p.detach().clone() for p in model.parameters() if setting.ema_decay]
        self.average: list[Tensor] | None = average or None
        self.losses: Tensor | None = None

    def __call__(self, batches: Iterator[Any]) -> None:
        for index in range(self.setting.accumulate):
            with self.synchronised(index == self.setting.accumulate - 1):
                self.micro_step(next(batches))
        self.update()
        self.zero_grad()

    def synchronised(self, is_last: bool) -> AbstractContextManager[object]:
        """Around a micro-batch: whether its backward sums gradients over the devices."""
        sums = is_last or self.setting.gradient_sync == "every"
        if self.setting.parallelism == "ddp":
            return nullcontext() if sums else self.spread.no_sync()
        if self.setting.parallelism in SHARDED:
            self.spread.set_requires_gradient_sync(sums)
        return nullcontext()

    def micro_step(self, batch: Any) -> None:
        with self.attending():
            loss = self.forward(batch)
            self.backward(loss)
            if self.losses is not None:
                self.losses += loss.detach()

    def attending(self) -> AbstractContextManager[object]:
        """Around forward, and backward, which may run it again: with eager attention no fused
        kernel attends, also where the model has no switch that would say so."""
        if self.setting.attention != "eager":
            return nullcontext()
        return sdpa_kernel(SDPBackend.MATH)

    def autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST.get(self.setting.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    def offloading(self, batch: Any) -> AbstractContextManager[object]:
        if self.setting.offload == "none":
            return nullcontext()
        tensors = (value for value in tree_leaves(batch) if isinstance(value, Tensor))
        stay = (*self.model.parameters(), *self.model.buffers(), *tensors)
        found: AbstractContextManager[object] = beside("levers").offload_activations(stay)
        return found

    def forward(self, batch: Any) -> Tensor:
        """The loss of a micro-batch, divided by the number of them."""
        with self.autocast(), self.offloading(batch):
            loss = self.loss(self.call, batch)
        return loss / self.setting.accumulate if self.setting.accumulate > 1 else loss

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        if not self.setting.optimizer_in_backward:
            (optimizer,) = self.optimizers
            if self.setting.clip_norm:
                if self.scaler is not None:
                    self.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters, self.setting.clip_norm)
            if self.scaler is not None:
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                optimizer.step()
        self.follow()

    def follow(self) -> None:
        """Moves the average of the weights a little to where they are."""
        if self.average is not None:
            with torch.no_grad():
                weights: list[Tensor] = list(self.model.parameters())
                torch._foreach_lerp_(self.average, weights, 1 - self.setting.ema_decay)

    def zero_grad(self) -> None:
        if not self.setting.optimizer_in_backward:
            self.optimizers[0].zero_grad(set_to_none=self.setting.zero_grad_to_none)


def image_loss(call: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of logits [B, classes] (or an output with `.logits`) against classes [B], or soft ones."""
    images, targets = batch
    output = call(images)
    # Mixed targets are smooth already.
    smoothing = 0.0 if SETTING.mixup + SETTING.cutmix else SETTING.smoothing
    return F.cross_entropy(getattr(output, "logits", output), targets, label_smoothing=smoothing)


# ---- The data -----------------------------------------------------------------------------------


def dataset(folder: Path, train: bool) -> tuple[Any, Any]:
    """The pictures, and what makes a batch of them (None: torch's default); None, None where there
    is nothing to validate."""
    own = own_dataset() if train else None
    if isinstance(own, DataLoader):
        return own.dataset, own.collate_fn
    if own is not None or folder is None:
        return own, None
    found: tuple[Any, Any] = beside("pictures").pictures(folder, SETTING, train)
    return found


def step_images() -> int:
    """What one optimizer step sees, over all devices."""
    return SETTING.batch_size * SETTING.accumulate * SETTING.world_size


def loaders(options: argparse.Namespace, rank: int, done: int) -> tuple[Any, Any, int]:
    """Batches to train on without end, those of `done` steps left out; those of this rank to
    validate, as many as any other's (`accuracy` counts no picture twice); the pictures there are.
    """
    pictures, collate = dataset(options.data, train=True)
    validated, theirs = dataset(options.data, train=False)
    if not hasattr(pictures, "__len__") or not len(pictures):
        raise SystemExit("there are no pictures to train on, or they have no length")
    shared: dict[str, Any] = {"collate_fn": collate, "num_workers": options.workers}
    shared["prefetch_factor"] = SETTING.prefetch_factor if options.workers else None
    shared["pin_memory"] = SETTING.pin_memory and torch.device(options.device).type == "cuda"
    first = done * step_images() + rank
    order = beside("pictures").Endless(len(pictures), options.seed, first, SETTING.world_size)
    # The workers' seeds are not drawn from the loop's own numbers.
    seeded = torch.Generator().manual_seed(options.seed + done * SETTING.world_size + rank)
    training: DataLoader[Any] = DataLoader(
        beside("pictures").Seeded(pictures, options.seed), SETTING.batch_size, sampler=order,
        generator=seeded, persistent_workers=options.workers > 0, **shared,
    )  # fmt: skip
    if validated is None:
        return training, None, len(pictures)
    if other := set(getattr(pictures, "classes", validated.classes)) ^ set(validated.classes):
        raise SystemExit(f"classes in train/ or in val/ only: {', '.join(sorted(other))[:500]}")
    whole = -(-len(validated) // SETTING.world_size) * SETTING.world_size
    places = [min(at, len(validated) - 1) for at in range(rank, whole, SETTING.world_size)]
    shared |= {"sampler": places, "generator": torch.Generator(), "collate_fn": theirs}
    return training, DataLoader(validated, SETTING.validation_batch, **shared), len(pictures)


class Waits:
    """How long the device waits for batches, by a mark before and after each. CUDA's marks are
    events, read when the device has passed them, so that the loop never waits for one."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.marks = device.type == "cuda", list[Any]()

    def mark(self) -> None:
        at: Any = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            at.record()
        self.marks.append(at)

    def seconds(self) -> float:
        """Since the last call, when the device has done its work."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=False))
        self.marks.clear()
        return float(sum(a.elapsed_time(b) / 1000 if self.cuda else b - a for a, b in pairs))


def mix(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix of a batch with itself, turned round; targets [batch, classes] are soft."""
    soft = F.one_hot(targets, SETTING.num_classes).float()
    soft = (1 - SETTING.smoothing) * soft + SETTING.smoothing / SETTING.num_classes
    cuts = SETTING.cutmix > 0 and (SETTING.mixup == 0 or bool(torch.rand(()) < 0.5))
    power = torch.tensor(SETTING.cutmix if cuts else SETTING.mixup, dtype=torch.float32)
    share = float(torch.distributions.Beta(power, power).sample())
    other = images.flip(0)
    if not cuts:
        images = share * images + (1 - share) * other
    else:  # a box around any point, cut off at the edges
        box, area = [], 1.0
        for side in images.shape[2:]:
            half, middle = int(side * (1 - share) ** 0.5) // 2, int(torch.randint(side, ()))
            box.append(slice(max(0, middle - half), middle + half))
            area *= (min(side, middle + half) - max(0, middle - half)) / side
        images = images.clone()
        images[..., box[0], box[1]] = other[..., box[0], box[1]]
        share = 1 - area
    return images, share * soft + (1 - share) * soft.flip(0)


def prepared(images: Tensor, targets: Tensor, train: bool) -> tuple[Tensor, Tensor]:
    """A batch on the device as the model takes it."""
    if images.dtype == torch.uint8:
        images = beside("pictures").from_bytes(images, SETTING.erasing if train else 0.0)
    if train and SETTING.mixup + SETTING.cutmix:
        images, targets = mix(images, targets)
    if SETTING.precision == "pure-bf16":
        images = images.to(torch.bfloat16)
    if SETTING.memory_format == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
    return images, targets


def synthetic(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    size = SETTING.batch_size
    images = torch.randn(size, SETTING.channels, SETTING.height, SETTING.width, device=device)
    targets = torch.randint(SETTING.num_classes, (size,), device=device)
    while True:
        yield prepared(images, targets, train=True)


def on_device(data: Any, device: torch.device, train: bool, waits: Waits) -> Iterator[Any]:
    """The batches of `data`, copied on a stream of their own while the device still computes."""
    copying = torch.cuda.Stream(device) if device.type == "cuda" else None
    waits.mark()
    for images, targets in data:
        with torch.cuda.stream(copying) if copying is not None else nullcontext():
            images = images.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
        if copying is not None:
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(copying)
            for tensor in (images, targets):
                tensor.record_stream(computing)  # not given to the next copy before it was used
        waits.mark()
        batch = prepared(images, targets, train)
        del images, targets  # what was mixed is not kept beside the mixture
        yield batch
        waits.mark()


# ---- Validation, checkpoints, the log -----------------------------------------------------------


@torch.no_grad()
def accuracy(step: Step, data: Any, device: torch.device) -> float:
    """The share of validation images whose best class is right, over all devices."""
    step.model.eval()
    num_images, rank = len(data.dataset), int(os.environ.get("RANK", "0"))
    left = len(range(rank, num_images, SETTING.world_size))  # what comes after only fills up
    right = torch.zeros((), device=device)
    for images, targets in on_device(data, device, False, Waits(device)):
        with step.autocast(), step.attending():
            output = step.model(images)
        best = getattr(output, "logits", output).argmax(dim=1)
        right += (best == targets)[:left].sum()
        left = max(0, left - len(best))
    if SETTING.world_size > 1:
        distributed.all_reduce(right)
    step.model.train()
    return float(right.item() / num_images)


@contextmanager
def averaged(step: Step) -> Iterator[None]:
    """Within, the model has the averaged weights, and `step.average` its own."""

    def swap() -> None:
        if SETTING.parallelism in SHARDED:  # some stay gathered after a validation
            beside("levers").reshard(step.model)
        with torch.no_grad():
            for mine, other in zip(step.model.parameters(), step.average or (), strict=True):
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)

    swap()
    yield
    swap()


def state_of(step: Step) -> dict[str, Any]:
    """Weights, average, optimizers and scaler; of sharded ones whole, on the host."""
    average: list[Any] = list(step.average or ())
    if SETTING.parallelism in SHARDED:
        weights, optimizers = beside("levers").whole_state(step.model, step.optimizers)
        average = [weight.full_tensor().cpu() for weight in average]
    else:
        weights = step.model.state_dict()
        optimizers = [each.state_dict() for each in step.optimizers]
    found = {"model": weights, "optimizer": optimizers}
    if average:
        names = (name for name, _ in step.model.named_parameters())
        found["ema"] = {**weights, **dict(zip(names, average, strict=True))}
    if step.scaler is not None:
        found["scaler"] = step.scaler.state_dict()
    return found


def restore(step: Step, state: dict[str, Any]) -> None:
    if SETTING.parallelism in SHARDED:
        beside("levers").restore_whole(step.model, step.optimizers, state)
    else:
        step.model.load_state_dict(state["model"])
        for optimizer, saved in zip(step.optimizers, state["optimizer"], strict=True):
            for weight, on_host in getattr(optimizer, "param_d2h_map", {}).items():
                on_host.copy_(weight.detach())  # which torchao copied when it was made
            optimizer.load_state_dict(saved)
    if step.scaler is not None:
        step.scaler.load_state_dict(state["scaler"])
    if step.average is not None:
        for (name, _), mine in zip(step.model.named_parameters(), step.average, strict=True):
            found = state["ema"][name].to(mine.device)
            sharded = SETTING.parallelism in SHARDED
            mine.copy_(beside("levers").share_of(found, mine) if sharded else found)


def random_states(device: torch.device) -> list[Any]:
    """Of each rank: what mixes images and drops paths from here on."""
    mine = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    found: list[Any] = [mine] * SETTING.world_size
    if SETTING.world_size > 1:
        distributed.all_gather_object(found, mine)
    return found


def write(state: dict[str, Any], file: Path) -> None:
    """Whole or not at all: what ends a training meanwhile leaves the file that was there."""
    part = file.with_suffix(".part")
    try:
        torch.save(state, part)
        part.replace(file)
    except (OSError, RuntimeError) as error:  # the latter is torch's on a full disk
        part.unlink(missing_ok=True)
        print(f"{file} could not be written, and training goes on: {error}", flush=True)


def say(file: Path | None, line: str, **values: float) -> None:
    """A line for people, and one of JSON in `file`."""
    print(line, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(values) + "\n")


def profiler(folder: Path) -> torch.profiler.profile:
    """Traces steps 3 to 5 into `folder`; open the trace at ui.perfetto.dev."""
    folder.mkdir(parents=True, exist_ok=True)
    started = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda ended: ended.export_chrome_trace(str(folder / "trace.json.gz")),
    )
    started.start()
    return started


def watching(options: argparse.Namespace) -> Any:
    """What holds the training against its plan, in lines of its log; None, if nothing does."""
    if options.watch is None:
        return nullcontext()
    import planner  # to watch only

    return planner.watch(options.watch, options.output)


# ---- Training -----------------------------------------------------------------------------------


def build(options: argparse.Namespace, device: torch.device, rank: int, task: Any) -> Step:
    """The model on its device, spread, compiled, and with its optimizers."""
    random.seed(options.seed + rank)
    torch.manual_seed(options.seed)  # the same weights on every rank
    set_up_torch(SETTING)
    made = (build_model(options.pretrained) if task is None else task.module()).train()
    blocks = partial(task.blocks, made) if hasattr(task, "blocks") else None
    model = prepare(made, SETTING, device, blocks)
    torch.manual_seed(options.seed + rank)  # each rank drops and mixes by itself
    spread = distribute(model, SETTING, device, blocks)
    call = compiled(spread, model, SETTING, blocks)
    if hasattr(task, "optimizer"):
        optimizers = [task.optimizer([p for p in model.parameters() if p.requires_grad])]
    else:
        groups = decay_groups(model, options.weight_decay)
        optimizers = build_optimizers(groups, SETTING, options.lr)
    loss = image_loss if task is None else task.loss
    return Step(model, SETTING, loss, optimizers, spread, call)


def train(options: argparse.Namespace, device: torch.device, rank: int, watch: Any) -> None:
    task = build_task()
    step = build(options, device, rank, task)
    saves = None if options.synthetic else options.output
    last = options.output / "last.pt"
    resumed: dict[str, Any] = {}
    if options.resume and last.is_file():
        resumed = torch.load(last, map_location="cpu", weights_only=True)
    elif saves is not None and last.is_file():
        raise SystemExit(f"{last} is there: go on from it by --resume, or take another --output")
    done, best = resumed.get("step", 0), resumed.get("best", 0.0)
    begun: list[Any] = [(done, resumed.get("images", step_images()))] * SETTING.world_size
    if SETTING.world_size > 1:
        distributed.all_gather_object(begun, begun[0])
    if set(begun) != {(done, step_images())}:
        raise SystemExit(f"{last} is of another step, or not everywhere: take another --output")

    waits, validation = Waits(device), None
    num_images = min(options.steps, options.save_every) * step_images()
    batches: Iterator[Any]
    if task is not None:
        batches = task_batches(task, device)
    elif options.synthetic:
        batches = synthetic(device)
    else:
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() - options.workers))
        data, validation, num_images = loaders(options, rank, done)
        batches = on_device(data, device, True, waits)
    if watch is not None:
        batches = watch.batches(batches)
    steps = options.steps or -(-options.epochs * num_images // step_images())
    schedules = [build_schedule(each, steps, options) for each in step.optimizers]
    if resumed:
        restore(step, resumed)
        for schedule, state in zip(schedules, resumed["schedule"], strict=True):
            schedule.load_state_dict(state)
        mine = resumed["random"][rank]
        random.setstate(mine["python"])
        torch.set_rng_state(mine["cpu"])
        if device.type == "cuda" and "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"], device)
        resumed = {}  # its weights are not kept twice

    lines = saves / "log.jsonl" if saves is not None and rank == 0 else None
    profiled = profiler(options.profile) if options.profile is not None and rank == 0 else None
    speed_name = f"{SETTING.unit}_per_second".replace(" ", "_").replace("-", "_")
    losses, counted, since = torch.zeros((), device=device), 0, time.perf_counter()
    for number in range(done + 1, steps + 1):
        step.losses = torch.zeros_like(losses)
        step(batches)
        rate = float(schedules[0].get_last_lr()[0])
        for schedule in schedules:
            schedule.step()
        if profiled is not None:
            profiled.step()
        if watch is not None:
            watch.step(step_images() // SETTING.world_size)
        losses, counted = losses + step.losses, counted + 1
        epoch = number * step_images() / num_images
        ends_epoch = int(epoch) > (number - 1) * step_images() // num_images or number == steps
        if number % options.log_every == 0 or ends_epoch:
            if SETTING.world_size > 1:  # each rank has the mean of its own images
                distributed.all_reduce(losses)
            mean = losses.item() / counted / SETTING.world_size  # waits for the device
            if not math.isfinite(mean):
                raise SystemExit(
                    f"the loss is {mean} by step {number}, and nothing of it is saved: begin again "
                    "with a smaller --lr (--resume keeps the rate, and would come here again)"
                )
            seconds = time.perf_counter() - since
            speed, waited = counted * step_images() / seconds, waits.seconds() / seconds
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
            if rank == 0:
                told = f"epoch {epoch:.2f}  rate {rate:.3g}  loss {mean:.4f}  {speed:.1f} "
                told += f"{SETTING.unit}/s  {waited:.0%} waited for data  {peak:.2f} GiB"
                values = {"rate": rate, "loss": mean, speed_name: speed, "waited": waited}
                told = f"step {number}/{steps}  {told}"
                say(lines, told, step=number, epoch=epoch, peak_gib=peak, **values)
            losses, counted, since = torch.zeros_like(losses), 0, time.perf_counter()
        if ends_epoch:
            paused, is_best = time.perf_counter(), False
            if validation is not None:
                share = accuracy(step, validation, device)
                told = f"validation {share:.2%}"
                if step.average is not None:
                    with averaged(step):
                        share = accuracy(step, validation, device)
                    told = f"validation {share:.2%}, without the average{told[10:]}"
                is_best, best = share >= best, max(best, share)
                if rank == 0:
                    told = f"step {number}/{steps}  {told}"
                    say(lines, told, step=number, epoch=epoch, accuracy=share)
            if saves is not None:  # on every rank: each gives its part
                found = state_of(step) | {"step": number, "best": best, "images": step_images()}
                found["schedule"] = [schedule.state_dict() for schedule in schedules]
                found["random"] = random_states(device)
                if rank == 0:
                    write(found, last)
                    if is_best:
                        write(found, saves / "best.pt")
                del found
            since += time.perf_counter() - paused
            if watch is not None:
                watch.skip(time.perf_counter() - paused)
    if profiled is not None:
        profiled.stop()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, rate = parser.add_argument, SETTING.learning_rate
    add("data", nargs="?", type=Path, help="folder: train/ and perhaps val/")
    add("--synthetic", action="store_true", help="random images, for --steps")
    add("--pretrained", action="store_true", help="begin with published weights")
    add("--steps", type=int, default=0, help="optimizer steps; 0: by --epochs")
    add("--epochs", type=int, default=SETTING.epochs)
    add("--warmup-epochs", type=int, default=SETTING.warmup_epochs, help="a fifth of all at most")
    add("--lr", type=float, default=rate, help=f"for {step_images()} {SETTING.unit} a step")
    add("--weight-decay", type=float, default=SETTING.weight_decay)
    add("--workers", type=int, default=SETTING.workers, help="of each process")
    add("--seed", type=int, default=0, help="of weights, order and augmentation")
    add("--log-every", type=int, default=50)
    add("--save-every", type=int, default=1000, help="steps; pictures are saved by the epoch")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, default=Path("output"), help="last.pt, best.pt, log.jsonl")
    add("--resume", action="store_true", help="go on from OUTPUT/last.pt, with its rate")
    add("--profile", type=Path, default=None, help="folder: a trace of 3 steps")
    add("--watch", type=Path, metavar="PLAN", help="planner.watch holds it against this plan")
    if parser.parse_known_args()[0].pretrained:
        parser.set_defaults(**FINE_TUNING)
    options = parser.parse_args()
    if options.lr is None and SETTING.optimizer != "own":
        parser.error("no rate is published for this model and optimizer: give one by --lr")
    has_data = SETTING.is_task or SETTING.pipeline == "own" or options.data is not None
    if options.synthetic == has_data:
        parser.error("give a data folder, or --synthetic")
    if (options.synthetic or SETTING.is_task) and not options.steps:
        parser.error("this needs --steps")
    if options.profile is not None and 0 < options.steps < 5:
        parser.error("--profile is of steps 3 to 5, and --steps is less")
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) != SETTING.world_size:
        law = f"{SETTING.world_size} devices need a process each, and {world} were started"
        parser.error(f"{law}; use the line behind 'Run:' in the block of train.py")
    return options


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
        needed = SETTING.precision in ("bf16", "pure-bf16", "fp8")
        if needed and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise SystemExit(f"{torch.cuda.get_device_name(device)} has no bfloat16: set fp16")
    if SETTING.world_size > 1:
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, device_id=bound)
    try:
        with watching(options) as watch:
            train(options, device, int(os.environ.get("RANK", "0")), watch)
    except KeyboardInterrupt:
        more = "; --resume goes on from last.pt" if (options.output / "last.pt").is_file() else ""
        raise SystemExit(f"interrupted{more}") from None
    finally:
        if SETTING.world_size > 1:
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
