"""What CUDA kernels ask for beside their results, written down where a trace meets them.

A fake kernel allocates its results and nothing else. `FOLLOWED` has, by operation, what CUDA's does
in order: results noted as they come to life, scratch taken and given back between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.step.reductions import reduction_of

aten = torch.ops.aten


class Taker(Protocol):
    """The recorder, as an operation sees it."""

    def took(self, law: str, sizes: tuple[int, ...]) -> int:
        """Scratch; its number."""

    def gave_back(self, number: int) -> None: ...

    def made(self, result: Tensor | None) -> None:
        """A result came to life."""

    def tried_convolution(self, *key: object) -> None: ...


Follow = Callable[[Taker, tuple[Any, ...], Any], None]


@contextmanager
def _held(taker: Taker, law: str, *sizes: int) -> Iterator[None]:
    number = taker.took(law, sizes)
    yield
    taker.gave_back(number)


@contextmanager
def _copied(taker: Taker, tensor: Tensor | None, is_needed: bool) -> Iterator[None]:
    """A copy of a tensor, where one `is_needed`."""
    if tensor is None or not is_needed:
        yield
        return
    with _held(taker, "bytes", tensor.numel() * tensor.itemsize):
        yield


def _reduce(taker: Taker, x: Tensor, dims: Sequence[int]) -> None:
    """The partial sums of blocks that share an output, and their semaphores."""
    found = reduction_of(x.shape, x.stride(), {d % x.dim() for d in dims} if x.dim() else ())
    if found is not None:
        _take_sums(taker, "", found)


def _take_sums(taker: Taker, of: str, sizes: tuple[int, ...]) -> None:
    with _held(taker, f"{of}reduction", *sizes), _held(taker, f"{of}semaphores", *sizes):
        pass


def _follow_sum(place: int | None) -> Follow:
    """Of an operation whose argument at `place` says which dimensions are summed; all, if none."""

    def follow(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
        taker.made(result)
        x: Tensor = args[0]
        dims = args[place] if place is not None and len(args) > place else None
        dims = [dims] if isinstance(dims, int) else dims
        _reduce(taker, x, dims or range(x.dim()))

    return follow


def _follow_layer_norm(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    x: Tensor = args[0]
    with _copied(taker, x, not x.is_contiguous()):
        for tensor in result:
            taker.made(tensor)


def _follow_layer_norm_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """As `planner.step.normalization` has it."""
    grad, x, shape = args[:3]
    columns = torch.Size(shape).numel()
    sizes = (x.numel() // columns, columns)
    wanted = [tensor for tensor in result[1:] if tensor is not None]
    with _copied(taker, x, not x.is_contiguous()):
        taker.made(result[0])
        replaced = [taker.took("norm_replaced", (*sizes, x.itemsize)) for _ in wanted]
        with _copied(taker, grad, not grad.is_contiguous()):
            parts = [taker.took("norm_parts", (*sizes, x.itemsize)) for _ in wanted]
            for tensor, old in zip(wanted, replaced, strict=True):
                taker.made(tensor)
                _take_sums(taker, "norm_", sizes)
                taker.gave_back(old)
            for part in reversed(parts):
                taker.gave_back(part)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and _in_order(x, torch.channels_last)


def _in_order(x: Tensor, memory_format: torch.memory_format) -> bool:
    return x.is_contiguous(memory_format=memory_format)


def _follow_convolution(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    x, weight = args[:2]
    wanted = _format(x, weight)
    with _copied(taker, x, not _in_order(x, wanted)):
        taker.made(result)
        taker.tried_convolution("forward", *_key(args[:2]), str(args[3:]))
        with _copied(taker, weight, not _in_order(weight, wanted)):
            pass


def _follow_convolution_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    grad, x, weight = args[:3]
    wanted = _format(x, weight)
    with _copied(taker, grad, not _in_order(grad, wanted)):
        for place in (0, 1):
            if result[place] is not None:
                taker.made(result[place])
                taker.tried_convolution(place, *_key(args[:3]), str(args[4:]))
    if result[2] is not None:
        taker.made(result[2])
        _reduce(taker, grad, [d for d in range(grad.dim()) if d != 1])


def _format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """That in which cuDNN is given tensors (`cudnn_conv_suggest_memory_format`)."""
    last = _is_channels_last(x) or _is_channels_last(weight)
    return torch.channels_last if last else torch.contiguous_format


def _key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)


def _follow_index_put(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """With accumulation indices are sorted (cuda/Indexing.cu, index_put_with_sort_kernel)."""
    taker.made(result)
    table, indices, values = args[:3]
    if len(args) < 4 or not args[3] or len(indices) != 1 or indices[0] is None:
        return
    index: Tensor = indices[0]
    num_bytes = index.numel() * 8
    raw = taker.took("bytes", (num_bytes,))
    with _held(taker, "bytes", num_bytes):
        taker.gave_back(raw)
        with _copied(taker, values, not values.is_contiguous()):
            held = [taker.took("bytes", (num_bytes,)) for _ in range(3)]
            held.append(taker.took("sort", (index.numel(), table.shape[0])))
            for number in reversed(held):
                taker.gave_back(number)


def _follow_softmax_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """The product of gradient and result (cuda/SoftMax.cu)."""
    taker.made(result)
    with _copied(taker, args[1], True):
        pass


def _follow_efficient_attention(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Seed and offset come first, where they are on the device
    (aten/src/ATen/native/transformers/cuda/attention.cu, _efficient_attention_forward)."""
    for tensor in result[2:4]:
        taker.made(tensor)


# The tiles of flash attention's backward (torch's flash_api.cpp, mha_bwd): queries by 128, channels
# of a head by 32 up to 192, else 256.
_FLASH_ROWS, _FLASH_CHANNELS, _FLASH_WIDE = 128, 32, 192


def _follow_flash_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Row sums of gradient times result, and the queries' gradient in fp32."""
    for tensor in result:
        taker.made(tensor)
    batch, heads, rows, channels = args[1].shape
    rows = -(-rows // _FLASH_ROWS) * _FLASH_ROWS
    wide = -(-channels // _FLASH_CHANNELS) * _FLASH_CHANNELS if channels <= _FLASH_WIDE else 256
    sums, gradient = 4 * batch * heads * rows, 4 * batch * heads * rows * wide
    with _held(taker, "bytes", sums), _held(taker, "bytes", gradient):
        pass


FOLLOWED: dict[Any, Follow] = {
    aten._scaled_dot_product_efficient_attention.default: _follow_efficient_attention,
    aten._scaled_dot_product_flash_attention_backward.default: _follow_flash_backward,
    aten.sum.default: _follow_sum(None),
    aten.sum.dim_IntList: _follow_sum(1),
    aten.mean.default: _follow_sum(None),
    aten.mean.dim: _follow_sum(1),
    aten.linalg_vector_norm.default: _follow_sum(2),
    aten.native_layer_norm.default: _follow_layer_norm,
    aten.native_layer_norm_backward.default: _follow_layer_norm_backward,
    aten.convolution.default: _follow_convolution,
    aten.convolution_backward.default: _follow_convolution_backward,
    aten._softmax_backward_data.default: _follow_softmax_backward,
    aten.index_put.default: _follow_index_put,
    aten.index_put_.default: _follow_index_put,
}
