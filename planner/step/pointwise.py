"""Operations that work element by element, reductions, and casts.

Each function stands for the call of the same name in PyTorch. The tensors that it saves and that
its backward allocates follow tools/autograd/derivatives.yaml and FunctionsManual.cpp.
"""

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

from planner.core.torch_version import torch_version
from planner.memory.scratch import vector_width
from planner.step.autograd import make_node, only_gradient, record, requires_grad, set_history
from planner.step.layout import (
    Shape,
    broadcast_shapes,
    contiguous_strides,
    elementwise_strides,
    preserved_strides,
)
from planner.step.tensor import Device, Gradients, Node, Tensor, empty, take_bytes

_LINEAR_IS_NO_VIEW = (2, 15)  # 2.14.1 still rewrites a view: the nodes of both on a CPU, 2026-11-23
_RANK = {"bool": 0, "uint8": 1, "int32": 2, "int64": 3, "bfloat16": 4, "float16": 4,
         "float32": 5, "float64": 6}  # fmt: skip


def promote(a: str, b: str) -> str:
    """The dtype of an operation on two tensors (bf16 with fp16 gives fp32)."""
    if a == b:
        return a
    if {a, b} == {"bfloat16", "float16"}:
        return "float32"
    return a if _RANK[a] >= _RANK[b] else b


def empty_like(x: Tensor, label: str, dtype: str | None = None) -> Tensor:
    """`torch.empty_like(x)`: with the strides of x if these are dense."""
    strides = preserved_strides(x.shape, x.strides)
    return empty(x.storage.device, x.shape, dtype or x.dtype, label, strides)


def unary(x: Tensor, label: str, dtype: str | None = None) -> Tensor:
    """The new output of an elementwise kernel on one tensor."""
    y = empty_like(x, label, dtype)
    y.storage.device.compute_pointwise(label, y, 1)
    return y


def binary(a: Tensor, b: Tensor, label: str) -> Tensor:
    """The new output of an elementwise kernel on two tensors, broadcast and promoted.

    A tensor without dimensions does not decide the dtype if the other one has dimensions.
    """
    if a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype:
        y = empty_like(a, label)
    else:
        shape = broadcast_shapes(a.shape, b.shape)
        if bool(a.shape) == bool(b.shape):
            dtype = promote(a.dtype, b.dtype)
        else:
            dtype = a.dtype if a.shape else b.dtype
        strides = elementwise_strides(shape, [(a.shape, a.strides), (b.shape, b.strides)])
        y = empty(a.storage.device, shape, dtype, label, strides)
    device = y.storage.device
    device.compute(label, "pointwise", y.dtype, y.numel, y.num_bytes + a.num_bytes + b.num_bytes)
    return y


def to_dtype(x: Tensor, dtype: str) -> Tensor:
    """`x.to(dtype)`: x itself if it has that dtype."""
    if x.dtype == dtype:
        return x
    y = empty_like(x, "aten._to_copy", dtype)
    x.storage.device.compute("aten._to_copy", "copy", dtype, 0, x.num_bytes + y.num_bytes)
    if requires_grad(x):
        record(y, "ToCopyBackward0", (x,), _to_copy_backward, data=x.dtype)
    return y


def _to_copy_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    return (to_dtype(grad, node.data),)


def clone(x: Tensor, contiguous: bool = False) -> Tensor:
    """`x.clone()`, keeping the layout, or row-major with `contiguous`."""
    strides = contiguous_strides(x.shape) if contiguous else preserved_strides(x.shape, x.strides)
    y = empty(x.storage.device, x.shape, x.dtype, "aten.clone", strides)
    x.storage.device.compute("aten.clone", "copy", x.dtype, 0, 2 * y.num_bytes)
    if requires_grad(x):
        record(y, "CloneBackward0", (x,), pass_gradient)
    return y


def pass_gradient(node: Node, grads: list[Tensor | None]) -> Gradients:
    """The gradient is passed on: the very same tensor."""
    return (grads[0],)


def contiguous(x: Tensor) -> Tensor:
    """`x.contiguous()`: x itself, or a row-major copy."""
    return x if x.is_contiguous else clone(x, contiguous=True)


def add(a: Tensor, b: Tensor) -> Tensor:
    """`a + b`: saves nothing."""
    y = binary(a, b, "aten.add")
    if requires_grad(a, b):
        record(y, "AddBackward0", (a, b), add_backward)
    return y


def add_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """The gradient goes to each input that needs it: the very same tensor."""
    grad = grads[0]
    return (grad if node.needs(0) else None, grad if node.needs(1) else None)


def sub(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`: saves nothing."""
    y = binary(a, b, "aten.sub")
    if requires_grad(a, b):
        record(y, "SubBackward0", (a, b), _sub_backward)
    return y


def _sub_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    other = unary(grad, "aten.neg") if node.needs(1) else None
    return (grad if node.needs(0) else None, other)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """`a * b`: saves each factor that the other's gradient needs."""
    node = make_node("MulBackward0", (a, b), _mul_backward, factors_to_save(a, b))
    return set_history(binary(a, b, "aten.mul"), node)


def factors_to_save(a: Tensor, b: Tensor) -> list[Tensor]:
    """The factors that a product saves: b if a needs a gradient, and a if b does."""
    return [b] * a.requires_grad + [a] * b.requires_grad


def _mul_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    factors = [saved.unpack() for saved in node.saved]
    to_a = binary(grad, factors[0], "aten.mul") if node.needs(0) else None
    to_b = binary(grad, factors[-1], "aten.mul") if node.needs(1) else None
    return (to_a, to_b)


def scale(x: Tensor, label: str = "aten.mul") -> Tensor:
    """`x * number` (or `x / number` with that label): saves nothing."""
    y = unary(x, label)
    if requires_grad(x):
        record(y, "MulBackward0", (x,), _scale_backward, data=label)
    return y


def _scale_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (unary(only_gradient(grads), node.data),)


def neg(x: Tensor) -> Tensor:
    """`-x`: saves nothing."""
    return scale(x, "aten.neg")


def div(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`: saves b, and a too where b needs a gradient."""
    saved = [b, a] if b.requires_grad else [b]
    node = make_node("DivBackward0", (a, b), _div_backward, saved)
    return set_history(binary(a, b, "aten.div"), node)


def _div_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """b's gradient: -grad * ((a / b) / b), the right factor first; temporaries live to its end."""
    grad = only_gradient(grads)
    b = node.unpack(0)
    to_b = None
    if node.needs(1):
        a = node.unpack(1)
        quotient = binary(a, b, "aten.div")
        twice = binary(quotient, b, "aten.div")
        negative = unary(grad, "aten.neg")
        to_b = binary(negative, twice, "aten.mul")
        del negative, twice, quotient
    to_a = binary(grad, b, "aten.div") if node.needs(0) else None
    return (to_a, to_b)


def gelu(x: Tensor) -> Tensor:
    """`F.gelu(x)`: saves x."""
    node = make_node("GeluBackward0", (x,), _gelu_backward, (x,))
    return set_history(unary(x, "aten.gelu"), node)


def _gelu_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    x = node.unpack(0)
    return (binary(only_gradient(grads), x, "aten.gelu_backward"),)


def relu(x: Tensor) -> Tensor:
    """`F.relu(x)`: saves its result."""
    return _unary_saving_result(x, "aten.relu", "ReluBackward0", "aten.threshold_backward")


def relu_(x: Tensor) -> Tensor:
    """`F.relu(x, inplace=True)` on the result of a linear layer: saves the changed x.

    If that result is a matrix, its own history is rewritten. If not, up to torch 2.14, it is a view
    of the whole of another tensor (`linear` of more than two dimensions): then the history of that
    tensor is rewritten (`CopySlices`), and that of x becomes `as_strided` (the view again for fake
    tensors, which have no such thing). torch 2.15 makes it by `_unsafe_view`, which is no view.
    """
    x.storage.device.compute_pointwise("aten.relu_", x, 1)
    if not requires_grad(x):
        return x
    assert x.node is not None
    if x.node.name != "ViewBackward0" or torch_version() >= _LINEAR_IS_NO_VIEW:
        node = make_node("ReluBackward0", (x,), _result_backward, data="aten.threshold_backward")
        return set_history(x, node, (x,))
    (base,) = x.node.edges
    assert base is not None
    device = x.storage.device
    copied = Node(device, "CopySlices", (base,), _copy_slices_backward, x.shape)
    copied.metadata.append(base[0].metadata[base[1]])
    copied.save((x,))
    shape = copied.metadata[0][0]
    if device.in_place_sums:
        x.node = Node(device, "AsStridedBackward0", ((copied, 0),), as_strided_backward, shape)
    else:
        x.node = Node(device, "ViewBackward0", ((copied, 0),), _viewed_backward, shape)
    x.node.metadata.append((x.shape, x.dtype))
    return x


def _viewed_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    return (Tensor(grad.storage, node.data, contiguous_strides(node.data), grad.dtype),)


def as_strided_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`AsStridedBackward0`: new zeros for the whole storage (`data` is its shape), and a copy of
    the gradient into them."""
    grad = only_gradient(grads)
    whole = empty(grad.storage.device, node.data, grad.dtype, "aten.new_zeros")
    whole.storage.device.compute_pointwise("aten.copy_", whole, 1)
    return (whole,)


def _copy_slices_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """torch/csrc/autograd/functions/tensor.cpp: copies the whole gradient, clones the slice, runs
    the function's backward on the clone, and copies the result back."""
    grad = only_gradient(grads)
    whole = empty(grad.storage.device, grad.shape, grad.dtype, "aten.new_empty_strided")
    whole.storage.device.compute_pointwise("aten.copy_", whole, 1)
    part = Tensor(whole.storage, node.data, contiguous_strides(node.data), whole.dtype)
    cloned = clone(part, contiguous=True)
    result = node.unpack(0)
    to_part = binary(cloned, result, "aten.threshold_backward")
    whole.storage.device.compute_pointwise("aten.copy_", to_part, 1)
    return (whole,)


def reciprocal(x: Tensor) -> Tensor:
    """`torch.reciprocal(x)`, as in `1.0 / x`: fp32 under autocast; saves its result."""
    x = autocast_up(x)
    node = make_node("ReciprocalBackward0", (x,), _reciprocal_backward)
    y = unary(x, "aten.reciprocal")
    return set_history(y, node, (y,))


def divide_number(x: Tensor) -> Tensor:
    """`number / x` (`Tensor.__rtruediv__`): x lives until the product with its reciprocal
    exists."""
    return scale(reciprocal(x))


def _reciprocal_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """-grad * (result * result)."""
    result = node.unpack(0)
    negative = unary(only_gradient(grads), "aten.neg")
    square = binary(result, result, "aten.mul")
    return (binary(negative, square, "aten.mul"),)


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid(x)`: saves its result."""
    return _unary_saving_result(x, "aten.sigmoid", "SigmoidBackward0", "aten.sigmoid_backward")


def exp(x: Tensor) -> Tensor:
    """`torch.exp(x)`: fp32 under autocast; saves its result."""
    return _unary_saving_result(autocast_up(x), "aten.exp", "ExpBackward0", "aten.mul")


def _unary_saving_result(x: Tensor, label: str, name: str, backward_label: str) -> Tensor:
    node = make_node(name, (x,), _result_backward, data=backward_label)
    y = unary(x, label)
    return set_history(y, node, (y,))


def _result_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    result = node.unpack(0)
    return (binary(only_gradient(grads), result, node.data),)


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """`at::sum_to`: reduces a gradient to the shape that was broadcast."""
    lead = len(x.shape) - len(shape)
    dims = list(range(lead)) + [
        i for i in range(lead, len(x.shape)) if shape[i - lead] == 1 and x.shape[i] != 1
    ]
    if dims:
        x = reduce_sum(x, dims, keepdim=True)
    if lead:
        x = Tensor(x.storage, shape, contiguous_strides(shape), x.dtype)
    return x


def reduce_sum(
    x: Tensor,
    dims: Sequence[int],
    keepdim: bool = False,
    label: str = "aten.sum",
    dtype: str | None = None,
) -> Tensor:
    """A new tensor with `dims` summed away (or of size 1); nothing is recorded."""
    summed = {d % len(x.shape) for d in dims}
    reduced = tuple(1 if i in summed else size for i, size in enumerate(x.shape))
    shape = reduced if keepdim else tuple(n for i, n in enumerate(x.shape) if i not in summed)
    y = empty(x.storage.device, shape, dtype or x.dtype, label)
    # Integers and booleans are summed from a copy in the result's dtype.
    is_cast = not x.is_floating and x.dtype != y.dtype
    cast = take_bytes(y.device, x.numel * y.itemsize, label) if is_cast else None
    take_reduction(x, summed, label, "integer_" if y.dtype == "int64" else "")
    del cast
    x.storage.device.compute(label, "reduction", x.dtype, x.numel, x.num_bytes + y.num_bytes)
    return y


def mean(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """`x.mean(dims)`: saves nothing."""
    y = reduce_sum(x, dims, keepdim, "aten.mean")
    if requires_grad(x):
        record(y, "MeanBackward1", (x,), _mean_backward, data=(x.shape, tuple(dims), keepdim))
    return y


def _mean_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`sum_backward(...) / n`: a new tensor, divided from an expanded view."""
    return (unary(_expand_reduced(only_gradient(grads), *node.data), "aten.div"),)


def sum_dims(x: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """`x.sum(dims)`, or of all dimensions: saves nothing; its gradient is an expanded view.

    Under autocast the result is fp32: the kernel reads x as it is (`fp32_set_opt_dtype`).
    """
    dims = dims or range(len(x.shape))
    low = x.storage.device.autocast is not None and x.dtype in ("bfloat16", "float16")
    y = reduce_sum(x, dims, dtype="float32" if low else x.dtype)
    if requires_grad(x):
        record(y, "SumBackward1", (x,), _sum_backward, data=(x.shape, tuple(dims), False))
    return y


def _sum_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    return (_expand_reduced(only_gradient(grads), *node.data),)


def _expand_reduced(grad: Tensor, shape: Shape, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    summed = {d % len(shape) for d in dims}
    source = iter(grad.strides)
    strides = []
    for i in range(len(shape)):
        if i in summed:
            strides.append(0)
            if keepdim:
                next(source)
        else:
            strides.append(next(source))
    return Tensor(grad.storage, shape, tuple(strides), grad.dtype)


def dropout(x: Tensor, rate: float) -> Tensor:
    """`F.dropout(x, rate)` in training on CUDA (`native_dropout`): saves a mask of one byte per
    element. With rate 0, or in evaluation, it returns x itself, as `F.dropout` does."""
    if rate == 0.0 or not x.storage.device.training:
        return x
    node = make_node("NativeDropoutBackward0", (x,), _dropout_backward)
    mask = empty_like(x, "aten.native_dropout", "bool")
    y = unary(x, "aten.native_dropout")
    return set_history(y, node, (mask,))


def _dropout_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    mask = node.unpack(0)
    grad = only_gradient(grads)
    y = empty_like(grad, "aten.native_dropout_backward")
    grad.storage.device.compute(
        "aten.native_dropout_backward", "pointwise", y.dtype, y.numel,
        2 * y.num_bytes + mask.num_bytes,
    )  # fmt: skip
    return (y,)


def new_empty(x: Tensor, shape: Shape, dtype: str | None = None, label: str = "") -> Tensor:
    """`x.new_empty(shape)`, also for the random and constant fills that follow in place."""
    return empty(x.storage.device, shape, dtype or x.dtype, label or "aten.new_empty")


def clamp(x: Tensor, label: str = "aten.clamp") -> Tensor:
    """`x.clamp(min=…, max=…)`: saves x; backward masks the gradient through a temporary."""
    node = make_node("ClampBackward1", (x,), _clamp_backward, (x,))
    return set_history(unary(x, label), node)


def clamp_min(x: Tensor) -> Tensor:
    """`x.clamp_min(eps)`."""
    return clamp(x, "aten.clamp_min")


def _clamp_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`where(self >= min, grad, 0)` (with two bounds, their conjunction)."""
    x = node.unpack(0)
    grad = only_gradient(grads)
    zero = empty(x.storage.device, (), grad.dtype, "aten.scalar_tensor")
    mask = empty_like(x, "aten.ge", "bool")
    y = binary(grad, grad, "aten.where")
    del zero, mask
    return (y,)


def autocast_up(x: Tensor) -> Tensor:
    """The input of an operation that autocast runs in fp32: x, cast where autocast is on."""
    if x.storage.device.autocast is not None and x.dtype in ("bfloat16", "float16"):
        return to_dtype(x, "float32")
    return x


# How a kernel reduces the dimensions of a tensor, as TensorIterator lays them out.


class Reduction(NamedTuple):
    """The sizes of the laws "reduction" and "semaphores" (`planner.memory.scratch`)."""

    outputs: int
    inputs: int
    sums_fastest: int
    vector: int


def plan_reduction(
    shape: Sequence[int], strides: Sequence[int], dims: Collection[int]
) -> Reduction | None:
    """The reduction over `dims` of a tensor; None where nothing is summed."""
    summed = _join_dims([(strides[d], shape[d]) for d in dims if shape[d] > 1])
    unsummed = _join_dims([(strides[d], n) for d, n in enumerate(shape) if d not in dims and n > 1])
    if not summed:
        return None
    inputs, outputs = prod(n for _, n in summed), prod(n for _, n in unsummed)
    fastest_stride = summed[0][0]
    if not unsummed or fastest_stride < unsummed[0][0]:
        loads_vectors = fastest_stride == 1 and len(summed) == 1
        return Reduction(outputs, inputs, 1, 4 if loads_vectors else 1)
    other_strides = [stride for stride, _ in (*summed, *unsummed[1:])]
    vector = vector_width(unsummed[0][1], *other_strides) if unsummed[0][0] == 1 else 1
    return Reduction(outputs, inputs, 0, vector)


def take_reduction(x: Tensor, dims: Collection[int], label: str, prefix: str = "") -> None:
    """Takes and releases the scratch of the kernel that sums `dims` of `x`. `prefix` is that of its
    law's name."""
    reduction = plan_reduction(x.shape, x.strides, dims)
    if reduction is not None:
        take_reduction_scratch(x.device, prefix, reduction, label)


def take_reduction_scratch(device: Device, prefix: str, sizes: tuple[int, ...], label: str) -> None:
    """Takes and releases the partial sums of blocks that share an output, and their semaphores."""
    sums = device.take_scratch(f"{prefix}reduction", sizes, label)
    semaphores = device.take_scratch(f"{prefix}semaphores", sizes, label)
    del semaphores
    del sums


def _join_dims(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The dimensions (stride, size), fastest first; those without a gap between them are joined."""
    joined: list[tuple[int, int]] = []
    for stride, size in sorted(dims):
        if joined and stride == joined[-1][0] * joined[-1][1]:
            joined[-1] = joined[-1][0], joined[-1][1] * size
        else:
            joined.append((stride, size))
    return joined
