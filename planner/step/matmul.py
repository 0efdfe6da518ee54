"""Matrix products, convolution and attention: linear, matmul, bmm, conv2d, then attention.

FLOPs count a multiply-add as two. Under autocast the operands are cast down first, bias before
weight before input, as the arguments of the C++ call are evaluated.
"""

from math import prod
from typing import NamedTuple

from planner.core.torch_version import torch_version
from planner.step.autograd import make_node, only_gradient, record, set_history
from planner.step.engine import cast_down
from planner.step.layout import Shape, channels_last_strides, is_contiguous
from planner.step.pointwise import add, add_backward, factors_to_save, take_reduction
from planner.step.tensor import Device, Gradients, Node, Tensor, empty, take_bytes
from planner.step.views import expand, pad_last, reshape, slice_, t, transpose, view


def _matmul_cost(device: Device, name: str, y: Tensor, inner: int, num_bytes: int) -> None:
    device.compute(name, "matmul", y.dtype, 2 * y.numel * inner, num_bytes + y.num_bytes)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`: [..., in] to [..., out]; saves x and the weight's cast."""
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
    # In place, unless within the modes that selective checkpointing enters
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
    factors = factors_to_save(a, b)
    # Saved in the order of their names: mat2 before self, but mat1 before mat2.
    saved = factors if bias is None else factors[::-1]
    node = make_node(name, (a, b, bias), _product_backward, saved, data)

    def compute() -> tuple[Tensor]:
        y = empty(device, (a.shape[0], b.shape[1]), a.dtype, label)
        _matmul_cost(device, label, y, a.shape[1], a.num_bytes + b.num_bytes)
        return (y,)

    return set_history(device.keep_results(compute)[0], node)


def _product_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """`mm_mat1_backward`, `mm_mat2_backward`: column-major operands get column-major gradients."""
    grad = only_gradient(grads)
    a_shape, a_strides, b_shape, b_strides = node.data
    factors = [saved.unpack() for saved in node.saved]
    if node.name == "AddmmBackward0":
        factors.reverse()
    to_a = to_b = None
    if node.needs(1) and node.name == "MmBackward0":
        # Formulas run in the order of the operands' names, too.
        to_b = _second_gradient(grad, factors[-1], b_shape, b_strides)
    if node.needs(0):
        column_major = _is_column_major(a_shape, a_strides)
        to_a = t(mm(factors[0], t(grad))) if column_major else mm(grad, t(factors[0]))
    if node.needs(1) and to_b is None:
        to_b = _second_gradient(grad, factors[-1], b_shape, b_strides)
    return (to_a, to_b, grad if node.needs(2) else None)


def _second_gradient(grad: Tensor, a: Tensor, shape: Shape, strides: Shape) -> Tensor:
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
    node = make_node("BmmBackward0", (a, b), _bmm_backward, factors_to_save(a, b))

    def compute() -> tuple[Tensor]:
        y = empty(device, (a.shape[0], a.shape[1], b.shape[2]), a.dtype, "aten.bmm")
        _matmul_cost(device, "aten.bmm", y, a.shape[2], a.num_bytes + b.num_bytes)
        return (y,)

    return set_history(device.keep_results(compute)[0], node)


def _bmm_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """Computes the second operand's gradient first."""
    grad = only_gradient(grads)
    factors = [saved.unpack() for saved in node.saved]
    to_b = bmm(transpose(factors[-1], 1, 2), grad) if node.needs(1) else None
    to_a = bmm(grad, transpose(factors[0], 1, 2)) if node.needs(0) else None
    return (to_a, to_b)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` (at::matmul): folds to mm if b is a matrix, and else batches to bmm."""
    if a.storage.device.autocast is not None:
        # The operands live until the call returns, as the caller has references to them.
        cast_b = cast_down(b)
        return _matmul(cast_down(a), cast_b, b.requires_grad)
    return _matmul(a, b, b.requires_grad)


def _matmul(a: Tensor, b: Tensor, is_trained: bool) -> Tensor:
    if len(a.shape) == 2 and len(b.shape) == 2:
        return mm(a, b)
    if len(a.shape) >= 3 and len(b.shape) == 2 and (is_trained or _should_fold(a)):
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


def _should_fold(a: Tensor) -> bool:
    """Whether the rows of a are a matrix without a copy; one is made only if `b` is trained
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
    height, width = (x.shape[2] - kernel_h) // stride + 1, (x.shape[3] - kernel_w) // stride + 1
    shape = (x.shape[0], out, height, width)
    is_channels_last = is_contiguous(_nhwc(x.shape), _nhwc(x.strides)) and not x.is_contiguous
    strides = channels_last_strides(shape) if is_channels_last else None
    inner = channels * kernel_h * kernel_w
    node = make_node("ConvolutionBackward0", (x, weight, bias), _conv_backward, (x, weight), inner)
    y = empty(device, shape, x.dtype, "aten.convolution", strides)
    device.try_convolution("forward", x.shape, x.dtype, x.strides, weight.shape, stride)
    device.compute(
        "aten.convolution", "conv", y.dtype, 2 * y.numel * inner,
        x.num_bytes + weight.num_bytes + y.num_bytes,
    )  # fmt: skip
    return set_history(y, node)


def _nhwc(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[3], shape[1])


def _conv_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    x, weight = node.unpack(0), node.unpack(1)
    device = grad.storage.device
    flops, moved = 2 * grad.numel * node.data, grad.num_bytes + x.num_bytes + weight.num_bytes
    results: list[Tensor | None] = [None, None, None]
    label = "aten.convolution_backward"
    # cuDNN takes the gradient in the layout of the input.
    is_same_layout = grad.is_contiguous == x.is_contiguous
    copied = None if is_same_layout else take_bytes(device, grad.num_bytes, label)
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


# `F.scaled_dot_product_attention` with a float mask on CUDA: the memory-efficient kernel.
#
# From aten/src/ATen/native/transformers/attention.cpp and cuda/attention{,_backward}.cu. Flash
# rejects any mask, and a learned position bias is one (sdp_utils.cpp).

MASK_ROW_ELEMENTS = 8  # rows of the mask are padded to a multiple of this (preprocess_mask)
MASK_GRADIENT_ROW_ELEMENTS = 16  # rows of its gradient are padded to a multiple of this
LOGSUMEXP_ROW_ELEMENTS = 32  # the kernel's query block
# The backward adds up the gradient of the queries in blocks of 64 x 64 floats, each behind four
# int32 (GradQTempStorage in cuda/mem_eff_attention/kernel_backward.h of torch 2.13; heads of up to
# 64 channels are one block wide). Needed from capability 7.0 on, in every dtype.
BLOCK_ROWS = 64
BLOCK_BYTES = 16 + 64 * 64 * 4


SEED_ON_DEVICE = (2, 14)  # the first such torch: run on 2.13.0, 2.14.1 and 2.15.0


class AttentionScratch(NamedTuple):
    """The bytes that the backward's call allocates beside its results, and frees at its end
    (attention_backward.cu): `delta`, the row sums of gradient times result, and the workspace. If
    the kernel does not compute `delta` itself (fp32), it is made from the whole `product` and its
    `sums`, which are freed before the workspace is allocated. 0 is no request."""

    product: int
    sums: int
    delta: int
    workspace: int


def backward_scratch(shape: Shape, is_half: bool) -> AttentionScratch:
    """The scratch of the backward for queries of shape [batch, heads, N, d]."""
    batch, heads, rows, channels = shape
    delta = batch * heads * rows * 4
    blocks = -(-rows // BLOCK_ROWS) * -(-channels // BLOCK_ROWS)
    workspace = batch * heads * blocks * BLOCK_BYTES
    if is_half:
        return AttentionScratch(0, 0, delta, workspace)
    # The sums are [batch, N, heads]: their transpose is a copy, unless either size is 1.
    sums = delta if heads > 1 and rows > 1 else 0
    return AttentionScratch(delta * channels, sums, delta, workspace)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout_rate: float = 0.0
) -> Tensor:
    """softmax(q @ k.T / sqrt(d) + mask) @ v: q, k, v [batch, heads, N, d], mask broadcast to
    [batch, heads, N, N]. The result is [batch, heads, N, d] laid out as [batch, N, heads, d].

    Saves q, k, v, the mask, the result and its logsumexp. Dropout happens inside the kernel;
    its seed and offset are scalars, on the host up to torch 2.13, and with dropout.
    """
    if q.storage.device.autocast is not None:
        # The arguments of the C++ call are evaluated from the last to the first.
        mask, v, k, q = cast_down(mask), cast_down(v), cast_down(k), cast_down(q)
    # `mask` stays alive to the end: autocast's casts are temporaries of the whole call.
    aligned = expand(_pad_bias(mask), *q.shape[:3], k.shape[2])
    is_random = dropout_rate > 0 and q.storage.device.training
    return _efficient_attention(q, k, v, aligned, is_random)


def _pad_bias(mask: Tensor) -> Tensor:
    """`pad_bias`: a view of a copy with padded rows, if the strides are not multiples of 8.

    Strides of dimensions of size 1 count too, so rows of 64 may get 8 more elements.
    """
    if all(stride % MASK_ROW_ELEMENTS == 0 for stride in mask.strides[:-1]):
        return mask
    row = mask.shape[-1]
    return slice_(pad_last(mask, MASK_ROW_ELEMENTS - row % MASK_ROW_ELEMENTS), -1, 0, row)


def _efficient_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, is_random: bool) -> Tensor:
    """`is_random`: with dropout, so that a recomputation always computes it again."""
    device = q.storage.device
    label = "aten._scaled_dot_product_efficient_attention"
    batch, heads, num_queries, _ = q.shape
    flops = 4 * q.numel * k.shape[2]
    name = "ScaledDotProductEfficientAttentionBackward0"
    # Saved in the order of their names, as torch does: attn_bias, key, query, value.
    node = make_node(name, (q, k, v, mask), _attention_backward, (mask, k, q, v), flops)
    blocks = -(-num_queries // LOGSUMEXP_ROW_ELEMENTS) if node is not None else 0

    def compute() -> tuple[Tensor, ...]:
        random_state = () if is_random else _random_state(device, label)
        out = _empty_heads_inside(q, v.shape[-1], label)
        row = blocks * LOGSUMEXP_ROW_ELEMENTS
        logsumexp = empty(device, (batch, heads, row), "float32", label)
        device.compute(label, "attention", q.dtype, flops, _total_bytes(q, k, v, out, mask))
        return (out, logsumexp, *random_state)

    out, logsumexp, *random_state = compute() if is_random else device.keep_results(compute)
    return set_history(out, node, (logsumexp, out, *random_state))


def _random_state(device: Device, label: str) -> tuple[Tensor, ...]:
    """Seed and offset of the random numbers: from torch 2.14 on they are on the device."""
    if torch_version() < SEED_ON_DEVICE:
        return ()
    return (empty(device, (), "int64", label), empty(device, (), "int64", label))


def _total_bytes(*tensors: Tensor) -> int:
    return sum(t.num_bytes for t in tensors)


def _empty_heads_inside(x: Tensor, channels: int, label: str) -> Tensor:
    """A new [batch, heads, N, channels] laid out as [batch, N, heads, channels]."""
    batch, heads, rows, _ = x.shape
    strides = (rows * heads * channels, channels, heads * channels, 1)
    return empty(x.storage.device, (batch, heads, rows, channels), x.dtype, label, strides)


def _attention_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    grad = only_gradient(grads)
    mask, k, q, v = (node.unpack(i) for i in range(4))
    logsumexp, out = node.unpack(4), node.unpack(5)
    device = grad.storage.device
    label = "aten._scaled_dot_product_efficient_attention_backward"
    to_q = _empty_heads_inside(q, q.shape[-1], label)
    to_k = _empty_heads_inside(k, k.shape[-1], label)
    to_v = _empty_heads_inside(v, v.shape[-1], label)
    to_mask = _mask_gradient(mask, label) if node.needs(3) else None
    device.compute(
        label, "attention", q.dtype, 5 * node.data // 2,
        2 * _total_bytes(q, k, v) + _total_bytes(grad, out, mask)
        + (to_mask.num_bytes if to_mask else 0),
    )  # fmt: skip
    _take_scratch(q, label)
    del logsumexp
    return (to_q, to_k, to_v, to_mask)


def _take_scratch(q: Tensor, label: str) -> None:
    """Allocates and frees the scratch of the backward."""
    device = q.storage.device
    scratch = backward_scratch(q.shape, q.dtype != "float32")
    parts = [empty(device, (n,), "uint8", label) for n in scratch[:2] if n]
    delta = empty(device, (scratch.delta,), "uint8", label)
    del parts
    workspace = empty(device, (scratch.workspace,), "uint8", label)
    del delta, workspace


def padded_row(row: int) -> int:
    """The elements of a row of a mask's gradient, with its padding."""
    return -(-row // MASK_GRADIENT_ROW_ELEMENTS) * MASK_GRADIENT_ROW_ELEMENTS


def _mask_gradient(mask: Tensor, label: str) -> Tensor:
    """A new gradient of the expanded mask: a view without the padding of its rows."""
    padded = padded_row(mask.shape[-1])
    whole = empty(mask.storage.device, (*mask.shape[:-1], padded), mask.dtype, label)
    return Tensor(whole.storage, mask.shape, whole.strides, mask.dtype)
