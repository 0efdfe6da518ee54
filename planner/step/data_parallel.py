"""`DistributedDataParallel` on shapes: a module whose gradients cross between devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.core.collectives import Collective
from planner.core.schema import TrainSetting
from planner.ledger.kinds import kind_of
from planner.step.broadcasts import States
from planner.step.nn import Module
from planner.step.pointwise import clone
from planner.step.reducer import Reducer, Weight
from planner.step.tensor import Device, GradientCell, Parameter, Tensor, empty


class Cells:
    """The gradients of `parameters` (`reducer.Gradients`)."""

    def __init__(self, device: Device, parameters: list[Parameter]) -> None:
        self.device = device
        self.parameters = parameters

    def make(self, numel: int, dtype: str, label: str) -> Tensor:
        return empty(self.device, (numel,), dtype, label)

    def keep(self, flat: Tensor) -> None:
        flat.storage.assign("gradients")

    def compute(self, name: str, dtype: str, num_bytes: int) -> None:
        self.device.compute(name, kind_of(name.removeprefix("aten.")), dtype, 0, num_bytes)

    def is_there(self, index: int) -> bool:
        return self.parameters[index].cell.grad is not None

    def is_in(self, index: int, flat: Tensor) -> bool:
        gradient = self.parameters[index].cell.grad
        return gradient is not None and gradient.storage is flat.storage

    def put_in(self, index: int, flat: Tensor, offset: int) -> None:
        parameter = self.parameters[index]
        view = Tensor(flat.storage, parameter.shape, parameter.strides, parameter.dtype)
        parameter.cell.grad = view

    def send(self, collective: Collective, num_bytes: int, dtype: str, *, follows: bool) -> int:
        return self.device.send(collective, num_bytes, dtype, "world", follows=follows)

    def wait(self, handle: int) -> None:
        self.device.wait(handle)


class DataParallel:
    """`module` and its reducer; called in the module's place."""

    def __init__(self, device: Device, module: Module, setting: TrainSetting) -> None:
        self.device = device
        self.module = module
        trained = [p for p in module.parameters() if p.requires_grad]
        cells = Cells(device, trained)
        self.states = States(cells, weights(buffers_of(module)), setting.ddp_broadcast_buffers)
        self.states.at_build(weights(module.parameters()))
        self.reducer = Reducer(cells, weights(trained), setting)
        self.places = {id(p.cell): index for index, p in enumerate(trained)}
        device.on_gradient = self.take

    def __call__(self, images: Tensor) -> Tensor:
        """`DistributedDataParallel.forward`."""
        if self.device.grad_enabled:
            self.reducer.begin()
        self.states.at_forward()
        output: Tensor = self.module(images)
        self.states.is_stale = self.device.grad_enabled and self.reducer.syncs
        if self.states.is_stale:
            self.reducer.expect()
        return clone(output) if self.reducer.passes_through_sink else output

    def take(self, cell: GradientCell) -> None:
        """A parameter's gradient is ready."""
        self.reducer.ready(self.places[id(cell)])


def weights(tensors: Iterable[Tensor]) -> list[Weight]:
    return [Weight(t.numel, t.dtype, t.num_bytes) for t in tensors]


def buffers_of(module: Module) -> Iterator[Tensor]:
    """`module.buffers()`."""
    for part in module.descendants():
        for value in vars(part).values():
            if isinstance(value, Tensor) and value.storage.category == "buffers":
                yield value
