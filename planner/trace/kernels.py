"""Operations whose fake kernel is not what a CUDA kernel does, or cannot be had without values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.core.torch_version import torch_version
from planner.step import shards
from planner.step.attention import SEED_ON_DEVICE, padded_row
from planner.trace.scratch import format_of

aten = torch.ops.aten


def run_as_on_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` on fake tensors, with the results of CUDA's kernel where they differ."""
    if func in _REPLACED:
        return _REPLACED[func](*args, **kwargs)
    result = func(*args, **kwargs)
    if func in _CONTIGUOUS:
        return (_like_input(result[0], args[_CONTIGUOUS[func]]), *result[1:])
    if func is aten.convolution.default:
        return _in_format(result, *args[:2])
    if func is aten.convolution_backward.default:
        return (*(_in_format(gradient, *args[1:3]) for gradient in result[:2]), result[2])
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return (*result[:3], _in_padded_rows(result[3]))
    if func in _RESIZED:
        return _in_block_of(result, args[0])
    if func is aten.native_batch_norm_backward.default:
        return (_in_format(result[0], args[1], args[1]), *result[1:])
    if func in (aten.native_layer_norm.default, aten.native_batch_norm.default):
        return (result[0], *(_in_fp32(statistic) for statistic in result[1:]))
    return result


@functools.cache
def is_in_place(func: Any) -> bool:
    name: str = func._schema.name
    return name.endswith("_") and not name.endswith("__")


# Whose first result is contiguous on CUDA, and the place of the argument that it is like.
_CONTIGUOUS: dict[Any, int] = {
    aten.native_layer_norm_backward.default: 1,
    aten.native_group_norm.default: 0,
    aten.native_group_norm_backward.default: 1,
}
# Whose result is made as large as the first argument, and then resized; of the losses, whatever
# the reduction (ATen/native/Loss.cpp).
_RESIZED = (
    aten.im2col.default, aten.col2im.default, aten.mse_loss.default, aten.smooth_l1_loss.default,
)  # fmt: skip
_DROPOUT = 5  # its place among the arguments of memory-efficient attention


def host_results(func: Any, args: tuple[Any, ...], result: Any) -> Sequence[Tensor]:
    """Those tensors of `result` that CUDA's kernel makes on the host."""
    if func is not aten._scaled_dot_product_efficient_attention.default:
        return ()
    draws = len(args) > _DROPOUT and args[_DROPOUT] > 0
    if draws or torch_version() < SEED_ON_DEVICE:
        # Seed and offset of the random numbers, but for graph capture
        # (aten/src/ATen/native/transformers/cuda/attention.cu, Note [Seed and Offset Device]).
        return result[2:4]  # type: ignore[no-any-return]
    return ()


def _like_input(gradient: Tensor | None, input_: Tensor) -> Tensor | None:
    """The fake kernel lets the strides of the incoming gradient through; real ones do not."""
    if gradient is None or gradient.is_contiguous():
        return gradient
    return _contiguous_like(input_)


def _in_format(made: Tensor | None, x: Tensor, weight: Tensor) -> Tensor | None:
    """Fake ones are in the format of a CPU's kernel, which depends on the number of its threads."""
    wanted = format_of(x, weight)
    if made is None or made.is_contiguous(memory_format=wanted):
        return made
    return torch.empty_like(made, memory_format=wanted)


def _in_padded_rows(gradient: Tensor | None) -> Tensor | None:
    """Rows of a mask's gradient are padded; what FakeTensorMode keeps of a result for the next time
    is its strides, and no pad behind the last row."""
    if gradient is None:
        return None
    row = gradient.shape[-1]
    return gradient.new_empty((*gradient.shape[:-1], padded_row(row)))[..., :row]


def _in_block_of(made: Tensor, x: Tensor) -> Tensor:
    """Made as large as `x`, then resized: what is smaller keeps the block."""
    if made.numel() >= x.numel():
        return made
    return made.new_empty(x.numel())[: made.numel()].view(made.shape)


def _in_fp32(statistic: Tensor) -> Tensor:
    """Mean and reciprocal deviation: CPU kernels keep them in the input's dtype, CUDA in fp32."""
    if statistic.dtype == torch.float32:
        return statistic
    return torch.empty_like(statistic, dtype=torch.float32)


def rms_norm(x: Tensor, shape: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:
    """Contiguous, and of each row a reciprocal, in fp32 (cuda/layer_norm_kernel.cu)."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return _contiguous_like(x), x.new_empty(rows, dtype=torch.float32)


def rms_norm_backward(
    _grad: Tensor, x: Tensor, _shape: Sequence[int], _rstd: Tensor, weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    of_weight = None if weight is None or not wanted[1] else _contiguous_like(weight)
    return _contiguous_like(x) if wanted[0] else None, of_weight


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_REPLACED: dict[Any, Any] = {
    aten._amp_update_scale_.default: lambda scale, *_: scale,
    aten._amp_foreach_non_finite_check_and_unscale_.default: lambda *_: None,
}


def chunk_cat_table(tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> int:
    """The bytes of the table that `chunk_cat` takes on CUDA while it runs."""
    chunks = [-(-t.shape[0] // num_chunks) * math.prod(t.shape[1:]) for t in tensors]
    dtype, whole_dtype = (str(t.dtype).removeprefix("torch.") for t in (tensors[0], out))
    return shards.chunk_cat_table(chunks, dtype, whole_dtype)
