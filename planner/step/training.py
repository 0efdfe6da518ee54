"""The training step on shapes: `Step` of `planner/training/train.py`, line by line. Change both.

First the repetition of recorded events, then the batch, the scaler and `ShapeTraining`, then
`run_on_shapes`, which makes the ledger, and last the optimizers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.record import Phase
from planner.ledger.ledger import (
    IN_BACKWARD,
    OPTIMIZER_CALL,
    Allocated,
    CacheFreed,
    Computed,
    Event,
    Freed,
    Ledger,
    PhaseEnded,
    Scratch,
    Tagged,
)
from planner.step.engine import AutocastScope, backward, offload_activations
from planner.step.nn import Module, cross_entropy, move_in_order, name_modules
from planner.step.pointwise import empty_like, mul, scale, take_reduction
from planner.step.ranks import rank_ledger
from planner.step.tensor import Device, GradientCell, Parameter, Tensor, empty, plain_calls

# The second optimizer step, and a step's second micro-batch, run the same operations on new
# storages: their events are those of the first, repeated.

_new_event: Any = tuple.__new__  # a NamedTuple's own takes three times as long


def repeat_events(
    events: Iterable[Any], last_storage: int, step: int
) -> tuple[list[Event], int] | None:
    """`events` repeated, as those of optimizer step `step`, and the number of their last storage:
    the storages that they allocate get new numbers, after `last_storage`. None where a storage
    outlives `events`: then the first time differs from the next."""
    copies: list[Event] = []
    append = copies.append
    new: dict[int, int] = {}  # live storage -> the new one in its place
    for event in events:
        kind = type(event)
        if kind is Computed:
            append(event)
        elif kind is Freed:
            append(_new_event(Freed, (new.pop(event[0], event[0]),)))
        elif kind is Allocated or kind is Scratch:
            last_storage += 1
            new[event[0]] = last_storage
            append(_new_event(kind, (last_storage, *event[1:])))
        elif kind is Tagged:
            storage, category, weight = event
            append(_new_event(Tagged, (new.get(storage, storage), category, weight)))
        elif kind is PhaseEnded:
            append(PhaseEnded(event.phase, step))
        else:
            assert kind is CacheFreed, "a convolution is only tried once"
    return None if new else (copies, last_storage)


def add_to_gradients(
    events: Sequence[Event], offset: int, first: Iterable[tuple[int, int, Sequence[Event]]]
) -> list[Event]:
    """The events of a micro-batch after the first, which adds to the gradients that are there.
    `events` are those of the first one, from the device's event `offset` on, and `first` is its
    `Device.first_gradients`."""
    changed: list[Event] = []
    position = 0
    for start, end, sum_events in first:
        changed += [*events[position : start - offset], *sum_events]
        position = end - offset
    return [*changed, *events[position:]]


BuildOnShapes = Callable[[Device], Module]


@dataclass(frozen=True)
class Batch:
    """Images [B, C, H, W] and targets ([B] int64, or soft [B, classes] fp32) on the device."""

    images: Tensor
    targets: Tensor


def make_batch(device: Device, model: SwinConfig, setting: TrainSetting) -> Batch:
    """The batch of a probe: it is on the device before the step begins."""
    size = (setting.batch_size, model.in_channels, *model.image_size)
    dtype = "bfloat16" if setting.precision == "pure-bf16" else "float32"
    images = empty(device, size, dtype, "images", device.dense_strides(size))
    if setting.loss == "soft-target":
        targets = empty(device, (setting.batch_size, model.num_classes), "float32", "targets")
    else:
        targets = empty(device, (setting.batch_size,), "int64", "targets")
    images.storage.hold()
    targets.storage.hold()
    return Batch(images, targets)


class Scaler:
    """`GradScaler`: two scalars from the first scaling on, and those of a step until `update`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.scale_value: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self.found_inf: Tensor | None = None

    def scale(self, loss: Tensor) -> Tensor:
        if self.scale_value is None:
            self.growth_tracker = empty(self.device, (), "int32", "aten.full")
            self.scale_value = empty(self.device, (), "float32", "aten.full")
        return mul(loss, self.scale_value)

    def unscale(self, optimizer: Optimizer) -> None:
        """`unscale_`: in place over all gradients; `found_inf` is kept."""
        as_double = empty(self.device, (), "float64", "aten._to_copy")
        inverse = empty(self.device, (), "float64", "aten.reciprocal")
        del as_double
        inverse_scale = empty(self.device, (), "float32", "aten._to_copy")
        del inverse
        self._unscale_gradients(optimizer, inverse_scale)

    def _unscale_gradients(self, optimizer: Optimizer, inverse_scale: Tensor) -> None:
        """`_unscale_grads_`: each scalar is copied once more for the device of the gradients."""
        found_inf = empty(self.device, (), "float32", "aten.full")
        found_inf_there = empty(self.device, (), "float32", "aten._to_copy")
        inverse_scale_there = empty(self.device, (), "float32", "aten._to_copy")
        optimizer.cost("aten._amp_foreach_non_finite_check_and_unscale_", 1, 1)
        self.found_inf = found_inf_there
        del found_inf, inverse_scale_there

    def step(self, optimizer: Optimizer) -> None:
        """`GradScaler.step`, as if no gradient was infinite."""
        if optimizer.is_fused:
            self._step_fused(optimizer)
            return
        if self.found_inf is None:
            self.unscale(optimizer)
        optimizer.step()

    def _step_fused(self, optimizer: Optimizer) -> None:
        """The kernel itself unscales: it gets copies of both scalars, which live until it is
        done."""
        is_unscaled = self.found_inf is not None
        if not is_unscaled:
            ones = empty(self.device, (), "float32", "aten.full")
            self._unscale_gradients(optimizer, ones)
            del ones
        found_inf = empty(self.device, (), "float32", "aten.add")
        grad_scale = None if is_unscaled else empty(self.device, (), "float32", "aten.mul")
        optimizer.step()
        del found_inf, grad_scale

    def update(self) -> None:
        self.found_inf = None


class ShapeTraining:
    """A model, its optimizer and a batch; `step` is one whole optimizer step on shapes."""

    def __init__(self, device: Device, module: Module, setting: TrainSetting, batch: Batch) -> None:
        self.device = device
        self.module = module
        self.setting = setting
        self.batch = batch
        parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizers: dict[int, Optimizer] = {}
        if setting.optimizer_in_backward:
            self.optimizers = {id(p.cell): make_optimizer(device, [p], setting) for p in parameters}
            device.on_gradient = self.step_once
        self.optimizer = make_optimizer(device, parameters, setting)
        self.scaler = Scaler(device) if setting.precision == "fp16" else None
        self.average = self.copy_weights() if setting.ema else None
        self.num_steps = 0

    def copy_weights(self) -> list[Tensor]:
        """`p.detach().clone()` of all parameters, frozen ones too."""
        copies = [empty_like(p, "aten.clone") for p in self.module.parameters()]
        for copy in copies:
            copy.storage.assign("optimizer_state")
        return copies

    def step(self) -> None:
        self.micro_steps()
        self.update()
        self.end_phase("optimizer")
        if not self.setting.optimizer_in_backward:
            self.optimizer.zero_grad(self.setting.zero_grad_to_none)
        self.end_phase("zero_grad")
        self.num_steps += 1

    def step_twice(self) -> None:
        """Two steps. The second repeats the first, where it can, but for the optimizer's step: this
        runs once more on the same gradients, now that the optimizer's state is there."""
        device = self.device
        start = len(device.events)
        self.micro_steps()
        micro_steps_end = len(device.events)
        self.update()
        self.end_phase("optimizer")
        end, num_storages = len(device.events), device.num_storages
        self.update()
        self.end_phase("optimizer")
        second_update = device.events[end:]
        del device.events[end:]
        device.num_storages = num_storages
        self.optimizer.zero_grad(self.setting.zero_grad_to_none)
        self.end_phase("zero_grad")
        self.num_steps += 1
        zero_grad = device.events[end:]
        micro_steps = device.events[start:micro_steps_end]
        if not self.repeat([*micro_steps, *second_update, *zero_grad]):
            self.step()
            return
        self.num_steps += 1

    def repeat(self, events: Iterable[Event]) -> bool:
        """Repeats `events` in the current step. Returns whether it could."""
        device = self.device
        repeated = repeat_events(events, device.num_storages, self.num_steps)
        if repeated is not None:
            copies, device.num_storages = repeated
            device.events += copies
        return repeated is not None

    @property
    def is_repeatable(self) -> bool:
        """Whether the second step does what the first one did, but for the optimizer's state. It
        does not where a scaler makes its scale in the first backward, or where gradients stay and
        are added to."""
        setting = self.setting
        frees_gradients = setting.zero_grad_to_none and not setting.optimizer_in_backward
        return self.scaler is None and frees_gradients

    def end_phase(self, phase: Phase) -> None:
        self.device.mark(phase, self.num_steps)

    def micro_steps(self) -> None:
        """All micro-batches of a step. Those after the first repeat it, where they can, but add
        their gradients to those that are there."""
        device, start = self.device, len(self.device.events)
        records_gradients = self.is_repeatable and self.setting.accumulate > 1
        device.first_gradients = [] if records_gradients else None
        self.micro_step()
        first, device.first_gradients = device.first_gradients, None
        later_events = add_to_gradients(device.events[start:], start, first or ())
        for _ in range(1, self.setting.accumulate):
            if not (first and self.repeat(later_events)):
                self.micro_step()

    def micro_step(self) -> None:
        loss = self.forward()
        self.end_phase("forward")
        self.backward(loss if self.scaler is None else self.scaler.scale(loss))
        del loss
        self.end_phase("backward")

    def forward(self) -> Tensor:
        with AutocastScope(self.device, self.setting.autocast_dtype), self.offload_context():
            loss = self.loss(self.module(self.batch.images))
        if self.setting.accumulate > 1:
            loss = scale(loss, "aten.div")
        return loss

    def loss(self, logits: Tensor) -> Tensor:
        smoothed = self.setting.loss == "label-smoothing"
        return cross_entropy(logits, self.batch.targets, smoothed)

    def offload_context(self) -> AbstractContextManager[None]:
        if self.setting.offload == "none":
            return nullcontext()
        return offload_activations(self.device, (self.batch.images, self.batch.targets))

    def backward(self, loss: Tensor) -> None:
        ones = empty(self.device, (), loss.dtype, "aten.ones_like")
        backward(loss, ones)
        del ones

    def step_once(self, cell: GradientCell) -> None:
        """The hook of one weight: updates the weight and drops its gradient."""
        self.device.scope = IN_BACKWARD
        self.device.compute(OPTIMIZER_CALL, "pointwise", "float32", 0, 0, 0)
        self.optimizers[id(cell)].step()
        cell.grad = None

    def update(self) -> None:
        if self.setting.clip_grad:
            if self.scaler is not None:
                self.scaler.unscale(self.optimizer)
            clip_gradients(self.optimizer)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.setting.optimizer_in_backward:
            self.optimizer.step()
        if self.average is not None:
            self.optimizer.cost("aten._foreach_lerp_", 1, 2)


def run_on_shapes(
    build: BuildOnShapes, model: SwinConfig, setting: TrainSetting, in_place_sums: bool = True
) -> Ledger:
    """The ledger of building the model on shapes and of two optimizer steps; the second is the
    steady one. With several GPUs it is that of one rank (`planner.step.ranks`).

    Lifetimes are those of reference counts: so calls are CPython's, and the cyclic collector is
    off. It would only cost time (a test shows that it finds nothing).
    """
    device = Device(in_place_sums, "bfloat16" if setting.precision == "pure-bf16" else "float32")
    device.channels_last = setting.memory_format == "channels_last"
    device.tried_convolutions = set() if setting.cudnn_benchmark else None
    with plain_calls(), _disable_collector():
        module = build(device)
        name_modules(module)
        move_in_order(module, device)
        training = ShapeTraining(device, module, setting, make_batch(device, model, setting))
        device.mark("build", 0)
        if training.is_repeatable:
            training.step_twice()
        else:
            for _ in range(2):
                training.step()
        num_parameters = sum(p.numel for p in module.parameters())
        blocks = {
            part.path: [weight.storage.ident for weight in part.parameters()]
            for part in module.descendants() if part.is_block
        }  # fmt: skip
        events = tuple(device.events)
        device.on_gradient = None  # device and optimizer would keep each other alive
        del training, module
    ledger = Ledger(events, setting.batch_size, num_parameters)
    return rank_ledger(ledger, setting, blocks)


@contextmanager
def _disable_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Optimizers: parameters, their state, and the cost of its kernels; and the clipping of gradients
# before the step (`torch.nn.utils.clip_grad_norm_`).
#
# Each is transcribed from torch.optim (2.13; lion from timm.optim) with the same locals, since a
# tensor lives as long as a local refers to it. foreach is torch's default on CUDA: its temporaries
# are whole lists, one tensor per parameter; fused works in place. `step` scalars live on the host,
# where they are not counted, unless the implementation is fused.


class Optimizer:
    """An optimizer: its state for each parameter, in PyTorch's names, and its step."""

    def __init__(self, device: Device, parameters: Sequence[Parameter], setting: TrainSetting):
        self.device = device
        self.parameters = list(parameters)
        self.setting = setting
        self.state: dict[str, list[Tensor]] = {}
        self.numel = sum(p.numel for p in parameters)
        self.num_bytes = sum(p.num_bytes for p in parameters)

    def step(self) -> None:
        """One update. The first one makes the state."""
        raise AssertionError("a subclass has it")

    @property
    def is_fused(self) -> bool:
        return self.setting.optimizer_implementation == "fused"

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.cell.grad = None
        if not set_to_none:
            self.cost("aten._foreach_zero_", 1, 0)

    def make_state(self, *names: str) -> None:
        """`zeros_like` of every parameter for every name, parameter by parameter.

        A fused implementation has its `step` on the device too, one fp32 scalar per parameter.
        """
        self.state = {name: [] for name in ("step", *names)}
        for parameter in self.parameters:
            if self.is_fused:
                scalar = empty(self.device, (), "float32", "aten.zeros")
                self.state["step"].append(self.keep(scalar))
            for name in names:
                self.state[name].append(self.keep(empty_like(parameter, "aten.zeros_like")))

    def keep(self, tensor: Tensor) -> Tensor:
        tensor.storage.assign("optimizer_state")
        return tensor

    def temporaries(self, label: str) -> list[Tensor]:
        """A list of new tensors, one per parameter, as a foreach operation returns it."""
        self.cost(label, 1, 1)
        return [empty_like(parameter, label) for parameter in self.parameters]

    def cost(self, name: str, num_written: int, num_read: int) -> None:
        """Records kernels that write and read so many tensors per parameter, each of its size."""
        num_bytes = self.num_bytes * (num_written + num_read)
        kernels = -(-len(self.parameters) // TENSORS_PER_KERNEL)
        self.device.compute(name, "pointwise", "float32", self.numel, num_bytes, kernels)


# The most tensors that one foreach kernel takes
# (depth_to_max_tensors in aten/src/ATen/native/cuda/MultiTensorApply.cuh, for two or three lists).
TENSORS_PER_KERNEL = 64


class Adam(Optimizer):
    """Adam and AdamW (torch/optim/adam.py): exp_avg and exp_avg_sq."""

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg", "exp_avg_sq")
        if self.is_fused:
            self.cost("aten._fused_adamw_", 3, 4)
        else:
            self._foreach()

    def _foreach(self) -> None:
        """`_foreach_sqrt` returns a list the size of the parameters; all else is in place."""
        if self.setting.optimizer_family == "adamw":
            self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_lerp_", 1, 2)
        self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_addcmul_", 1, 2)
        exp_avg_sq_sqrt = self.temporaries("aten._foreach_sqrt")
        self.cost("aten._foreach_div_", 1, 1)
        self.cost("aten._foreach_add_", 1, 1)
        self.cost("aten._foreach_addcdiv_", 1, 3)
        del exp_avg_sq_sqrt


class Lion(Optimizer):
    """timm/optim/lion.py, 1.0.31: only exp_avg; `lerp` makes the updates.

    On a GPU with 64 MiB of L2 or more, timm runs foreach in chunks of parameters: the updates of
    one chunk are alive at a time. A ledger knows no GPU and has them all, which is an upper bound.
    """

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg")
        self.cost("aten._foreach_mul_", 1, 1)
        updates = self.temporaries("aten._foreach_lerp")
        self.cost("aten.sign_", 1, 1)
        self.cost("aten._foreach_add_", 1, 2)
        self.cost("aten._foreach_lerp_", 1, 2)
        del updates


class SGD(Optimizer):
    """torch/optim/sgd.py: in place, with one momentum buffer per parameter."""

    def step(self) -> None:
        if not self.state:
            label = "aten.empty_like" if self.is_fused else "aten.clone"
            buffers = [self.keep(empty_like(p, label)) for p in self.parameters]
            self.state["momentum_buffer"] = buffers
        if self.is_fused:
            self.cost("aten._fused_sgd_", 2, 3)
            return
        self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_add_", 1, 2)
        self.cost("aten._foreach_add_", 1, 2)


def clip_gradients(optimizer: Optimizer) -> None:
    """One norm per gradient, stacked and reduced; then all gradients are scaled in place.

    The caller drops the norm that torch's function returns.
    """
    device = optimizer.device
    dtype = optimizer.parameters[0].dtype

    def scalar(label: str) -> Tensor:
        return empty(device, (), dtype, label)

    norms = [scalar("aten._foreach_norm") for _ in optimizer.parameters]
    optimizer.cost("aten._foreach_norm", 0, 1)
    stacked = empty(device, (len(norms),), dtype, "aten.stack")
    total = scalar("aten.linalg_vector_norm")
    take_reduction(stacked, (0,), "aten.linalg_vector_norm")
    del norms, stacked
    shifted = scalar("aten.add")
    inverse = scalar("aten.reciprocal")
    coefficient = scalar("aten.mul")
    del shifted, inverse
    clamped = scalar("aten.clamp")
    optimizer.cost("aten._foreach_mul_", 1, 1)
    del coefficient, clamped, total


# The families with a foreach or fused step here. Steps with all other optimizers are recorded.
FAMILIES: dict[str, type[Optimizer]] = {
    "adamw": Adam, "adam": Adam, "sgd": SGD, "lion": Lion,
}  # fmt: skip


def has_step(setting: TrainSetting) -> bool:
    """Whether the optimizer of `setting` has its step here."""
    is_batched = setting.optimizer_implementation in ("foreach", "fused")
    return is_batched and setting.optimizer_family in FAMILIES and not setting.needs_torchao


def make_optimizer(
    device: Device, parameters: Sequence[Parameter], setting: TrainSetting
) -> Optimizer:
    """The optimizer of `setting`, of a family in `FAMILIES`."""
    setting.check_optimizer()
    return FAMILIES[setting.optimizer_family](device, parameters, setting)
