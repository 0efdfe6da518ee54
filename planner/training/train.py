# Written by 'planner emit', which replaces files that begin with this line.
"""Train a model: `python train.py DATA`, or `python train.py --synthetic --steps 20` to try it.

DATA is a folder with train/CLASS/*.jpg and, for validation, val/CLASS/*.jpg. The block below says
what is trained and how; the rest is the same in every such file. `planner tune` measures, and
`planner estimate` records, what lies from `set_up_torch` to `Step`, but for `decay_groups` and
`build_schedule`.
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
    """What is trained, and how. A batch is that of one device."""

    batch_size: int = 64  # of a micro-batch
    accumulate: int = 1  # micro-batches of an optimizer step
    precision: str = "bf16"  # fp32, tf32, bf16, fp16, pure-bf16, fp8
    attention: str = "library"  # eager, sdpa
    checkpointing: str = "none"  # blocks, blocks:6, blocks:every-2, selective, stages, stages:0,1
    offload: str = "none"  # activations: the host's memory holds what backward needs
    compile: str = "off"  # a mode of torch.compile
    compile_scope: str = "model"  # blocks: each block is compiled by itself
    activation_memory_budget: float = 1.0
    memory_format: str = "contiguous"  # channels_last
    cudnn_benchmark: bool = True
    zero_grad_to_none: bool = True
    ema_decay: float = 0.0  # of a moving average of the weights; 0: no average
    world_size: int = 1  # devices
    parallelism: str = "none"  # ddp, fsdp, hsdp
    shard_size: int = 1  # devices that hold one copy of the weights
    gradient_sync: str = "last"  # every: after each micro-batch
    fsdp_reshard: bool = True
    frozen: str = ""  # a regex: weights are not trained if the start of their name matches
    adapted: str = ""  # a regex: linear layers get adapters if their whole name matches
    lora_rank: int = 0
    optimizer: str = "adamw"  # or another of OPTIMIZERS; own: the task makes it
    implementation: str = "foreach"  # fused, forloop
    optimizer_in_backward: bool = False
    offload_optimizer: str = "none"  # state, state-and-gradients: on the host
    clip_norm: float = 0.0
    learning_rate: float | None = None  # for the images of one optimizer step
    weight_decay: float = 0.0
    epochs: int = 300
    warmup_epochs: int = 20
    warmup_start: float = 0.001  # of the learning rate
    final_share: float = 0.01  # of the learning rate
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    switch: float = 0.5  # how often CutMix is drawn, where Mixup is on too
    auto_augment: str = ""  # in timm's words
    erasing: float = 0.0
    interpolation: str = "bilinear"
    crop_share: float = 1.0  # of a validation picture: its middle, which the model sees
    height: int = 224
    width: int = 224
    channels: int = 3
    num_classes: int = 1000
    unit: str = "images"
    is_task: bool = False  # build_task() makes the module, the batches and the loss
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
    """The task, which makes module, batches and loss. None: images, logits and cross-entropy."""


def task_batches(task: Any, device: torch.device) -> Iterator[Any]:
    """Put your own loader here. It yields SETTING.batch_size items, as task.batch() makes them."""
    while True:
        yield task.batch(SETTING.batch_size, device)


def own_dataset() -> Any:
    """A Dataset to train on, or a DataLoader of one, instead of pictures in folders."""


# ---- The same in every file from here on --------------------------------------------------------

AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
SHARDED = ("fsdp", "hsdp")
FindBlocks = Callable[[], Sequence[nn.Module]] | None  # the model author's own, if there is one
ParameterGroups = list[dict[str, Any]]


def import_beside(name: str) -> Any:
    """Import levers.py or pictures.py, which are beside this file if a setting needs them."""
    return import_module(f"{__package__}.{name}" if __package__ else name)


def set_up_torch(setting: Setting) -> None:
    """Set what holds for the whole process. TF32 is off in cuDNN only for fp32: autocast leaves
    some convolutions in fp32, and those may use TF32."""
    torch.set_float32_matmul_precision("high" if setting.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = setting.precision != "fp32"
    torch.backends.cudnn.benchmark = setting.cudnn_benchmark
    torch._functorch.config.activation_memory_budget = setting.activation_memory_budget


# ---- The model and its optimizer ----------------------------------------------------------------


def prepare_model(
    model: nn.Module, setting: Setting, device: torch.device, find_blocks: FindBlocks,
    move: Any = nn.Module.to,
) -> nn.Module:  # fmt: skip
    """Checkpoint, freeze and adapt `model` as the setting says, and move it to its device.

    `find_blocks` returns the blocks that its author names; without it they are detected. `move` is
    `nn.Module.to`, or stands in for it.
    """
    if setting.checkpointing != "none":
        blocks = find_blocks() if find_blocks is not None else None
        import_beside("levers").checkpoint_model(model, setting.checkpointing, blocks)
    if setting.frozen or setting.lora_rank:
        adapters = setting.adapted, setting.lora_rank
        import_beside("levers").freeze_and_adapt(model, setting.frozen, *adapters)
    model = move(model, device, torch.bfloat16 if setting.precision == "pure-bf16" else None)
    if setting.precision == "fp8":
        import_beside("levers").use_float8(model)
    if setting.memory_format == "channels_last":
        import_beside("levers").lay_channels_last(model)
    return model


# All are torch's, except Lion, which is timm's, and AdamW in 8 bits, which is torchao's.
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW", "adam": "torch.optim.Adam", "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor", "rmsprop": "torch.optim.RMSprop",
    "nadam": "torch.optim.NAdam", "radam": "torch.optim.RAdam", "lion": "timm.optim.Lion",
    "adamw-8bit": "torchao.optim.AdamW8bit",
}  # fmt: skip
# Weights whose names contain one of these do not decay: position parameters in the words of Swin's
# libraries. Biases and weights of at most one dimension do not decay either
# (microsoft/Swin-Transformer @f82860b, optimizer.py and the models' no_weight_decay).
UNDECAYED = ("position_bias", "absolute_pos", "position_embeddings", "cpb_mlp", "logit_scale")


def decay_groups(model: nn.Module, decay: float) -> ParameterGroups:
    """Two groups of parameters: matrices and kernels decay; biases, norms and positions do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = name.endswith("bias") or any(part in name for part in UNDECAYED)
            groups[parameter.dim() > 1 and not is_spared].append(parameter)
    decays = {True: decay, False: 0.0}
    return [{"params": p, "weight_decay": decays[key]} for key, p in groups.items() if p]


def build_optimizers(groups: ParameterGroups, setting: Setting, lr: float) -> list[Optimizer]:
    """One optimizer for all weights. With `optimizer_in_backward`, one for each weight: it steps as
    soon as backward has the gradient, and drops the gradient. The caller must keep the list, since
    the hooks of the weights hold no reference to their optimizers."""
    if not setting.optimizer_in_backward:
        return [make_optimizer(groups, setting, lr)]
    optimizers = []
    for group in groups:
        for weight in group["params"]:
            optimizer = make_optimizer([{**group, "params": [weight]}], setting, lr)
            weight.register_post_accumulate_grad_hook(partial(step_weight, weakref.ref(optimizer)))
            optimizers.append(optimizer)
    return optimizers


def step_weight(reference: weakref.ref[Optimizer], weight: Tensor) -> None:
    optimizer = reference()
    assert optimizer is not None, "the list of optimizers is kept as long as the weights train"
    optimizer.step()
    weight.grad = None


def make_optimizer(groups: ParameterGroups, setting: Setting, lr: float) -> Optimizer:
    name, options = setting.optimizer, {"lr": lr}
    if name != "adamw-8bit":
        options["foreach"] = setting.implementation == "foreach"
    if name in ("adamw", "adam", "sgd"):
        options["fused"] = setting.implementation == "fused"
    if name == "sgd":
        options["momentum"] = 0.9
    package, _, class_name = OPTIMIZERS[name].rpartition(".")
    cls: Any = getattr(import_module(package), class_name)
    if setting.offload_optimizer != "none" and groups[0]["params"][0].device.type != "cpu":
        with_gradients = setting.offload_optimizer == "state-and-gradients"
        offload = import_module("torchao.optim").CPUOffloadOptimizer
        cls = partial(offload, optimizer_class=cls, offload_gradients=with_gradients)
    optimizer: Optimizer = cls(groups, **options)
    return optimizer


def build_schedule(optimizer: Optimizer, steps: int, options: argparse.Namespace) -> LambdaLR:
    """A linear warm-up over the first optimizer steps (at most a fifth of all), then half a
    cosine."""
    start, final = SETTING.warmup_start, SETTING.final_share
    warmup: int = max(1, min(steps * options.warmup_epochs // options.epochs, steps // 5))

    def relative_rate(step: int) -> float:
        if step < warmup:
            return start + (1 - start) * step / warmup
        share = min(1.0, (step - warmup) / max(1, steps - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))

    return LambdaLR(optimizer, relative_rate)


# ---- Devices and the compiler -------------------------------------------------------------------


def distribute(
    model: nn.Module, setting: Setting, device: torch.device, find_blocks: FindBlocks
) -> Any:
    """The model to call where several devices train it: DDP wraps `model`; FSDP shards it in place,
    with each block as a unit."""
    if setting.parallelism == "ddp":
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if setting.parallelism in SHARDED:
        num_copies = setting.world_size // setting.shard_size
        shape = (setting.shard_size,) if num_copies == 1 else (num_copies, setting.shard_size)
        levers = import_beside("levers")
        blocks = find_blocks() if find_blocks is not None else levers.repeated_blocks(model)
        levers.shard(model, blocks, device.type, shape, setting.fsdp_reshard)
    return model


def compile_model(
    parallel_model: nn.Module, model: nn.Module, setting: Setting, find_blocks: FindBlocks
) -> Any:
    """The model to call instead of `parallel_model`: compiled as a whole, or with its blocks
    compiled in place."""
    if setting.compile == "off":
        return parallel_model
    # By default torch would guess which sizes change.
    arguments: dict[str, Any] = {"mode": setting.compile, "dynamic": False}
    if setting.compile_scope == "model":
        return torch.compile(parallel_model, **arguments)
    levers = import_beside("levers")
    blocks = find_blocks() if find_blocks is not None else levers.repeated_blocks(model)
    levers.compile_blocks(blocks, arguments)
    return parallel_model


# ---- The step -----------------------------------------------------------------------------------


class Step:
    """A model with its optimizers. A call is one optimizer step over `accumulate` micro-batches.

    `parallel_model` is what `distribute` made of `model`, and `compiled_model` is what
    `compile_model` made of that. `loss(compiled_model, batch)` is a scalar. If `losses` is a
    tensor, the loss of each micro-batch is added to it.
    """

    def __init__(
        self, model: nn.Module, setting: Setting, loss: Callable[[Any, Any], Tensor],
        optimizers: list[Optimizer], parallel_model: Any, compiled_model: Any,
    ) -> None:  # fmt: skip
        self.model, self.setting, self.loss, self.optimizers = model, setting, loss, optimizers
        self.parallel_model, self.compiled_model = parallel_model, compiled_model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device_type = next(model.parameters()).device.type
        uses_scaler = setting.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device_type) if uses_scaler else None
        average = [p.detach().clone() for p in model.parameters() if setting.ema_decay]
        self.average: list[Tensor] | None = average or None
        self.losses: Tensor | None = None

    def __call__(self, batches: Iterator[Any]) -> None:
        for index in range(self.setting.accumulate):
            with self.sync_context(index == self.setting.accumulate - 1):
                self.micro_step(next(batches))
        self.update()
        self.zero_grad()

    def sync_context(self, is_last: bool) -> AbstractContextManager[object]:
        """For one micro-batch: whether its backward sums gradients over the devices."""
        sums_gradients = is_last or self.setting.gradient_sync == "every"
        if self.setting.parallelism == "ddp":
            return nullcontext() if sums_gradients else self.parallel_model.no_sync()
        if self.setting.parallelism in SHARDED:
            self.parallel_model.set_requires_gradient_sync(sums_gradients)
        return nullcontext()

    def micro_step(self, batch: Any) -> None:
        with self.attention_context():
            loss = self.forward(batch)
            self.backward(loss)
            if self.losses is not None:
                self.losses += loss.detach()

    def attention_context(self) -> AbstractContextManager[object]:
        """For forward, and for backward, which may run forward again. With eager attention no fused
        attention kernel runs, even if the model has no switch for it."""
        if self.setting.attention != "eager":
            return nullcontext()
        return sdpa_kernel(SDPBackend.MATH)

    def autocast_context(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST.get(self.setting.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    def offload_context(self, batch: Any) -> AbstractContextManager[object]:
        if self.setting.offload == "none":
            return nullcontext()
        tensors = (value for value in tree_leaves(batch) if isinstance(value, Tensor))
        kept = (*self.model.parameters(), *self.model.buffers(), *tensors)
        context: AbstractContextManager[object] = import_beside("levers").offload_activations(kept)
        return context

    def forward(self, batch: Any) -> Tensor:
        """The loss of a micro-batch, divided by the number of micro-batches."""
        with self.autocast_context(), self.offload_context(batch):
            loss = self.loss(self.compiled_model, batch)
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
        self.update_average()

    def update_average(self) -> None:
        """Move the average of the weights towards the weights."""
        if self.average is not None:
            with torch.no_grad():
                weights: list[Tensor] = list(self.model.parameters())
                torch._foreach_lerp_(self.average, weights, 1 - self.setting.ema_decay)

    def zero_grad(self) -> None:
        if not self.setting.optimizer_in_backward:
            self.optimizers[0].zero_grad(set_to_none=self.setting.zero_grad_to_none)


def image_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of logits [B, classes] (or of an output with `.logits`) and classes [B] or soft
    targets [B, classes]."""
    images, targets = batch
    output = model(images)
    # `mix_images` has already smoothed its targets.
    smoothing = 0.0 if SETTING.mixup + SETTING.cutmix else SETTING.smoothing
    return F.cross_entropy(getattr(output, "logits", output), targets, label_smoothing=smoothing)


# ---- The data -----------------------------------------------------------------------------------


def load_dataset(folder: Path | None, train: bool) -> tuple[Any, Any]:
    """The data set, and the function that makes a batch of its items (None: torch's default). Both
    are None if there is nothing to validate."""
    data = own_dataset() if train else None
    if isinstance(data, DataLoader):
        return data.dataset, data.collate_fn
    if data is not None or folder is None:
        return data, None
    pictures: tuple[Any, Any] = import_beside("pictures").open_pictures(folder, SETTING, train)
    return pictures


def global_batch() -> int:
    """The images of one optimizer step, on all devices together."""
    return SETTING.batch_size * SETTING.accumulate * SETTING.world_size


def loader_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_workers": options.workers,
        "prefetch_factor": SETTING.prefetch_factor if options.workers else None,
        "pin_memory": SETTING.pin_memory and torch.device(options.device).type == "cuda",
    }


def plain_loaders(options: argparse.Namespace) -> tuple[Any, Any]:
    """Loaders for the loop of another trainer: of one pass over the shuffled training pictures, and
    of the validation pictures, or None."""
    data, collate = load_dataset(options.data, train=True)
    common = {**loader_options(options), "collate_fn": collate}
    loader = DataLoader(data, SETTING.batch_size, shuffle=True, drop_last=True, **common)
    held_out, common["collate_fn"] = load_dataset(options.data, train=False)
    validation = DataLoader(held_out, SETTING.validation_batch, **common) if held_out else None
    return loader, validation


def build_loaders(options: argparse.Namespace, rank: int, done: int) -> tuple[Any, Any, int]:
    """The loader of an endless training, which skips the first `done` steps; the loader of this
    rank's validation pictures, or None; and the number of pictures to train on.

    Every rank validates equally many pictures: `measure_accuracy` counts no picture twice.
    """
    pictures = import_beside("pictures")
    data, collate = load_dataset(options.data, train=True)
    if not hasattr(data, "__len__") or not len(data):
        raise SystemExit("DATA needs pictures in train/CLASS/, or a Dataset with a length above 0")
    common = loader_options(options)
    first = done * global_batch() + rank
    # A generator of its own: the workers' seeds must not change the random numbers of the loop.
    generator = torch.Generator().manual_seed(options.seed + done * SETTING.world_size + rank)
    training: DataLoader[Any] = DataLoader(
        pictures.Seeded(data, options.seed), SETTING.batch_size, collate_fn=collate,
        sampler=pictures.Endless(len(data), options.seed, first, SETTING.world_size),
        generator=generator, persistent_workers=options.workers > 0, **common,
    )  # fmt: skip
    held_out, collate = load_dataset(options.data, train=False)
    if held_out is None:
        return training, None, len(data)
    if unpaired := set(getattr(data, "classes", held_out.classes)) ^ set(held_out.classes):
        law = f"classes in train/ or in val/ only: {', '.join(sorted(unpaired))[:500]}"
        raise SystemExit(f"{law}; give both the same, or remove the validation folder")
    num_padded = -(-len(held_out) // SETTING.world_size) * SETTING.world_size
    places = range(rank, num_padded, SETTING.world_size)
    common |= {"collate_fn": collate, "generator": torch.Generator()}
    common["sampler"] = [min(place, len(held_out) - 1) for place in places]
    return training, DataLoader(held_out, SETTING.validation_batch, **common), len(data)


class Meter:
    """The mean loss and the speed of the steps since the last report.

    Marks before and after each batch tell how long the device waits for it. On CUDA they are
    events, which are read once the device has passed them: the loop itself never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[Any]()
        self.restart()

    def restart(self) -> None:
        self.losses, self.num_steps = torch.zeros((), device=self.device), 0
        self.started = time.perf_counter()

    def add_step(self, losses: Tensor) -> None:
        self.losses, self.num_steps = self.losses + losses, self.num_steps + 1

    def mark(self) -> None:
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def report(self, step: int) -> tuple[str, dict[str, float]]:
        """What there is to log, as text and by name; and restarts. It waits for the device."""
        if SETTING.world_size > 1:  # each rank has the mean of its own images
            distributed.all_reduce(self.losses)
        loss = float(self.losses.item() / self.num_steps / SETTING.world_size)
        if not math.isfinite(loss):
            raise SystemExit(
                f"the loss is {loss} by step {step}, and nothing of it is saved: begin again with "
                "a smaller --lr (--resume keeps the rate, and would come here again)"
            )
        seconds, is_cuda = time.perf_counter() - self.started, self.device.type == "cuda"
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=False))
        self.marks.clear()
        waits = sum(a.elapsed_time(b) / 1000 if is_cuda else b - a for a, b in pairs)
        waited, speed = float(waits) / seconds, self.num_steps * global_batch() / seconds
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if is_cuda else 0.0
        self.restart()
        text = f"loss {loss:.4f}  {speed:.1f} {SETTING.unit}/s  {waited:.0%} waited for data"
        name = f"{SETTING.unit}_per_second".replace(" ", "_").replace("-", "_")
        values = {"loss": loss, name: speed, "waited": waited, "peak_gib": peak}
        return f"{text}  {peak:.2f} GiB", values


def mix_images(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix of a batch with itself in reverse order. Returns images and soft targets
    [batch, classes]."""
    soft = F.one_hot(targets, SETTING.num_classes).float()
    soft = (1 - SETTING.smoothing) * soft + SETTING.smoothing / SETTING.num_classes
    is_cutmix = SETTING.cutmix > 0 and (SETTING.mixup == 0 or bool(torch.rand(()) < SETTING.switch))
    power = torch.tensor(SETTING.cutmix if is_cutmix else SETTING.mixup, dtype=torch.float32)
    share = float(torch.distributions.Beta(power, power).sample())
    reversed_images = images.flip(0)
    if not is_cutmix:
        images = share * images + (1 - share) * reversed_images
    else:  # paste a box around a random point, clipped at the edges
        box, area = [], 1.0
        for side in images.shape[2:]:
            half, middle = int(side * (1 - share) ** 0.5) // 2, int(torch.randint(side, ()))
            box.append(slice(max(0, middle - half), middle + half))
            area *= (min(side, middle + half) - max(0, middle - half)) / side
        images = images.clone()
        images[..., box[0], box[1]] = reversed_images[..., box[0], box[1]]
        share = 1 - area
    return images, share * soft + (1 - share) * soft.flip(0)


def prepare_images(images: Tensor, targets: Tensor, train: bool) -> tuple[Tensor, Tensor]:
    """A batch that is on the device, as the model takes it."""
    if images.dtype == torch.uint8:
        images = import_beside("pictures").normalize(images, SETTING.erasing if train else 0.0)
    if train and SETTING.mixup + SETTING.cutmix:
        images, targets = mix_images(images, targets)
    if SETTING.precision == "pure-bf16":
        images = images.to(torch.bfloat16)
    if SETTING.memory_format == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
    return images, targets


def synthetic_batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    size = SETTING.batch_size
    images = torch.randn(size, SETTING.channels, SETTING.height, SETTING.width, device=device)
    targets = torch.randint(SETTING.num_classes, (size,), device=device)
    while True:
        yield prepare_images(images, targets, train=True)


def device_batches(data: Any, device: torch.device, train: bool, meter: Meter) -> Iterator[Any]:
    """The batches of `data` on the device. They are copied on a stream of their own while the
    device still computes."""
    copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    meter.mark()
    for images, targets in data:
        with torch.cuda.stream(copy_stream) if copy_stream is not None else nullcontext():
            images = images.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
        if copy_stream is not None:
            compute_stream = torch.cuda.current_stream(device)
            compute_stream.wait_stream(copy_stream)
            for tensor in (images, targets):
                tensor.record_stream(compute_stream)  # the next copy must not reuse its memory
        meter.mark()
        batch = prepare_images(images, targets, train)
        del images, targets  # do not keep the inputs of `mix_images` beside its result
        yield batch
        meter.mark()


# ---- Validation, checkpoints, the log -----------------------------------------------------------


@torch.no_grad()
def measure_accuracy(step: Step, data: Any, device: torch.device) -> float:
    """The share of validation images that are classified correctly, over all devices."""
    step.model.eval()
    num_images, rank = len(data.dataset), int(os.environ.get("RANK", "0"))
    num_counted = len(range(rank, num_images, SETTING.world_size))  # the rest is padding
    num_correct = torch.zeros((), device=device)
    for images, targets in device_batches(data, device, False, Meter(device)):
        with step.autocast_context(), step.attention_context():
            output = step.model(images)
        best = getattr(output, "logits", output).argmax(dim=1)
        num_correct += (best == targets)[:num_counted].sum()
        num_counted = max(0, num_counted - len(best))
    if SETTING.world_size > 1:
        distributed.all_reduce(num_correct)
    step.model.train()
    return float(num_correct.item() / num_images)


@contextmanager
def averaged_weights(step: Step) -> Iterator[None]:
    """Swap the weights of the model with `step.average` inside the context."""

    def swap() -> None:
        if SETTING.parallelism in SHARDED:  # some weights stay gathered after a validation
            import_beside("levers").release_gathered(step.model)
        with torch.no_grad():
            for weight, average in zip(step.model.parameters(), step.average or (), strict=True):
                copy = weight.clone()
                weight.copy_(average)
                average.copy_(copy)

    swap()
    yield
    swap()


def validate(step: Step, data: Any, device: torch.device) -> tuple[float, str]:
    """The accuracy that decides which weights are the best, and the text of the log."""
    share = measure_accuracy(step, data, device)
    if step.average is None:
        return share, f"validation {share:.2%}"
    with averaged_weights(step):
        average_share = measure_accuracy(step, data, device)
    return average_share, f"validation {average_share:.2%}, without the average {share:.2%}"


def training_state(step: Step, schedules: list[LambdaLR]) -> dict[str, Any]:
    """The state of weights, optimizers, schedules and random numbers. Sharded tensors are gathered
    on the host."""
    average: list[Any] = list(step.average or ())
    if SETTING.parallelism in SHARDED:
        weights, optimizers = import_beside("levers").gather_state(step.model, step.optimizers)
        average = [weight.full_tensor().cpu() for weight in average]
    else:
        weights = step.model.state_dict()
        optimizers = [optimizer.state_dict() for optimizer in step.optimizers]
    state = {"model": weights, "optimizer": optimizers, "random": random_states(step.device_type)}
    state["schedule"] = [schedule.state_dict() for schedule in schedules]
    if average:
        names = (name for name, _ in step.model.named_parameters())
        state["ema"] = {**weights, **dict(zip(names, average, strict=True))}
    if step.scaler is not None:
        state["scaler"] = step.scaler.state_dict()
    return state


def load_state(step: Step, schedules: list[LambdaLR], state: dict[str, Any], rank: int) -> None:
    if SETTING.parallelism in SHARDED:
        import_beside("levers").scatter_state(step.model, step.optimizers, state)
    else:
        step.model.load_state_dict(state["model"])
        for optimizer, saved in zip(step.optimizers, state["optimizer"], strict=True):
            # torchao copied the weights to the host when it made the optimizer.
            for weight, on_host in getattr(optimizer, "param_d2h_map", {}).items():
                on_host.copy_(weight.detach())
            optimizer.load_state_dict(saved)
    if step.scaler is not None:
        step.scaler.load_state_dict(state["scaler"])
    if step.average is not None:
        for (name, _), average in zip(step.model.named_parameters(), step.average, strict=True):
            saved = state["ema"][name].to(average.device)
            if SETTING.parallelism in SHARDED:
                saved = import_beside("levers").shard_like(saved, average)
            average.copy_(saved)
    for schedule, saved in zip(schedules, state["schedule"], strict=True):
        schedule.load_state_dict(saved)
    numbers = state["random"][rank]
    random.setstate(numbers["python"])
    torch.set_rng_state(numbers["cpu"])
    if step.device_type == "cuda" and "cuda" in numbers:
        torch.cuda.set_rng_state(numbers["cuda"])


def load_last(options: argparse.Namespace) -> dict[str, Any]:
    """The state in OUTPUT/last.pt to resume from; empty for a new training."""
    last, state = options.output / "last.pt", dict[str, Any]()
    if options.resume and last.is_file():
        state = torch.load(last, map_location="cpu", weights_only=True)
    elif not options.synthetic and last.is_file():
        raise SystemExit(f"{last} is there: go on from it by --resume, or take another --output")
    # Every rank must resume from the same step, and with as many images in a step.
    expected = state.get("step", 0), global_batch()
    ranks: list[Any] = [(expected[0], state.get("images", expected[1]))] * SETTING.world_size
    if SETTING.world_size > 1:
        distributed.all_gather_object(ranks, ranks[0])
    if set(ranks) != {expected}:
        raise SystemExit(f"{last} is of another step, or not everywhere: take another --output")
    return state


def random_states(device_type: str) -> list[Any]:
    """The states of each rank's random numbers, which mix images and drop paths."""
    state = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if device_type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    states: list[Any] = [state] * SETTING.world_size
    if SETTING.world_size > 1:
        distributed.all_gather_object(states, state)
    return states


def save_state(state: dict[str, Any], file: Path) -> None:
    """Write `file` completely or not at all: an interruption leaves the previous file as it was."""
    partial_file = file.with_suffix(".part")
    try:
        torch.save(state, partial_file)
        partial_file.replace(file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
        partial_file.unlink(missing_ok=True)
        print(f"{file} could not be written, and training goes on: {error}", flush=True)


class Log:
    """Prints a line for people, and appends one of JSON to OUTPUT/log.jsonl. Only rank 0 does."""

    def __init__(self, options: argparse.Namespace, rank: int, steps: int) -> None:
        self.options, self.rank, self.steps = options, rank, steps

    def __call__(self, text: str, step: int, epoch: float, **values: float) -> None:
        if self.rank != 0:
            return
        print(f"step {step}/{self.steps}  {text}", flush=True)
        if not self.options.synthetic:
            self.options.output.mkdir(parents=True, exist_ok=True)
            with (self.options.output / "log.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")


def start_profiler(folder: Path) -> torch.profiler.profile:
    """Trace steps 3 to 5 into `folder`. Open the trace at ui.perfetto.dev."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profile_of: profile_of.export_chrome_trace(
            str(folder / "trace.json.gz")
        ),
    )
    profile.start()
    return profile


def watch_context(options: argparse.Namespace) -> Any:
    """The context of `planner.watch`, which compares the training with its plan; of None without
    --watch."""
    if options.watch is None:
        return nullcontext()
    import planner  # only --watch needs it

    return planner.watch(options.watch, options.output)


# ---- Training -----------------------------------------------------------------------------------


def build_step(options: argparse.Namespace, device: torch.device, rank: int, task: Any) -> Step:
    """The step: the model on its device, distributed and compiled, with its optimizers."""
    random.seed(options.seed + rank)
    torch.manual_seed(options.seed)  # the same weights on every rank
    set_up_torch(SETTING)
    module = (build_model(options.pretrained) if task is None else task.module()).train()
    find_blocks = partial(task.blocks, module) if hasattr(task, "blocks") else None
    model = prepare_model(module, SETTING, device, find_blocks)
    torch.manual_seed(options.seed + rank)  # each rank drops and mixes by itself
    parallel_model = distribute(model, SETTING, device, find_blocks)
    compiled_model = compile_model(parallel_model, model, SETTING, find_blocks)
    if hasattr(task, "optimizer"):
        optimizers = [task.optimizer([p for p in model.parameters() if p.requires_grad])]
    else:
        groups = decay_groups(model, options.weight_decay)
        optimizers = build_optimizers(groups, SETTING, options.lr)
    loss = image_loss if task is None else task.loss
    return Step(model, SETTING, loss, optimizers, parallel_model, compiled_model)


def build_batches(
    options: argparse.Namespace, rank: int, task: Any, done: int, meter: Meter
) -> tuple[Iterator[Any], Any, int]:
    """The batches after the first `done` steps; the loader of validation pictures, or None; and the
    number of images of an epoch (without pictures, of --save-every steps)."""
    device, num_images = meter.device, min(options.steps, options.save_every) * global_batch()
    if task is not None:
        return task_batches(task, device), None, num_images
    if options.synthetic:
        return synthetic_batches(device), None, num_images
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - options.workers))
    data, validation, num_images = build_loaders(options, rank, done)
    return device_batches(data, device, True, meter), validation, num_images


def train(options: argparse.Namespace, device: torch.device, rank: int, watch: Any) -> None:
    """Train up to the last step; log, validate and save on the way."""
    task = build_task()
    step = build_step(options, device, rank, task)
    state = load_last(options)
    done, best = state.get("step", 0), state.get("best", 0.0)
    meter = Meter(device)
    batches, validation, num_images = build_batches(options, rank, task, done, meter)
    if watch is not None:
        batches = watch.batches(batches)
    steps = options.steps or -(-options.epochs * num_images // global_batch())
    schedules = [build_schedule(optimizer, steps, options) for optimizer in step.optimizers]
    if state:
        load_state(step, schedules, state, rank)
    del state  # do not keep its weights beside the model's

    log = Log(options, rank, steps)
    profile = start_profiler(options.profile) if options.profile is not None and rank == 0 else None
    meter.restart()
    for number in range(done + 1, steps + 1):
        step.losses = torch.zeros((), device=device)
        step(batches)
        rate = float(schedules[0].get_last_lr()[0])
        for schedule in schedules:
            schedule.step()
        if profile is not None:
            profile.step()
        if watch is not None:
            watch.step(global_batch() // SETTING.world_size)
        meter.add_step(step.losses)

        epoch = number * global_batch() / num_images
        ends_epoch = int(epoch) > (number - 1) * global_batch() // num_images or number == steps
        if number % options.log_every == 0 or ends_epoch:
            text, values = meter.report(number)
            log(f"epoch {epoch:.2f}  rate {rate:.3g}  {text}", number, epoch, rate=rate, **values)
        if ends_epoch:
            paused, is_best = time.perf_counter(), False
            if validation is not None:
                share, text = validate(step, validation, device)
                is_best, best = share >= best, max(best, share)
                log(text, number, epoch, accuracy=share)
            if not options.synthetic:  # every rank takes part, as each may hold a shard
                state = training_state(step, schedules)
                state |= {"step": number, "best": best, "images": global_batch()}
                if rank == 0:
                    save_state(state, options.output / "last.pt")
                    if is_best:
                        save_state(state, options.output / "best.pt")
                del state
            meter.started += time.perf_counter() - paused
            if watch is not None:
                watch.skip(time.perf_counter() - paused)
    if profile is not None:
        profile.stop()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, rate = parser.add_argument, SETTING.learning_rate
    add("data", nargs="?", type=Path, help="folder: train/ and perhaps val/")
    add("--synthetic", action="store_true", help="random images, for --steps")
    add("--pretrained", action="store_true", help="begin with published weights")
    add("--steps", type=int, default=0, help="optimizer steps; 0: by --epochs")
    add("--epochs", type=int, default=SETTING.epochs)
    add("--warmup-epochs", type=int, default=SETTING.warmup_epochs, help="a fifth of all at most")
    add("--lr", type=float, default=rate, help=f"for {global_batch()} {SETTING.unit} a step")
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
        fault = f"{SETTING.world_size} devices need a process each, and {world} were started"
        parser.error(f"{fault}; use the line behind 'Run:' in the block of train.py")
    return options


def parse_trainer_arguments() -> argparse.Namespace:
    """The options for the loop of another trainer, which has no steps of this one."""
    options = parse_arguments()
    if options.synthetic or options.steps or options.profile or options.watch:
        raise SystemExit("Only train.py has --synthetic, --steps, --profile, --watch: use --epochs")
    return options


def main() -> None:
    options = parse_arguments()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
        needs_bf16 = SETTING.precision in ("bf16", "pure-bf16", "fp8")
        if needs_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise SystemExit(f"{device} has no bfloat16: emit it again with --set precision=fp16")
    if SETTING.world_size > 1:
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, device_id=device_id)
    try:
        with watch_context(options) as watch:
            train(options, device, int(os.environ.get("RANK", "0")), watch)
    except KeyboardInterrupt:
        hint = "; --resume goes on from last.pt" if (options.output / "last.pt").is_file() else ""
        raise SystemExit(f"interrupted{hint}") from None
    finally:
        if SETTING.world_size > 1:
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
