"""How autograd records the graph on shapes: the node of an operation, and its edges to the nodes of
its inputs. `engine.py` runs the graph backward. Lifetimes are those of torch/csrc/autograd
(saved_variable.cpp, functions/accumulate_grad.h).
"""

import weakref
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

from planner.ledger.ledger import Freed
from planner.step.layout import Shape
from planner.step.tensor import Backward, Device, Edge, Gradients, Node, Parameter, Tensor, empty

LAST = 1 << 62  # the sequence number of AccumulateGrad: it runs as soon as it is ready


class AccumulateGrad(Node):
    """Adds to a leaf's gradient: steals the first one where it can, and adds others in place."""

    __slots__ = ("cell", "strides")

    def __init__(self, parameter: Parameter) -> None:
        device = parameter.device
        sequence = device.next_sequence
        super().__init__(device, "AccumulateGrad", (), AccumulateGrad.accumulate)
        device.next_sequence = sequence
        self.sequence = LAST
        self.cell = parameter.cell
        self.strides = parameter.strides
        self.metadata.append((parameter.shape, parameter.dtype))

    @staticmethod
    def accumulate(node: Node, gradients: list[Tensor | None]) -> Gradients:
        assert isinstance(node, AccumulateGrad)
        new = gradients.pop()
        assert new is not None
        if node.cell.grad is None:
            device = new.storage.device
            start, is_shared = len(device.events), getrefcount(new.storage) > 2
            # getrefcount counts its own argument and the name `new`.
            stolen = getrefcount(new) == 2 and _same_layout(new, node.strides)
            node.cell.grad = new.detach() if stolen else _clone_as(new, node.strides)
            if node.cell.weight:
                node.cell.grad.storage.assign("gradients", node.cell.weight)
                if device.first_gradients is not None:
                    freed = node.cell.grad.storage.ident if stolen else None
                    _note_first_gradient(device, start, node.cell.grad, freed)
                    if stolen and is_shared:
                        device.first_gradients = None
        else:
            total = node.cell.grad
            total.device.compute_pointwise("aten.add_", total, 2)
        hook = node.cell.grad.device.on_gradient
        if hook is not None and node.cell.weight:
            hook(node.cell)
        return ()


def _note_first_gradient(device: Device, start: int, gradient: Tensor, freed: int | None) -> None:
    """The events from `start` on gave a weight its first gradient. A further one is added to it
    instead, and then the storage `freed` is released, if any."""
    end = len(device.events)
    device.compute_pointwise("aten.add_", gradient, 2)
    sum_events = [device.events.pop(), *([] if freed is None else [Freed(freed)])]
    assert device.first_gradients is not None
    device.first_gradients.append((start, end, sum_events))


def _same_layout(gradient: Tensor, strides: Shape) -> bool:
    """`obeys_layout_contract`: the strides equal the leaf's, dimensions of size 1 excused."""
    return all(
        a == b or size == 1
        for size, a, b in zip(gradient.shape, gradient.strides, strides, strict=True)
    )


def _clone_as(gradient: Tensor, strides: Shape) -> Tensor:
    copy = empty(gradient.device, gradient.shape, gradient.dtype, "aten.clone", strides)
    copy.device.compute_pointwise("aten.clone", copy, 1)
    return copy


def accumulator(parameter: Parameter) -> Node:
    """The leaf's one AccumulateGrad, alive while a graph refers to it."""
    node = parameter.cell.accumulator() if parameter.cell.accumulator is not None else None
    if node is None:
        node = AccumulateGrad(parameter)
        parameter.cell.accumulator = weakref.ref(node)
    return node


def gradient_edge(tensor: Tensor) -> Edge | None:
    """The edge that the gradient of `tensor` takes; None where it needs none."""
    if not tensor.requires_grad:
        return None
    if tensor.node is not None:
        return (tensor.node, tensor.slot)
    assert isinstance(tensor, Parameter)
    return (accumulator(tensor), 0)


def requires_grad(*inputs: Tensor | None) -> bool:
    """Whether an operation on `inputs` is recorded: gradients are on and one of them needs one."""
    for tensor in inputs:
        if tensor is not None and tensor.requires_grad:
            return tensor.storage.device.grad_enabled
    return False


def make_node(
    name: str,
    inputs: Sequence[Tensor | None],
    run: Backward,
    saved: Sequence[Tensor] = (),
    data: Any = None,
) -> Node | None:
    """The node of an operation on `inputs`; None where none is recorded.

    Call it before the operation allocates anything: inputs are saved first, and a recomputation may
    stop there.
    """
    if not requires_grad(*inputs):
        return None
    edges = tuple([gradient_edge(t) if t is not None else None for t in inputs])
    device = next(t for t in inputs if t is not None).storage.device
    node = Node(device, name, edges, run, data)
    node.save(saved)
    return node


def set_history(output: Tensor, node: Node | None, saved: Sequence[Tensor] = ()) -> Tensor:
    """Makes `output` the result of `node`; `saved` are outputs that backward needs too."""
    if node is not None:
        node.metadata.append((output.shape, output.dtype))
        if saved:
            node.save(saved)
        output.node = node
        output.requires_grad = True
    return output


def record(
    output: Tensor, name: str, inputs: Sequence[Tensor | None], run: Backward, data: Any = None
) -> Tensor:
    """`make_node` and `set_history` together, for an operation that saves nothing."""
    return set_history(output, make_node(name, inputs, run, (), data))


def record_outputs(
    outputs: Sequence[Tensor], name: str, source: Tensor, run: Backward, data: Any = None
) -> None:
    """`record` for an operation with one input, several outputs and nothing saved."""
    node = Node(source.storage.device, name, (gradient_edge(source),), run, data)
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
