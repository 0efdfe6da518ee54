"""Matrix products and convolution: linear, matmul, bmm, conv2d.

FLOPs count a multiply-add as two. Under autocast the operands are cast down first, bias before
weight before input, as the arguments of the C++ call are evaluated.
"""

from __future__ import annotations

from math import prod

from planner.step.autocast import cast_down
from planner.step.autograd import Gradients, Node, begin, finish, only_gradient, record
from planner.step.checkpointing import kept
from planner.step.pointwise import add, add_backward, each_for_the_other
from planner.step.reductions import take_reduction
from planner.step.strides import Shape, is_contiguous
from planner.step.tensor import Device, Tensor, empty, take_bytes
from planner.step.views import expand, reshape, t, transpose, view


def _matmul_cost(device: Device, name: str, y: Tensor, inner: int, num_bytes: int) -> None:
    device.compute(name, "matmul", y.dtype, 2 * y.numel * inner, num_bytes + y.num_bytes)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`: [..., in] to [..., out]; saves x and the weight (its cast)."""
    is_trained = weight.requires_grad  # which a view or a cast of it shows without gradients too
    if x.storage.device.autocast is not None:
        if bias is not None:
            bias = cast_down(bias)
        weight = cast_down(weight)
        x = cast_down(x)
    if bias is not None and len(x.shape) == 2:
        return addmm(bias, x, t(weight))
    if bias is not None and x.is_contiguous:
        flat = view(x, prod(x.shape[:-1]), x.shape[-1])
        y = addmm(bias, flat, t(weight))
        return view(y, *x.shape[:-1], weight.shape[0])
    y = _matmul(x, t(weight), is_trained)
    if bias is None:
        return y
    # In place, but beneath the modes that selective checkpointing enters
    # (aten/src/ATen/native/Linear.cpp, isTensorSubclassLike).
    in_place = x.storage.device.kept_results is None
    return _add_in_place(y, bias) if in_place else add(y, bias)


def _add_in_place(y: Tensor, bias: Tensor) -> Tensor:
    """`output.add_(bias)`: y's own storage under a new node."""
    device = y.storage.device
    device.compute("aten.add_", "pointwise", y.dtype, y.numel, 2 * y.num_bytes)
    result = Tensor(y.storage, y.shape, y.strides, y.dtype)
    return record(result, "AddBackward0", (y, bias), add_backward)


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`torch.addmm(bias, a, b)`: [n, m] @ [m, p] + [p]."""
    return _product(a, b, bias)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm(a, b)`: [n, m] @ [m, p]."""
    return _product(a, b, None)


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    device = a.storage.device
    label = "aten.mm" if bias is None else "aten.addmm"
    name = "MmBackward0" if bias is None else "AddmmBackward0"
    data = (a.shape, a.strides, b.shape, b.strides)
    others = each_for_the_other(a, b)
    # Saved in the order of their names: mat2 before self, but mat1 before mat2.
    saved = others if bias is None else others[::-1]
    node = begin(name, (a, b, bias), _product_backward, saved, data)

    def compute() -> tuple[Tensor]:
        y = empty(device, (a.shape[0], b.shape[1]), a.dtype, label)
        _matmul_cost(device, label, y, a.shape[1], a.num_bytes + b.num_bytes)
        return (y,)

    return finish(kept(device, compute)[0], node)


def _product_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`mm_mat1_backward`, `mm_mat2_backward`: column-major operands get column-major gradients."""
    grad = only_gradient(grads)
    a_shape, a_strides, b_shape, b_strides = node.data
    others = [saved.unpack() for saved in node.saved]
    if node.name == "AddmmBackward0":
        others.reverse()
    to_a = to_b = None
    if node.needs(1) and node.name == "MmBackward0":
        # Formulas run in the order of the operands' names, too.
        to_b = _to_second(grad, others[-1], b_shape, b_strides)
    if node.needs(0):
        column_major = _is_column_major(a_shape, a_strides)
        to_a = t(mm(others[0], t(grad))) if column_major else mm(grad, t(others[0]))
    if node.needs(1) and to_b is None:
        to_b = _to_second(grad, others[-1], b_shape, b_strides)
    return (to_a, to_b, grad if node.needs(2) else None)


def _to_second(grad: Tensor, a: Tensor, shape: Shape, strides: Shape) -> Tensor:
    if _is_column_major(shape, strides):
        return t(mm(t(grad), a))
    return mm(t(a), grad)


def _is_column_major(shape: Shape, strides: Shape) -> bool:
    return strides[0] == 1 and strides[1] == shape[0]


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm(a, b)`: [batch, n, m] @ [batch, m, p]; saves both."""
    if a.storage.device.autocast is not None:
        a, b = cast_down(a), cast_down(b)
    device = a.storage.device
    node = begin("BmmBackward0", (a, b), _bmm_backward, each_for_the_other(a, b))

    def compute() -> tuple[Tensor]:
        y = empty(device, (a.shape[0], a.shape[1], b.shape[2]), a.dtype, "aten.bmm")
        _matmul_cost(device, "aten.bmm", y, a.shape[2], a.num_bytes + b.num_bytes)
        return (y,)

    return finish(kept(device, compute)[0], node)


def _bmm_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """The second operand's gradient comes first."""
    grad = only_gradient(grads)
    others = [saved.unpack() for saved in node.saved]
    to_b = bmm(transpose(others[-1], 1, 2), grad) if node.needs(1) else None
    to_a = bmm(grad, transpose(others[0], 1, 2)) if node.needs(0) else None
    return (to_a, to_b)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` (at::matmul): folds to mm where b is a matrix, else batches to bmm."""
    if a.storage.device.autocast is not None:
        # The operands themselves live until the call returns, as the caller's references do.
        cast_b = cast_down(b)
        return _matmul(cast_down(a), cast_b, b.requires_grad)
    return _matmul(a, b, b.requires_grad)


def _matmul(a: Tensor, b: Tensor, is_trained: bool) -> Tensor:
    if len(a.shape) == 2 and len(b.shape) == 2:
        return mm(a, b)
    if len(a.shape) >= 3 and len(b.shape) == 2 and (is_trained or _folds(a)):
        folded = reshape(a, -1, a.shape[-1])
        y = mm(folded, b)
        return view(y, *a.shape[:-1], b.shape[1], name="UnsafeViewBackward0")
    batch = a.shape[:-2]
    if len(b.shape) == 2:
        b = expand(b, *batch, *b.shape)
    assert batch == b.shape[:-2], f"batches {batch} and {b.shape[:-2]} differ"
    num = prod(batch)
    left = reshape(expand(a, *a.shape), num, *a.shape[-2:])
    right = reshape(expand(b, *b.shape), num, *b.shape[-2:])
    y = bmm(left, right)
    return view(y, *batch, a.shape[-2], b.shape[-1], name="UnsafeViewBackward0")


def _folds(a: Tensor) -> bool:
    """Whether a's rows are a matrix without a copy, which is made only where `b` is trained
    (should_fold of aten/src/ATen/native/LinearAlgebra.cpp)."""
    return all(a.strides[i] == a.strides[i + 1] * a.shape[i + 1] for i in range(len(a.shape) - 2))


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """`F.conv2d(x, weight, bias, stride)` without padding: [B, in, H, W] to [B, out, H', W'].

    Saves x and the weight. A channels-last input gives a channels-last output.
    """
    device = x.storage.device
    if device.autocast is not None:
        if bias is not None:
            bias = cast_down(bias)
        weight = cast_down(weight)
        x = cast_down(x)
    out, channels, kernel_h, kernel_w = weight.shape
    shape = (
        x.shape[0],
        out,
        (x.shape[2] - kernel_h) // stride + 1,
        (x.shape[3] - kernel_w) // stride + 1,
    )
    strides = None
    if not x.is_contiguous and is_contiguous(_nhwc(x.shape), _nhwc(x.strides)):
        strides = (shape[1] * shape[2] * shape[3], 1, shape[3] * shape[1], shape[1])
    inner = channels * kernel_h * kernel_w
    node = begin("ConvolutionBackward0", (x, weight, bias), _conv_backward, (x, weight), inner)
    y = empty(device, shape, x.dtype, "aten.convolution", strides)
    device.try_convolution("forward", x.shape, x.dtype, x.strides, weight.shape, stride)
    device.compute(
        "aten.convolution", "conv", y.dtype, 2 * y.numel * inner,
        x.num_bytes + weight.num_bytes + y.num_bytes,
    )  # fmt: skip
    return finish(y, node)


def _nhwc(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[3], shape[1])


def _conv_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    x, weight = node.unpack(0), node.unpack(1)
    device = grad.storage.device
    flops, moved = 2 * grad.numel * node.data, grad.num_bytes + x.num_bytes + weight.num_bytes
    results: list[Tensor | None] = [None, None, None]
    label = "aten.convolution_backward"
    # cuDNN takes it in the layout of the input.
    copied = None if _same_order(grad, x) else take_bytes(device, grad.num_bytes, label)
    for index, source in ((0, x), (1, weight)):
        if node.needs(index):
            results[index] = empty(device, source.shape, source.dtype, label, source.strides)
            device.try_convolution(index, x.shape, x.dtype, x.strides, weight.shape, grad.shape)
            device.compute(label, "conv", grad.dtype, flops, moved)
    del copied
    if node.needs(2):
        results[2] = empty(device, (weight.shape[0],), grad.dtype, label)
        take_reduction(grad, (0, 2, 3), label)
        device.compute(label, "reduction", grad.dtype, grad.numel, grad.num_bytes)
    return tuple(results)


def _same_order(a: Tensor, b: Tensor) -> bool:
    return a.is_contiguous == b.is_contiguous
