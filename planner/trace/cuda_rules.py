"""What CUDA would do, taught to CPU tensors for as long as a context lasts.

A fake tensor that says it is on CUDA cannot run backward on a machine without one (the autograd
engine has no queue for the device), so the trace runs on fake CPU tensors. Where PyTorch treats
the two devices differently before any kernel is chosen, the rules below are CUDA's:

- autocast: the operations, and their policies, of `torch/include/ATen/autocast_mode.h`;
- `scaled_dot_product_attention`: the fused kernel that CUDA would pick;
- `dropout`: the fused kernel with its mask of one byte an element;
- `softmax(half, dtype=float32)`: converts inside its kernel;
- `linear` of what is not contiguous: adds its bias in place, which no dispatch mode is shown;
- `one_hot`: by a scatter.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.library import Library
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from planner.trace import kernels
from planner.trace.attention import scaled_dot_product_attention
from planner.trace.trees import tensors_in

aten = torch.ops.aten

# Policies as in torch/include/ATen/autocast_mode.h, less what AutocastCPU does in the same way.
_LOWER_PRECISION = (
    "_convolution", "convolution", "addmv", "addr", "einsum", "mv", "chain_matmul",
    "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention",
)  # fmt: skip
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim",
    "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist", "pdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
_FP32_BY_DTYPE_ARGUMENT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList",
)  # fmt: skip
_FP32_BY_OTHER_OVERLOAD = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
}
_PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
)  # fmt: skip
_BANNED = ("binary_cross_entropy",)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within it, CPU tensors (fake ones) are cast, attended and dropped out as CUDA would."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        _override_autocast(library)
        _override_composites(library)
    overridden = set(library._op_impls)
    _forget_dispatch(overridden)
    try:
        with _autocast_asked_of_cuda():
            yield
    finally:
        library._destroy()
        _forget_dispatch(overridden)


@contextlib.contextmanager
def _autocast_asked_of_cuda() -> Iterator[None]:
    """Without an argument torch tells of CUDA's autocast, as torchao's linear layers ask."""
    is_enabled = torch.is_autocast_enabled

    def asked(device_type: str = "cpu") -> bool:
        return is_enabled(device_type)

    def dtype() -> torch.dtype:
        return torch.get_autocast_dtype("cpu")

    with (
        mock.patch.object(torch, "is_autocast_enabled", asked),
        mock.patch.object(torch, "get_autocast_gpu_dtype", dtype),
    ):
        yield


def _forget_dispatch(implementations: Iterable[str]) -> None:
    """The dispatcher in Python, which torch.compile traces with, remembers each operation's kernel
    and is not told of another: a compilation before would decide for the rules, and they for one
    after. `implementations` are written `aten/name.overload/key`."""
    for implementation in implementations:
        name = implementation.split("/")[1]
        _overload(name)._dispatch_cache.clear()


def _override_autocast(library: Library) -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    on_cpu, on_cuda = set(registered("AutocastCPU")), set(registered("AutocastCUDA"))
    for name in sorted(on_cpu - on_cuda):
        library.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, "AutocastCPU")
    policies: list[tuple[tuple[str, ...], Callable[[Any], Callable[..., Any]]]] = [
        (_LOWER_PRECISION, _in_lower_precision),
        (_FP32, _in_fp32),
        (_FP32_BY_DTYPE_ARGUMENT, _with_fp32_argument),
        (tuple(_FP32_BY_OTHER_OVERLOAD), _with_fp32_appended),
        (_PROMOTE, _promoted),
        (_BANNED, _refused),
    ]
    for names, policy in policies:
        for name in names:
            if f"aten::{name}" in on_cuda:
                library.impl(name, policy(_overload(name)), "AutocastCPU")


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU)


def _eligible(value: object) -> bool:
    """C10's `is_eligible`: autocast casts floating tensors of its device, but never doubles."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(v, dtype) for v in value)
    return value.to(dtype) if _eligible(value) and value.dtype != dtype else value


def _cast_arguments(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """From the last argument to the first: the order in which the compiled code casts them."""
    named = {key: _cast(kwargs[key], dtype) for key in reversed(kwargs)}
    return tuple([_cast(a, dtype) for a in reversed(args)][::-1]), named


def _in_lower_precision(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = _cast_arguments(torch.get_autocast_dtype("cpu"), args, kwargs)
            return op(*args, **kwargs)

    return kernel


def _in_fp32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = _cast_arguments(torch.float32, args, kwargs)
            return op(*args, **kwargs)

    return kernel


def _with_fp32_argument(op: Any) -> Callable[..., Any]:
    names = [a.name for a in op._schema.arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        with _without_autocast():
            if given is None and _eligible(args[0]):  # a dtype that was asked for stays
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _with_fp32_appended(op: Any) -> Callable[..., Any]:
    with_dtype = getattr(op.overloadpacket, _FP32_BY_OTHER_OVERLOAD[f"norm.{op._overloadname}"])

    def kernel(self: Tensor, p: Any = 2, *rest: Any) -> Any:
        with _without_autocast():
            if not _eligible(self):
                return op(self, p, *rest)
            shape = rest if len(rest) == 2 or not rest else (*rest, False)
            return with_dtype(self, p, *shape, dtype=torch.float32)

    return kernel


def _promoted(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            wide = any(t.dtype == torch.float32 for t in tensors_in((args, kwargs)) if _eligible(t))
            dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
            args, kwargs = _cast_arguments(dtype, args, kwargs)
            return op(*args, **kwargs)

    return kernel


def _refused(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{op._schema.name} is refused under CUDA's autocast: "
            "use binary_cross_entropy_with_logits"
        )

    return kernel


def _override_composites(library: Library) -> None:
    """CPU kernels of composite operations, by those that CUDA runs."""
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradCPU")
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("softmax.int", _softmax, "AutogradCPU")
    library.impl("linear", _linear, "AutogradCPU")
    library.impl("one_hot", _one_hot, "AutogradCPU")
    library.impl("rms_norm", _rms_norm, "AutogradCPU")
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):  # with which they are no composite
        library.impl(name, getattr(kernels, name.removeprefix("_fused_")), "CPU")


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002 (torch's name)
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype)
    output: Tensor = aten.native_dropout(input, p, train)[0]
    return output


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Where one product cannot add the bias (aten/src/ATen/native/Linear.cpp), it is added to the
    product itself, but out of place to what is like a subclass, as all is beneath the modes that
    selective checkpointing enters."""
    is_one = input.dim() == 2 or input.is_contiguous()
    modes = _get_current_dispatch_mode_stack()
    is_kept = any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)
    if bias is None or is_one or is_kept or is_traceable_wrapper_subclass(bias):
        output: Tensor = aten.linear.default.decompose(input, weight, bias)
        return output
    return torch.matmul(input, weight.t()).add_(bias)


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None,  # noqa: A002
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    """One kernel, but for a weight of another dtype and for channels-last (layer_norm.cpp)."""
    is_other = weight is not None and weight.dtype != input.dtype
    if is_other or suggest_memory_format(input) != torch.contiguous_format:
        composed: Tensor = aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)
        return composed
    output: Tensor = aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]
    return output


def _one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """Zeros and ones put among them, where fake tensors would be compared (Onehot.cpp)."""
    if num_classes < 1:
        output: Tensor = aten.one_hot.default.decompose(self, num_classes)
        return output
    zeros = self.new_zeros((*self.shape, num_classes))
    return zeros.scatter_(-1, self.unsqueeze(-1), 1)


def _softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    inside_kernel = self.dtype == torch.float16 and dtype == torch.float32
    converted = self if dtype is None or inside_kernel else self.to(dtype)
    output: Tensor = aten._softmax(converted, dim, inside_kernel)
    return output
