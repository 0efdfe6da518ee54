"""`F.scaled_dot_product_attention` as CUDA runs it: which kernel, and what is done before it.

Legend: B batch, H heads of queries, K of keys and values, N queries, M keys, D channels of a head.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from planner.core.torch_version import torch_version

aten = torch.ops.aten
Kernel = Literal["flash", "efficient", "math"]
Capability = tuple[int, int]

HALF = (torch.float16, torch.bfloat16)
# A trace is of no device: of one from A100 on whose first choice is flash attention.
AMPERE: Capability = (8, 0)
_FLASH_MAX_CHANNELS = 256  # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
# What has no batch gets one of 1 (`normalize_unbatched_input` of sdp_utils_cpp.h), fused kernels
# take one head of keys for all queries, and the memory-efficient one takes fewer heads of them:
# run on 2.13.0, 2.14.1 and 2.15.0 (2026-11-23), and by the header of 2.13.0.
_MORE_FUSED = (2, 14)
# The alignment of the memory-efficient kernel's mask (attention.cpp, preprocess_mask).
_MASK_ROW_ELEMENTS = 8


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    capability: Capability = AMPERE,
) -> Kernel:
    """torch's choice (sdp_utils.cpp) where cuDNN's attention is not asked first, held to torch's
    own code in tests/emulated/test_attention.py."""
    if query.dim() != 4 or not (query.dtype == key.dtype == value.dtype):
        return "math"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "math"
    if any(t.stride(-1) != 1 for t in (query, key, value)) or 0 in (query.shape[2], key.shape[2]):
        return "math"
    is_new, alike = torch_version() >= _MORE_FUSED, _has_as_many_heads(query, key, value)
    takes_fewer = _takes_fewer_heads(query, key, value, enable_gqa)
    allowed = torch.backends.cuda
    by_flash = mask is None and allowed.flash_sdp_enabled()
    by_flash = by_flash and _is_for_flash(query, key, value, is_causal, capability)
    if by_flash and (alike or (takes_fewer and (enable_gqa or is_new))):
        return "flash"
    by_efficient = allowed.mem_efficient_sdp_enabled()
    by_efficient = by_efficient and _is_for_efficient(query, value, mask, capability)
    return "efficient" if by_efficient and (alike or (takes_fewer and is_new)) else "math"


def _has_as_many_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.shape[1] == key.shape[1] == value.shape[1]


def _takes_fewer_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    heads = key.shape[1]
    if heads != value.shape[1]:
        return False
    return query.shape[1] % heads == 0 if enable_gqa else heads == 1


def _is_for_flash(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, capability: Capability
) -> bool:
    square = query.shape[2] == key.shape[2]
    one_width = query.shape[3] == key.shape[3] == value.shape[3] <= _FLASH_MAX_CHANNELS
    is_fit = query.dtype in HALF and capability >= (8, 0)
    return is_fit and one_width and (square or not is_causal)


def _is_for_efficient(
    query: Tensor, value: Tensor, mask: Tensor | None, capability: Capability
) -> bool:
    if query.dtype not in (torch.float32, *HALF) or (mask is not None and mask.stride(-1) != 1):
        return False
    if query.dtype == torch.bfloat16 and capability < (8, 0):
        return False
    aligned = 1
    if query.dtype in HALF:
        aligned = 8 if capability >= (7, 0) else 1
    elif capability >= (8, 0):
        aligned = 4
    return query.shape[3] % aligned == 0 and value.shape[3] % aligned == 0


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In the place of the composite operation."""
    if query.dim() == key.dim() == value.dim() == 3 and torch_version() >= _MORE_FUSED:
        mask = attn_mask if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
        batch = (query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
        if choose_kernel(*batch, mask, is_causal, enable_gqa) != "math":
            return scaled_dot_product_attention(
                *batch, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            ).squeeze(0)
    kernel = choose_kernel(query, key, value, attn_mask, is_causal, enable_gqa)
    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel == "efficient":
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    mask = _float_mask(attn_mask, query.dtype)
    plain: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """The head is padded to a multiple of 8 channels, and the scale stays the unpadded head's."""
    channels = query.shape[-1]
    if missing := -channels % 8:
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
    scale = channels**-0.5 if scale is None else scale
    output: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :channels] if missing else output


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    bias = _float_mask(mask, query.dtype)
    if bias is not None:
        bias = _aligned(bias).expand(*query.shape[:3], key.shape[2])
    given = [t for t in (query, key, value, bias) if t is not None]
    is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, is_trained, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask becomes 0 where it is true and -inf elsewhere."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=dtype))


def _aligned(bias: Tensor) -> Tensor:
    """`bias` if each of its rows starts on a multiple of 8 elements, else such a copy of it."""
    *outer, last = bias.stride()
    if last == 1 and all(stride % _MASK_ROW_ELEMENTS == 0 for stride in outer):
        return bias
    row = bias.shape[-1]
    padded = torch.nn.functional.pad(bias, (0, _MASK_ROW_ELEMENTS - row % _MASK_ROW_ELEMENTS))
    return padded[..., :row]
