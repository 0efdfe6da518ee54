"""What autograd records on shapes: nodes, what they save for backward, and when that dies.

`engine.py` runs them backward. Lifetimes are those of torch/csrc/autograd (saved_variable.cpp,
functions/accumulate_grad.h).
"""

import weakref
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

from planner.ledger.ledger import Freed
from planner.step.tensor import Device, GradientCell, Parameter, Shape, Storage, Tensor, empty

Gradients = tuple[Tensor | None, ...]
Backward = Callable[["Node", "list[Tensor | None]"], Gradients]
Edge = tuple["Node", int]
LAST = 1 << 62  # the sequence number of AccumulateGrad: it runs as soon as it is ready


class Saved:
    """A tensor kept for backward: as it is, or as what the innermost pack hook made of it."""

    __slots__ = ("packed", "storage", "unpack_hook")

    def __init__(self, tensor: Tensor) -> None:
        hooks = tensor.storage.device.saved_tensor_hooks
        self.storage: Storage | None = None
        self.unpack_hook: Callable[[Any], Tensor] | None = None
        self.packed: Any = tensor.detach()
        if hooks:
            pack, self.unpack_hook = hooks[-1]
            self.packed = pack(self.packed)
        else:
            self.storage = tensor.storage
            tensor.storage.hold()

    def unpack(self) -> Tensor:
        if self.unpack_hook is not None:
            return self.unpack_hook(self.packed)
        alias: Tensor = self.packed.detach()
        return alias

    def release(self) -> None:
        self.packed = self.unpack_hook = None
        if self.storage is not None:
            self.storage.let_go()
            self.storage = None


class Node:
    """One step of backward: `run(node, gradients of its outputs) -> gradients of its inputs`."""

    __slots__ = (
        "__weakref__", "data", "edges", "metadata", "name", "run", "saved", "scope",
        "sequence",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        name: str,
        edges: tuple[Edge | None, ...],
        run: Backward,
        data: Any = None,
    ) -> None:
        self.name = name
        self.edges = edges
        self.run = run
        self.data = data
        self.saved: list[Saved] = []
        self.metadata: list[tuple[Shape, str]] = []
        self.scope = device.scope
        self.sequence = device.next_sequence
        device.next_sequence += 1

    def needs(self, index: int) -> bool:
        """Whether input `index` needs a gradient (`should_compute_output`)."""
        return self.edges[index] is not None

    def unpack(self, index: int) -> Tensor:
        return self.saved[index].unpack()

    def release(self) -> None:
        for saved in self.saved:
            saved.release()
        self.saved.clear()


class AccumulateGrad(Node):
    """Adds into a leaf's gradient: steals the first where it can, then adds in place."""

    __slots__ = ("cell", "strides")

    def __init__(self, parameter: Parameter) -> None:
        device = parameter.device
        sequence = device.next_sequence
        super().__init__(device, "AccumulateGrad", (), AccumulateGrad.accumulate)
        device.next_sequence = sequence
        self.sequence = LAST
        self.cell: GradientCell = parameter.cell
        self.strides = parameter.strides
        self.metadata.append((parameter.shape, parameter.dtype))

    @staticmethod
    def accumulate(node: Node, gradients: list[Tensor | None]) -> Gradients:
        assert isinstance(node, AccumulateGrad)
        new = gradients.pop()
        assert new is not None
        if node.cell.grad is None:
            device = new.storage.device
            begun, is_shared = len(device.events), getrefcount(new.storage) > 2
            # getrefcount counts its own argument and the name `new`.
            stolen = getrefcount(new) == 2 and _same_layout(new, node.strides)
            node.cell.grad = new.detach() if stolen else _clone_as(new, node.strides)
            if node.cell.weight:
                node.cell.grad.storage.assign("gradients", node.cell.weight)
                if device.first_gradients is not None:
                    freed = node.cell.grad.storage.ident if stolen else None
                    _note_first(device, begun, node.cell.grad, freed)
                    if stolen and is_shared:
                        device.first_gradients = None
        else:
            total = node.cell.grad
            pointwise_cost(total.device, "aten.add_", total, 2)
        hook = node.cell.grad.device.on_gradient
        if hook is not None and node.cell.weight:
            hook(node.cell)
        return ()


def _note_first(device: Device, begun: int, gradient: Tensor, freed: int | None) -> None:
    """The events from `begun` on made a weight's first gradient; a further one is added to it, and
    then its own storage is `freed`."""
    ended = len(device.events)
    pointwise_cost(device, "aten.add_", gradient, 2)
    added = [device.events.pop(), *([] if freed is None else [Freed(freed)])]
    assert device.first_gradients is not None
    device.first_gradients.append((begun, ended, added))


def _same_layout(gradient: Tensor, strides: Shape) -> bool:
    """`obeys_layout_contract`: the strides equal the leaf's, dimensions of size 1 excused."""
    return all(
        a == b or size == 1
        for size, a, b in zip(gradient.shape, gradient.strides, strides, strict=True)
    )


def _clone_as(gradient: Tensor, strides: Shape) -> Tensor:
    copy = empty(gradient.device, gradient.shape, gradient.dtype, "aten.clone", strides)
    pointwise_cost(copy.device, "aten.clone", copy, 1)
    return copy


def pointwise_cost(device: Device, name: str, output: Tensor, num_inputs: int) -> None:
    """One kernel that reads `num_inputs` tensors of the output's size and writes it."""
    numel = output.numel
    device.compute(name, "pointwise", output.dtype, numel, output.num_bytes * (num_inputs + 1))


def accumulator(parameter: Parameter) -> AccumulateGrad:
    """The leaf's one AccumulateGrad, alive while some graph refers to it."""
    known = parameter.cell.accumulator() if parameter.cell.accumulator is not None else None
    if known is None:
        known = AccumulateGrad(parameter)
        parameter.cell.accumulator = weakref.ref(known)
    return known


def edge_of(tensor: Tensor) -> Edge | None:
    """Where the gradient of `tensor` goes; None where it needs none."""
    if not tensor.requires_grad:
        return None
    if tensor.node is not None:
        return (tensor.node, tensor.slot)
    assert isinstance(tensor, Parameter)
    return (accumulator(tensor), 0)


def tracks(*inputs: Tensor | None) -> bool:
    """Whether an operation on `inputs` is recorded: gradients are on and one of them needs one."""
    for tensor in inputs:
        if tensor is not None and tensor.requires_grad:
            return tensor.storage.device.grad_enabled
    return False


def begin(
    name: str,
    inputs: Sequence[Tensor | None],
    run: Backward,
    saved: Sequence[Tensor] = (),
    data: Any = None,
) -> Node | None:
    """The node of an operation on `inputs`, or None where none is recorded.

    To be called before the operation's own allocations: inputs are saved first, which is where a
    recomputation may stop.
    """
    if not tracks(*inputs):
        return None
    edges = tuple([edge_of(t) if t is not None else None for t in inputs])
    device = next(t for t in inputs if t is not None).storage.device
    node = Node(device, name, edges, run, data)
    node.saved.extend([Saved(t) for t in saved])
    return node


def finish(output: Tensor, node: Node | None, saved: Sequence[Tensor] = ()) -> Tensor:
    """Makes `output` the result of `node`; `saved` are outputs that backward needs too."""
    if node is not None:
        node.metadata.append((output.shape, output.dtype))
        if saved:
            node.saved.extend([Saved(t) for t in saved])
        output.node = node
        output.requires_grad = True
    return output


def record(
    output: Tensor, name: str, inputs: Sequence[Tensor | None], run: Backward, data: Any = None
) -> Tensor:
    """`begin` and `finish` in one, for an operation that saves nothing."""
    return finish(output, begin(name, inputs, run, (), data))


def record_many(
    outputs: Sequence[Tensor], name: str, source: Tensor, run: Backward, data: Any = None
) -> None:
    """`record` for an operation with one input, several outputs and nothing saved."""
    node = Node(source.storage.device, name, (edge_of(source),), run, data)
    for slot, output in enumerate(outputs):
        node.metadata.append((output.shape, output.dtype))
        output.node = node
        output.slot = slot
        output.requires_grad = True


def only_gradient(grads: list[Tensor | None]) -> Tensor:
    """The gradient of an operation with one output."""
    grad = grads[0]
    assert grad is not None
    return grad
