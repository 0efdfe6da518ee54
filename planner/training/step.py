"""The training step that is probed, recorded and transcribed: one definition for all three.

The step on shapes (`planner.step.training`) is this file's mirror line by line; change both.
Needs torch: imported only by what runs a real or a fake module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.core.errors import ContractError, PlannerError, UnsupportedError
from planner.core.schema import TrainSetting
from planner.core.schema.setting import CLIP_NORM, EMA_DECAY, FUSED_FAMILIES, OPTIMIZER_CLASSES
from planner.libraries.limits import FLOAT8_LEAST, FLOAT8_MULTIPLE, multiplies_in_8_bits
from planner.training import offloading
from planner.training.offloading import offload_activations
from planner.training.parallel.spread import Engine, Spread
from planner.training.tasks.contract import Task
from planner.training.tasks.trees import tensors_of

# "forward", "backward", "optimizer", "zero_grad" or "validation": the phase that has just ended
Phase = str
OnPhase = Callable[[Phase], None]


def lay_out(module: nn.Module, setting: TrainSetting) -> None:
    """Puts the weights of `module` into the setting's memory format, and linear layers that
    multiply in 8 bits in the place of its own."""
    if setting.precision == "fp8":
        use_float8(module)
    if setting.memory_format != "channels_last":
        return
    if all(p.dim() != 5 for p in module.parameters()):
        to: Any = module.to  # whose stub has the memory format alone from torch 2.15 on
        to(memory_format=torch.channels_last)
        return
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():  # which `to` refuses, of five dimensions
        if parameter.dim() in formats:
            wanted = formats[parameter.dim()]
            parameter.data = parameter.data.contiguous(memory_format=wanted)


def use_float8(module: nn.Module) -> None:
    """Puts torchao's Float8Linear in the place of each linear layer that may multiply in 8 bits, by
    torchao's default recipe: one scale a tensor, found anew each time. Weights stay as they are.

    Raises PlannerError without torchao, UnsupportedError where no layer may.
    """
    with _importing("torchao", "precision fp8"):
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

    def may_convert(layer: nn.Module, name: str) -> bool:
        return multiplies_in_8_bits(*layer.weight.shape)  # type: ignore[misc]

    convert_to_float8_training(module, module_filter_fn=may_convert)
    if not any(isinstance(layer, Float8Linear) for layer in module.modules()):
        raise UnsupportedError(
            f"precision fp8 is for linear layers whose sides are multiples of {FLOAT8_MULTIPLE} "
            f"and at least {FLOAT8_LEAST}, and this model has none.",
            "Set precision=bf16.",
        )


def float8_notes(module: nn.Module, setting: TrainSetting) -> tuple[str, ...]:
    """What became of the linear layers of a converted module, and what their casts cost."""
    from torchao.float8.float8_linear import Float8Linear

    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    converted = sum(isinstance(layer, Float8Linear) for layer in linear)
    notes = [f"{converted} of {len(linear)} linear layers multiply in 8 bits, by torchao"]
    if setting.compile == "off":
        notes.append(
            "every cast to 8 bits runs eleven operations one by one (torchao 0.18), which is meant "
            "to be compiled (compile=default)"
        )
    return tuple(notes)


def make_optimizer(setting: TrainSetting, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `setting`: torch's own, but for lion (timm's) and adamw-8bit (torchao's).

    Raises UnsupportedError for an implementation that there is not.
    """
    setting.check_optimizer()
    if setting.optimizer_implementation == "8bit":
        return import_adamw_8bit()(parameters, lr=1e-4)
    implementation = setting.optimizer_implementation
    given: dict[str, Any] = {"lr": 1e-4, "foreach": implementation == "foreach"}
    family = setting.optimizer_family
    if family in FUSED_FAMILIES:
        given["fused"] = implementation == "fused"
    if family == "sgd":
        given["momentum"] = 0.9
    if family == "lion":
        make, given["lr"] = import_lion(), 1e-5
    else:
        make = getattr(torch.optim, OPTIMIZER_CLASSES[family])
    if setting.offload_optimizer != "none" and offloading.is_on_device(parameters[0]):
        return offload_optimizer(setting, parameters, partial(make, **given))
    made: torch.optim.Optimizer = make(parameters, **given)
    return made


def offload_optimizer(
    setting: TrainSetting,
    parameters: list[nn.Parameter],
    make: Callable[..., torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """torchao's CPUOffloadOptimizer. Raises PlannerError where torchao cannot be imported."""
    with _importing("torchao", "an optimizer on the host"):
        from torchao.optim import CPUOffloadOptimizer
    frees = setting.offload_optimizer == "state-and-gradients"
    made: torch.optim.Optimizer = CPUOffloadOptimizer(parameters, make, offload_gradients=frees)
    return made


def import_lion() -> Callable[..., torch.optim.Optimizer]:
    """timm's Lion. Raises PlannerError where timm cannot be imported."""
    from planner.libraries.missing_operators import declare_missing_operators

    declare_missing_operators()
    with _importing("timm", "the optimizer lion"):
        from timm.optim import Lion
    found: Callable[..., torch.optim.Optimizer] = Lion
    return found


def import_adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    """torchao's AdamW8bit. Raises PlannerError where torchao cannot be imported."""
    with _importing("torchao", "the optimizer adamw-8bit"):
        from torchao.optim import AdamW8bit
    found: Callable[..., torch.optim.Optimizer] = AdamW8bit
    return found


@contextmanager
def _importing(package: str, what: str) -> Iterator[None]:
    """Within, `package` is imported, of which `what` is a part; torchao would log each of its
    kernels that does not load here, and none is needed. Raises PlannerError where it is missing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except ImportError as error:
        raise PlannerError(
            f"{what} is {package}'s, which cannot be imported: {error}.",
            f"Install it with: pip install 'planner[{package}]'",
        ) from error
    finally:
        logging.disable(before)


def step_in_backward(
    parameters: Iterable[nn.Parameter],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """An optimizer for each of `parameters`, which steps as soon as backward has its gradient, and
    drops it. Each lives as long as it is held: a parameter that held its own would be a cycle."""
    optimizers = []
    for parameter in parameters:
        optimizer = make([parameter])
        parameter.register_post_accumulate_grad_hook(partial(_step_once, ref(optimizer)))
        optimizers.append(optimizer)
    return optimizers


def _step_once(held: ref[torch.optim.Optimizer], parameter: Tensor) -> None:
    optimizer = held()
    assert optimizer is not None, "the optimizers of weights that are trained are kept"
    optimizer.step()
    parameter.grad = None


@contextmanager
def one_optimizer(ours: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Within, no other optimizer steps: its state would be counted by nobody.

    Raises ContractError where one does, as in the loss of a GAN.
    """

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(optimizer is known for known in ours):
            raise ContractError(
                f"the step has an optimizer of its own ({type(optimizer).__name__}), which steps "
                "while the loss is computed, beside the one that trains the module.",
                "Write a task for each network, the others frozen; 'planner emulate' says what "
                "your own script takes as it is, with all its optimizers.",
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


class Training:
    """A module, its optimizer and a batch on one device; `step` is one whole optimizer step.

    `task` computes the loss of `batch`, which it made, and the optimizer where it has one of its
    own. `spread` is the module over several ranks: then this is the step of one of them. `compiled`
    is what is called in the place of the module, or of the one that was spread.
    """

    def __init__(
        self,
        module: nn.Module,
        setting: TrainSetting,
        task: Task,
        batch: Any,
        compiled: Callable[..., object] | None = None,
        spread: Spread | None = None,
    ) -> None:
        self.module = module
        self.spread = spread
        called = module if spread is None else spread.module
        # Not `or`: a compiled module has a length, and asking this one for it raises.
        self.call = called if compiled is None else compiled
        self.setting = setting
        self.task = task
        self.batch = batch
        self.device = next(tensors_of(batch)).device
        self.device_type = self.device.type
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        make = getattr(task, "optimizer", None) or partial(make_optimizer, setting)
        self.optimizers: list[torch.optim.Optimizer] = (
            step_in_backward(self.parameters, make)
            if setting.optimizer_in_backward
            else [make(self.parameters)]
        )
        self.scaler = (
            torch.amp.GradScaler(self.device_type) if setting.precision == "fp16" else None
        )
        self.engine = spread if isinstance(spread, Engine) else None
        if self.engine is not None:
            self.call = self.engine.begin(self.optimizer)
            self.scaler = self.engine.scaler
        self.ema = [p.detach().clone() for p in module.parameters()] if setting.ema else None

    def step(self, on_phase: OnPhase = lambda phase: None) -> None:
        """One optimizer step over `accumulate` micro-batches; `on_phase` hears each phase end.

        `forward` and `backward` end once per micro-batch. At the end of `forward` the logits are
        released and the loss is alive; at the end of `optimizer` the gradients still are. With
        `optimizer_in_backward` these are gone by the end of `backward`, and the two phases after it
        hold only the average of the weights, where there is one.
        """
        for index in range(self.setting.accumulate):
            with self.summing(is_last=index == self.setting.accumulate - 1):
                self.micro_step(on_phase)
        self.optimizer_step()
        on_phase("optimizer")
        if self.engine is None and not self.setting.optimizer_in_backward:
            self.optimizer.zero_grad(set_to_none=self.setting.zero_grad_to_none)
        on_phase("zero_grad")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one of all weights, where each weight has none of its own."""
        (optimizer,) = self.optimizers
        return optimizer

    def micro_step(self, on_phase: OnPhase) -> None:
        with self.attending(), one_optimizer(self.optimizers):
            self._micro_step(on_phase)

    def attending(self) -> AbstractContextManager[object]:
        """Around forward, and backward, which may run it again: with eager attention no fused
        kernel attends, also where the model's library has no switch that would say so."""
        if self.setting.attention != "eager":
            return nullcontext()
        return sdpa_kernel(SDPBackend.MATH)

    def _micro_step(self, on_phase: OnPhase) -> None:
        loss = self.forward()
        on_phase("forward")
        if self.engine is not None:
            self.engine.backward(loss)
        elif self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        del loss
        on_phase("backward")

    def summing(self, is_last: bool) -> AbstractContextManager[object]:
        """Around a micro-batch: whether its backward sums gradients over the ranks."""
        if self.spread is None:
            return nullcontext()
        return self.spread.micro_batch(is_last or self.setting.gradient_sync == "every")

    def forward(self) -> Tensor:
        """The scalar loss of one micro-batch, divided by the number of them."""
        with self.autocast(), self.offloading():
            loss = self.loss()
        if self.setting.accumulate > 1:
            loss = loss / self.setting.accumulate
        return loss

    def loss(self) -> Tensor:
        return self.task.loss(self.call, self.batch)

    def optimizer_step(self) -> None:
        if self.engine is not None:
            self.engine.step()
        else:
            self._update()
        if self.ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.ema, list(self.module.parameters()), 1 - EMA_DECAY)

    def _update(self) -> None:
        takes_them = self.setting.optimizer_in_backward or self.setting.offload_optimizer != "none"
        if not takes_them and all(p.grad is None for p in self.parameters):
            raise ContractError(
                "the loss depends on no trained parameter of the module that module() returned.",
                "Compute it with the module that is given to loss(module, batch).",
            )
        if self.setting.clip_grad:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.setting.optimizer_in_backward:
            self.optimizer.step()

    def validate(self, on_phase: OnPhase = lambda phase: None, batch: Any = None) -> None:
        """A forward as between epochs: evaluation mode, no gradients, hard labels.

        `validation_batch_size` items (`batch`, where it is given) come to the device and go again;
        the training batch stays.
        """
        if batch is None:
            make = getattr(self.task, "validation_batch", self.task.batch)
            batch = make(self.setting.validation_batch_size, self.device)
        compute = getattr(self.task, "validation_loss", self.task.loss)
        self.module.eval()
        with torch.no_grad(), self.autocast(), self.attending():
            loss = compute(self.call, batch)
        self.module.train()
        del batch, loss
        on_phase("validation")

    def offloading(self) -> AbstractContextManager[object]:
        """Keeps what backward needs on the host. A step on the CPU has it there already: nothing
        moves, and its memory and time are those without. That it runs is all that this shows."""
        if self.setting.offload == "none":
            return nullcontext()
        kept = (*self.module.parameters(), *self.module.buffers(), *tensors_of(self.batch))
        return offload_activations(kept)

    def autocast(self) -> AbstractContextManager[object]:
        name = self.setting.autocast_dtype
        if name is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=getattr(torch, name))
