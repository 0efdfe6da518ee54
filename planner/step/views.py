"""Operations that return another view of a storage, and operations that move elements."""

from collections.abc import Sequence
from functools import partial

from planner.step import autograd
from planner.step.layout import (
    Shape,
    contiguous_strides,
    elementwise_strides,
    preserved_strides,
    resolve_shape,
    view_strides,
)
from planner.step.pointwise import clone, pass_gradient, promote, sum_to
from planner.step.tensor import Gradients, Node, Tensor, empty, take_bytes


def _alias(x: Tensor, shape: Shape, strides: Shape) -> Tensor:
    """A view of x. It keeps its base alive (`_base`), even where no gradient is recorded: a
    gradient that is a view is never added to in place."""
    y = Tensor(x.storage, shape, strides, x.dtype)
    y.base = x.base or x
    return y


def alias(x: Tensor) -> Tensor:
    """`x[:]`: the same view of the same storage, as a new tensor."""
    y = _alias(x, x.shape, x.strides)
    if autograd.requires_grad(x):
        autograd.record(y, "AliasBackward0", (x,), pass_gradient)
    return y


def view(x: Tensor, *shape: int, name: str = "ViewBackward0") -> Tensor:
    """`x.view(shape)`. AssertionError where only a copy has that shape. `_unsafe_view`, of a tensor
    that nobody else refers to, keeps no base."""
    target = resolve_shape(x.numel, shape)
    strides = view_strides(x.shape, x.strides, target)
    assert strides is not None, f"view of {x.shape} {x.strides} as {target} needs a copy"
    y = _alias(x, target, strides)
    if name == "UnsafeViewBackward0":
        y.base = None
    if autograd.requires_grad(x):
        autograd.record(y, name, (x,), _view_backward, data=x.shape)
    return y


def _view_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (reshape(autograd.only_gradient(grads), *node.data),)


def reshape(x: Tensor, *shape: int) -> Tensor:
    """`x.reshape(shape)`: a view, or a row-major copy seen in that shape."""
    target = resolve_shape(x.numel, shape)
    if view_strides(x.shape, x.strides, target) is not None:
        return view(x, *target)
    return view(clone(x, contiguous=True), *target, name="UnsafeViewBackward0")


def flatten(x: Tensor, start: int, end: int = -1) -> Tensor:
    """`x.flatten(start, end)`."""
    rank = len(x.shape)
    start, end = start % rank, end % rank
    if start == end:
        return x
    return reshape(x, *x.shape[:start], -1, *x.shape[end + 1 :])


def permute(x: Tensor, *dims: int) -> Tensor:
    """`x.permute(dims)`."""
    y = _alias(x, tuple(x.shape[d] for d in dims), tuple(x.strides[d] for d in dims))
    if autograd.requires_grad(x):
        autograd.record(y, "PermuteBackward0", (x,), _permute_backward, data=dims)
    return y


def _permute_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    inverse = [0] * len(node.data)
    for position, dim in enumerate(node.data):
        inverse[dim] = position
    return (permute(autograd.only_gradient(grads), *inverse),)


def transpose(x: Tensor, a: int, b: int) -> Tensor:
    """`x.transpose(a, b)`."""
    rank = len(x.shape)
    a, b = a % rank, b % rank
    dims = list(range(rank))
    dims[a], dims[b] = b, a
    y = _alias(x, tuple(x.shape[d] for d in dims), tuple(x.strides[d] for d in dims))
    if autograd.requires_grad(x):
        autograd.record(y, "TransposeBackward0", (x,), _transpose_backward, data=(a, b))
    return y


def _transpose_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (transpose(autograd.only_gradient(grads), *node.data),)


def t(x: Tensor) -> Tensor:
    """`x.t()` of a matrix."""
    return transpose(x, 0, 1)


def expand(x: Tensor, *shape: int) -> Tensor:
    """`x.expand(shape)`: -1 keeps a size."""
    lead = len(shape) - len(x.shape)
    target = tuple(x.shape[i - lead] if s == -1 else s for i, s in enumerate(shape))
    strides = tuple(
        0 if i < lead or (x.shape[i - lead] == 1 and s != 1) else x.strides[i - lead]
        for i, s in enumerate(target)
    )
    y = _alias(x, target, strides)
    if autograd.requires_grad(x):
        autograd.record(y, "ExpandBackward0", (x,), _expand_backward, data=x.shape)
    return y


def _expand_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (sum_to(autograd.only_gradient(grads), node.data),)


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """`x.unsqueeze(dim)`."""
    dim = dim % (len(x.shape) + 1)
    stride = x.shape[dim] * x.strides[dim] if dim < len(x.shape) else 1
    y = _alias(x, (*x.shape[:dim], 1, *x.shape[dim:]), (*x.strides[:dim], stride, *x.strides[dim:]))
    if autograd.requires_grad(x):
        autograd.record(y, "UnsqueezeBackward0", (x,), _unsqueeze_backward, data=dim)
    return y


def _unsqueeze_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (squeeze(autograd.only_gradient(grads), node.data),)


def squeeze(x: Tensor, dim: int) -> Tensor:
    """`x.squeeze(dim)`."""
    dim = dim % len(x.shape)
    if x.shape[dim] != 1:
        return _alias(x, x.shape, x.strides)
    y = _alias(x, x.shape[:dim] + x.shape[dim + 1 :], x.strides[:dim] + x.strides[dim + 1 :])
    if autograd.requires_grad(x):
        autograd.record(y, "SqueezeBackward1", (x,), _squeeze_backward, data=dim)
    return y


def _squeeze_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (unsqueeze(autograd.only_gradient(grads), node.data),)


def select(x: Tensor, dim: int, index: int = 0) -> Tensor:
    """`x.select(dim, index)`, `x[index]`: its gradient is a tensor of zeros, written in part."""
    dim = dim % len(x.shape)
    y = _alias(x, x.shape[:dim] + x.shape[dim + 1 :], x.strides[:dim] + x.strides[dim + 1 :])
    if autograd.requires_grad(x):
        autograd.record(y, "SelectBackward0", (x,), _zeros_written_backward, data=x.shape)
    return y


def slice_(x: Tensor, dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """`x[..., start:stop:step, ...]` along `dim`."""
    dim = dim % len(x.shape)
    size = max(0, -(-(min(stop, x.shape[dim]) - start) // step))
    y = _alias(
        x,
        (*x.shape[:dim], size, *x.shape[dim + 1 :]),
        (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1 :]),
    )
    if autograd.requires_grad(x):
        autograd.record(y, "SliceBackward0", (x,), _zeros_written_backward, data=x.shape)
    return y


def _zeros_written_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`slice_backward`, `select_backward`: new zeros, and a copy of the gradient into a part of
    them."""
    grad = autograd.only_gradient(grads)
    zeros = empty(grad.storage.device, node.data, grad.dtype, "aten.slice_backward")
    grad.storage.device.compute(
        "aten.slice_backward", "copy", grad.dtype, 0, zeros.num_bytes + 2 * grad.num_bytes, 2
    )
    return (zeros,)


def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """`x.unbind(dim)`: its gradient is a stack."""
    dim = dim % len(x.shape)
    shape, strides = x.shape[:dim] + x.shape[dim + 1 :], x.strides[:dim] + x.strides[dim + 1 :]
    parts = tuple(_alias(x, shape, strides) for _ in range(x.shape[dim]))
    if autograd.requires_grad(x):
        autograd.record_outputs(parts, "UnbindBackward0", x, _unbind_backward, data=dim)
    return parts


def _unbind_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (stack([g for g in grads if g is not None], node.data),)


def chunk(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    """`x.chunk(count, dim)` where the parts are equal: its gradient is a concatenation."""
    dim = dim % len(x.shape)
    size = x.shape[dim] // count
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    parts = tuple(_alias(x, shape, x.strides) for _ in range(count))
    if autograd.requires_grad(x):
        autograd.record_outputs(parts, "SplitBackward0", x, _split_backward, data=dim)
    return parts


def _split_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (cat([g for g in grads if g is not None], node.data),)


def stack(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.stack(parts, dim)`, only in backward: nothing is recorded."""
    first = parts[0]
    dim = dim % (len(first.shape) + 1)
    shape = (*first.shape[:dim], len(parts), *first.shape[dim:])
    y = empty(first.storage.device, shape, first.dtype, "aten.stack")
    y.storage.device.compute("aten.stack", "copy", y.dtype, 0, 2 * y.num_bytes)
    return y


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat(parts, dim)`: promotes dtypes; its gradient is cut with views."""
    first = parts[0]
    dim = dim % len(first.shape)
    dtype = first.dtype
    for part in parts[1:]:
        dtype = promote(dtype, part.dtype)
    size = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    y = empty(first.storage.device, shape, dtype, "aten.cat")
    y.storage.device.compute("aten.cat", "copy", y.dtype, 0, 2 * y.num_bytes)
    if autograd.requires_grad(*parts):
        sizes = tuple(part.shape[dim] for part in parts)
        autograd.record(y, "CatBackward0", parts, _cat_backward, data=(dim, sizes))
    return y


def _cat_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = autograd.only_gradient(grads)
    dim, sizes = node.data
    return tuple(
        _alias(grad, (*grad.shape[:dim], size, *grad.shape[dim + 1 :]), grad.strides)
        if node.needs(index)
        else None
        for index, size in enumerate(sizes)
    )


def roll(x: Tensor, dims: int = 2) -> Tensor:
    """`torch.roll(x, shifts, dims)` over `dims` dimensions: a row-major copy for each, made from
    the copy before it, and the same in backward (`roll_common`,
    aten/src/ATen/native/TensorTransformations.h). All live until the kernel returns."""
    device = x.storage.device
    clones, between = [], []
    if not x.is_contiguous:
        device.compute("aten.clone", "copy", x.dtype, 0, 2 * x.num_bytes)
        clones.append(take_bytes(device, x.num_bytes, "aten.roll"))
    for _ in range(dims - 1):
        device.compute("aten.roll", "copy", x.dtype, 0, 2 * x.num_bytes)
        between.append(take_bytes(device, x.num_bytes, "aten.roll"))
        clones.clear()
    y = empty(device, x.shape, x.dtype, "aten.roll")
    device.compute("aten.roll", "copy", x.dtype, 0, 2 * y.num_bytes)
    if autograd.requires_grad(x):
        autograd.record(y, "RollBackward0", (x,), _roll_backward, data=dims)
    return y


def _roll_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (roll(autograd.only_gradient(grads), node.data),)


def pad(x: Tensor, bottom: int, right: int) -> Tensor:
    """`F.pad(x, (0, 0, 0, right, 0, bottom))` of a BHWC tensor: a copy even when both are 0."""
    batch, height, width, channels = x.shape
    return _pad(x, (batch, height + bottom, width + right, channels))


def pad_last(x: Tensor, right: int) -> Tensor:
    """`F.pad(x, (0, right))`."""
    return _pad(x, (*x.shape[:-1], x.shape[-1] + right))


def _pad(x: Tensor, shape: Shape) -> Tensor:
    if shape == x.shape:
        strides = preserved_strides(x.shape, x.strides)
    else:
        strides = elementwise_strides(shape, [(shape, contiguous_strides(shape))])
    y = empty(x.storage.device, shape, x.dtype, "aten.constant_pad_nd", strides)
    x.storage.device.compute("aten.constant_pad_nd", "copy", x.dtype, 0, x.num_bytes + y.num_bytes)
    if autograd.requires_grad(x):
        autograd.record(y, "ConstantPadNdBackward0", (x,), _pad_backward, data=x.shape)
    return y


def _pad_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`constant_pad_nd(grad, negated pads)`: a copy of the part inside."""
    return (_pad(autograd.only_gradient(grads), node.data),)


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]` with a flat int64 index: [len(index), columns]; saves the index."""
    node = autograd.make_node("IndexBackward0", (table,), _index_backward, (index,), table.shape)
    y = empty(table.storage.device, (index.numel, *table.shape[1:]), table.dtype, "aten.index")
    table.storage.device.compute("aten.index", "copy", y.dtype, 0, 2 * y.num_bytes)
    return autograd.set_history(y, node)


def _index_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """New zeros and `index_put` with accumulation, in place but for fake tensors."""
    grad = autograd.only_gradient(grads)
    index = node.unpack(0)
    device = grad.storage.device
    zeros = empty(device, node.data, grad.dtype, "aten.new_zeros")
    result = zeros
    if not device.in_place_sums:
        result = empty(device, node.data, grad.dtype, "aten.index_put")
    _sort_indices(grad, index, node.data[0])
    device.compute("aten.index_put", "copy", grad.dtype, 0, 2 * grad.num_bytes + index.num_bytes, 4)
    return (result,)


def _sort_indices(grad: Tensor, index: Tensor, num_rows: int) -> None:
    """Takes and releases the scratch with which `index_put` adds up rows of one index
    (cuda/Indexing.cu, index_put_with_sort_kernel): the linear indices, the values row by row, the
    sorted indices and their places, and the sort's own scratch."""
    device, label = grad.storage.device, "aten.index_put"
    indices = partial(take_bytes, device, index.num_bytes, label)
    raw = indices()
    linear = indices()
    del raw
    values = None if grad.is_contiguous else take_bytes(device, grad.num_bytes, label)
    sorted_ = [indices() for _ in range(3)]
    sorted_.append(device.take_scratch("sort", (index.numel, num_rows), label))
    while sorted_:
        sorted_.pop()
    del values
    del linear
