"""Backward on shapes: the graph that autograd recorded, run and freed.

The order and the lifetimes are those of PyTorch's engine (torch/csrc/autograd/engine.cpp,
input_buffer.cpp): nodes run by descending sequence number, gradients of leaves first; a node's
incoming gradients die when it returns, its saved tensors right after.
"""

from __future__ import annotations

import heapq
from sys import getrefcount

from planner.step.autograd import Node, pointwise_cost
from planner.step.offloading import bring_back
from planner.step.pointwise import add, sum_to, to_dtype
from planner.step.strides import Shape, is_dense
from planner.step.tensor import Device, Tensor


def backward(loss: Tensor, gradient: Tensor) -> None:
    """`loss.backward(gradient)`: runs the graph of `loss` and frees it on the way."""
    assert loss.node is not None
    device = loss.storage.device
    scope = device.scope
    with device.no_grad():
        _run_graph(device, loss.node, loss.slot, gradient)
    device.scope = scope


def _run_graph(device: Device, root: Node, slot: int, gradient: Tensor) -> None:
    waiting = _count_dependencies(root)
    buffers: dict[Node, list[Tensor | None]] = {root: [None] * len(root.metadata)}
    buffers[root][slot] = gradient
    ready = [(-root.sequence, 0, root)]
    ticket = 1
    while ready:
        node = heapq.heappop(ready)[2]
        device.scope = node.scope
        if device.offloads:
            bring_back(node)
        outputs = _call(node, buffers.pop(node))
        node.release()
        for index, edge in enumerate(node.edges):
            if edge is None:
                continue
            target, position = edge
            buffer = buffers.get(target)
            if buffer is None:
                buffer = buffers[target] = [None] * len(target.metadata)
            _add_to_buffer(device, buffer, position, outputs, index)
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, (-target.sequence, ticket, target))
                ticket += 1
            del buffer
        del outputs, node


def _call(node: Node, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Runs a node; its incoming gradients die as this returns (`call_function`)."""
    outputs = list(node.run(node, gradients))
    for index, edge in enumerate(node.edges):
        gradient = outputs[index]
        if edge is None or gradient is None:
            continue
        shape, dtype = edge[0].metadata[edge[1]]
        if gradient.shape != shape or gradient.dtype != dtype:
            gradient = None
            _conform(outputs, index, shape, dtype)
        del gradient
    return outputs


def _conform(outputs: list[Tensor | None], index: int, shape: Shape, dtype: str) -> None:
    """`validate_outputs`: sums a broadcast gradient down and casts it to the input's dtype."""
    gradient = outputs[index]
    assert gradient is not None
    outputs[index] = None
    if gradient.shape != shape:
        gradient = sum_to(gradient, shape)
    if gradient.dtype != dtype:
        gradient = to_dtype(gradient, dtype)
    outputs[index] = gradient


def _add_to_buffer(
    device: Device,
    buffer: list[Tensor | None],
    position: int,
    outputs: list[Tensor | None],
    index: int,
) -> None:
    """`InputBuffer::add`: moves a gradient in, or adds it, in place where nobody else sees it."""
    gradient = outputs[index]
    if gradient is None:
        return
    outputs[index] = None
    old = buffer[position]
    if old is None:
        buffer[position] = gradient
        return
    if device.in_place_sums and _is_uniquely_owned(buffer, position):
        pointwise_cost(device, "aten.add_", old, 2)
        return
    buffer[position] = add(old, gradient)


def _is_uniquely_owned(buffer: list[Tensor | None], position: int) -> bool:
    """`can_accumulate_inplace`: dense, one reference to the tensor and one to its storage.

    getrefcount counts its own argument; the buffer's entry and the caller's name `old` are the two
    references that are allowed.
    """
    old = buffer[position]
    assert old is not None
    return (
        getrefcount(old) <= 4 and getrefcount(old.storage) <= 2 and is_dense(old.shape, old.strides)
    )


def _count_dependencies(root: Node) -> dict[Node, int]:
    waiting: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            target = edge[0]
            if target in waiting:
                waiting[target] += 1
            else:
                waiting[target] = 1
                stack.append(target)
    return waiting
