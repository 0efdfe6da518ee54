"""Layer norm, softmax and vector norms: run in fp32 under autocast."""

from __future__ import annotations

from planner.step.autograd import Gradients, Node, begin, finish, only_gradient, pointwise_cost
from planner.step.pointwise import (
    autocast_up,
    binary,
    clamp_min,
    div,
    like,
    unary,
)
from planner.step.reductions import take_reduced, take_reduction
from planner.step.tensor import DTYPE_BYTES, TakenScratch, Tensor, empty, take_bytes
from planner.step.views import expand


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`F.layer_norm` over the last dimension: saves x (its fp32 cast), mean and rstd, both fp32."""
    bias, weight, x = autocast_up(bias), autocast_up(weight), autocast_up(x)
    device = x.storage.device
    node = begin(
        "NativeLayerNormBackward0", (x, weight, bias), _layer_norm_backward, (x, weight, bias)
    )
    copied = _contiguous(x, "aten.native_layer_norm")
    y = empty(device, x.shape, x.dtype, "aten.native_layer_norm")
    rows = (*x.shape[:-1], 1)
    # The statistics are fp32 on CUDA for low-precision inputs too (pure bf16).
    mean = empty(device, rows, "float32", "aten.native_layer_norm")
    rstd = empty(device, rows, "float32", "aten.native_layer_norm")
    device.compute(
        "aten.native_layer_norm", "reduction", x.dtype, 8 * x.numel, x.num_bytes + y.num_bytes
    )
    del copied
    return finish(y, node, (mean, rstd))


def _contiguous(x: Tensor, label: str) -> TakenScratch | None:
    """The copy that the kernel makes of what does not lie row by row."""
    return None if x.is_contiguous else take_bytes(x.storage.device, x.num_bytes, label)


def _layer_norm_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    x, weight = node.unpack(0), node.unpack(1)
    bias, mean, rstd = node.unpack(2), node.unpack(3), node.unpack(4)
    device = x.storage.device
    label = "aten.native_layer_norm_backward"
    results: list[Tensor | None] = [None, None, None]
    copied = _contiguous(x, label)
    if node.needs(0):
        results[0] = empty(device, x.shape, x.dtype, label)
    _norm_of_columns(node, grad, (x, weight, bias), results, label)
    device.compute(label, "reduction", x.dtype, 16 * x.numel, grad.num_bytes + 2 * x.num_bytes, 2)
    del mean, rstd, copied
    return tuple(results)


def _norm_of_columns(
    node: Node,
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: list[Tensor | None],
    label: str,
) -> None:
    """The gradients of weight and bias. Where rows are many, blocks leave partial sums, and sums of
    these ("norm_replaced") take the place of gradients as large: here they go, and these stay."""
    x, *others = inputs
    device = x.storage.device
    wanted = [place for place in (1, 2) if node.needs(place)]
    sizes = (x.numel // x.shape[-1], x.shape[-1])
    itemsize = DTYPE_BYTES[x.dtype]
    for place in wanted:
        results[place] = empty(device, others[place - 1].shape, others[place - 1].dtype, label)
    copied = _contiguous(grad, label)
    parts = [device.take("norm_parts", (*sizes, itemsize), label) for _ in wanted]
    for _ in wanted:
        replaced = device.take("norm_replaced", (*sizes, itemsize), label)
        take_reduced(device, "norm_", sizes, label)
        del replaced
    while parts:
        parts.pop()
    del copied


def softmax(x: Tensor) -> Tensor:
    """`x.softmax(-1)`: fp32 under autocast; saves its result.

    From fp16, CUDA computes the fp32 result without a cast copy (`half_to_float`); bf16 has one.
    """
    half_to_float = x.dtype == "float16" and x.storage.device.autocast is not None
    source = x if half_to_float else autocast_up(x)
    dtype = "float32" if half_to_float else source.dtype
    return _softmax_of(
        source, dtype, "aten._softmax", "SoftmaxBackward0", "aten._softmax_backward_data"
    )


def log_softmax(x: Tensor) -> Tensor:
    """`torch.log_softmax(x, -1, dtype=x.dtype)`, as `cross_entropy` calls it: naming the dtype
    keeps autocast from changing it. Saves its result."""
    return _softmax_of(
        x, x.dtype, "aten._log_softmax", "LogSoftmaxBackward0", "aten._log_softmax_backward_data"
    )


def _softmax_of(source: Tensor, dtype: str, label: str, name: str, backward_label: str) -> Tensor:
    device = source.storage.device
    node = begin(name, (source,), _softmax_backward, data=(backward_label, source.dtype))
    y = like(source, label, dtype)
    device.compute(label, "reduction", dtype, 5 * y.numel, source.num_bytes + y.num_bytes)
    return finish(y, node, (y,))


def _softmax_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    result = node.unpack(0)
    label, dtype = node.data
    y = like(result, label, dtype)
    product = None
    if label == "aten._softmax_backward_data":  # of gradient and result (cuda/SoftMax.cu)
        product = take_bytes(y.storage.device, result.num_bytes, label)
    y.storage.device.compute(
        label, "reduction", dtype, 4 * y.numel, 2 * result.num_bytes + y.num_bytes
    )
    del product
    del grad
    return (y,)


def normalize(x: Tensor) -> Tensor:
    """`F.normalize(x, dim=-1)`: x / x.norm(2, -1, keepdim=True).clamp_min(eps).expand_as(x)."""
    norm = vector_norm(x)
    denominator = expand(clamp_min(norm), *x.shape)
    del norm
    return div(x, denominator)


def vector_norm(x: Tensor) -> Tensor:
    """`x.norm(2, dim=-1, keepdim=True)`: fp32 result under autocast; saves x and the norm."""
    low = x.storage.device.autocast is not None and x.dtype in ("bfloat16", "float16")
    dtype = "float32" if low else x.dtype
    node = begin("LinalgVectorNormBackward0", (x,), _norm_backward, (x,))
    y = empty(x.storage.device, (*x.shape[:-1], 1), dtype, "aten.linalg_vector_norm")
    take_reduction(x, (len(x.shape) - 1,), "aten.linalg_vector_norm")
    x.storage.device.compute(
        "aten.linalg_vector_norm", "reduction", x.dtype, 2 * x.numel, x.num_bytes + y.num_bytes
    )
    return finish(y, node, (y,))


def _norm_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`norm_backward` for p = 2: grad * (self / norm).masked_fill_(norm == 0, 0)."""
    x, norm = node.unpack(0), node.unpack(1)
    ratio = binary(x, norm, "aten.div")
    mask = unary(norm, "aten.eq", "bool")
    pointwise_cost(ratio.storage.device, "aten.masked_fill_", ratio, 1)
    to_x = binary(only_gradient(grads), ratio, "aten.mul")
    del mask
    return (to_x,)
