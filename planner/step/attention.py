"""`F.scaled_dot_product_attention` as CUDA runs it with a float mask: the memory-efficient kernel.

From aten/src/ATen/native/transformers/attention.cpp and cuda/attention{,_backward}.cu. Flash
rejects any mask, and a learned position bias is one (sdp_utils.cpp).
"""

from __future__ import annotations

from typing import NamedTuple

from planner.core.torch_version import torch_version
from planner.step.autocast import cast_down
from planner.step.autograd import Gradients, Node, begin, finish, only_gradient
from planner.step.checkpointing import kept
from planner.step.strides import Shape
from planner.step.tensor import Device, Tensor, empty
from planner.step.views import expand, pad_last, slice_

MASK_ROW_ELEMENTS = 8  # rows of the mask are padded to a multiple of this (preprocess_mask)
MASK_GRADIENT_ROW_ELEMENTS = 16  # and rows of its gradient to a multiple of this
LOGSUMEXP_ROW_ELEMENTS = 32  # the kernel's query block
# The backward adds up the gradient of the queries in blocks of 64 x 64 floats, each behind four
# int32 (GradQTempStorage in cuda/mem_eff_attention/kernel_backward.h of torch 2.13; heads of up to
# 64 channels are one block wide). Needed from capability 7.0 on, in every dtype.
BLOCK_ROWS = 64
BLOCK_BYTES = 16 + 64 * 64 * 4


SEED_ON_DEVICE = (2, 14)  # from that torch on: run on 2.13.0, 2.14.1 and 2.15.0


class Scratch(NamedTuple):
    """Bytes that the backward kernel's call takes besides its results, and gives back at its end
    (attention_backward.cu): `delta`, the row sums of gradient times result, and the workspace.
    Where the kernel does not compute `delta` by itself (fp32), it is made of the whole `product`
    and its `sums`, which go before the workspace is asked for. 0 is no request."""

    product: int
    sums: int
    delta: int
    workspace: int


def backward_scratch(shape: Shape, is_half: bool) -> Scratch:
    """Of queries [batch, heads, N, d]."""
    batch, heads, rows, channels = shape
    delta = batch * heads * rows * 4
    blocks = -(-rows // BLOCK_ROWS) * -(-channels // BLOCK_ROWS)
    workspace = batch * heads * blocks * BLOCK_BYTES
    if is_half:
        return Scratch(0, 0, delta, workspace)
    # The sums are [batch, N, heads]: turned round they are a copy, but where either side is one.
    sums = delta if heads > 1 and rows > 1 else 0
    return Scratch(delta * channels, sums, delta, workspace)


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
    aligned = expand(_aligned(mask), *q.shape[:3], k.shape[2])
    draws = dropout_rate > 0 and q.storage.device.training
    return _efficient_attention(q, k, v, aligned, draws)


def _aligned(mask: Tensor) -> Tensor:
    """`pad_bias`: a view of a copy with padded rows, where the strides are not multiples of 8.

    Strides of dimensions of size 1 count too, so rows of 64 may get 8 more elements.
    """
    if all(stride % MASK_ROW_ELEMENTS == 0 for stride in mask.strides[:-1]):
        return mask
    row = mask.shape[-1]
    return slice_(pad_last(mask, MASK_ROW_ELEMENTS - row % MASK_ROW_ELEMENTS), -1, 0, row)


def _efficient_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, draws: bool) -> Tensor:
    """One that `draws` random numbers is computed again wherever it is checkpointed."""
    device = q.storage.device
    label = "aten._scaled_dot_product_efficient_attention"
    batch, heads, num_queries, _ = q.shape
    flops = 4 * q.numel * k.shape[2]
    name = "ScaledDotProductEfficientAttentionBackward0"
    # Saved in the order of their names, as torch does: attn_bias, key, query, value.
    node = begin(name, (q, k, v, mask), _attention_backward, (mask, k, q, v), flops)
    blocks = -(-num_queries // LOGSUMEXP_ROW_ELEMENTS) if node is not None else 0

    def compute() -> tuple[Tensor, ...]:
        drawn = () if draws else _random_state(device, label)
        out = _heads_inside(q, v.shape[-1], label)
        row = blocks * LOGSUMEXP_ROW_ELEMENTS
        logsumexp = empty(device, (batch, heads, row), "float32", label)
        device.compute(label, "attention", q.dtype, flops, _moved(q, k, v, out, mask))
        return (out, logsumexp, *drawn)

    out, logsumexp, *drawn = compute() if draws else kept(device, compute)
    return finish(out, node, (logsumexp, out, *drawn))


def _random_state(device: Device, label: str) -> tuple[Tensor, ...]:
    """Seed and offset of the random numbers: from torch 2.14 on they are on the device."""
    if torch_version() < SEED_ON_DEVICE:
        return ()
    return (empty(device, (), "int64", label), empty(device, (), "int64", label))


def _moved(*tensors: Tensor) -> int:
    return sum(t.num_bytes for t in tensors)


def _heads_inside(x: Tensor, channels: int, label: str) -> Tensor:
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
    to_q = _heads_inside(q, q.shape[-1], label)
    to_k = _heads_inside(k, k.shape[-1], label)
    to_v = _heads_inside(v, v.shape[-1], label)
    to_mask = _mask_gradient(mask, label) if node.needs(3) else None
    device.compute(
        label, "attention", q.dtype, 5 * node.data // 2,
        2 * _moved(q, k, v) + _moved(grad, out, mask) + (to_mask.num_bytes if to_mask else 0),
    )  # fmt: skip
    _take_scratch(q, label)
    del logsumexp
    return (to_q, to_k, to_v, to_mask)


def _take_scratch(q: Tensor, label: str) -> None:
    """What `Scratch` says, asked for and given back."""
    device = q.storage.device
    scratch = backward_scratch(q.shape, q.dtype != "float32")
    made = [empty(device, (n,), "uint8", label) for n in scratch[:2] if n]
    delta = empty(device, (scratch.delta,), "uint8", label)
    del made
    workspace = empty(device, (scratch.workspace,), "uint8", label)
    del delta, workspace


def padded_row(row: int) -> int:
    """The elements that a row of a mask's gradient takes."""
    return -(-row // MASK_GRADIENT_ROW_ELEMENTS) * MASK_GRADIENT_ROW_ELEMENTS


def _mask_gradient(mask: Tensor, label: str) -> Tensor:
    """At the full expanded shape, its rows padded to a multiple of 16 and seen without the pad."""
    padded = padded_row(mask.shape[-1])
    whole = empty(mask.storage.device, (*mask.shape[:-1], padded), mask.dtype, label)
    return Tensor(whole.storage, mask.shape, whole.strides, mask.dtype)
