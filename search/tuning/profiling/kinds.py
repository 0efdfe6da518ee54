"""Which kind of work a profiled operation or kernel is.

Operations go by `planner.ledger.kinds`, as the trace before launch does; what that does not list is
listed here. A kernel counts as what launched it; only where no operation did, by its own name. What
is known by neither is `OTHER`, and shown.
"""

from __future__ import annotations

import re

from planner.ledger.kinds import CONVOLUTIONS, COPIES, MATMULS, NO_KERNEL, REDUCTIONS, kind_of

# Kinds that no ledger has: the host's own work, which keeps no device busy; a kernel that a
# compiler made of several operations; what is not known.
ON_HOST, FUSED, OTHER = "host", "fused", "other"

_CONVOLUTIONS = CONVOLUTIONS | {
    "mkldnn_convolution", "mkldnn_convolution_backward", "cudnn_convolution", "slow_conv3d_forward",
    "miopen_convolution", "thnn_conv2d", "_slow_conv2d_forward", "_slow_conv2d_backward",
    "slow_conv_dilated2d", "conv_depthwise3d", "_conv_depthwise2d", "convolution_overrideable",
}  # fmt: skip
_REDUCTIONS = REDUCTIONS | {
    "cudnn_batch_norm", "cudnn_batch_norm_backward", "avg_pool2d_backward", "avg_pool3d",
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward",
    "max_pool2d_with_indices_backward", "nansum", "nll_loss2d_forward", "nll_loss2d_backward",
}  # fmt: skip
_COPIES = COPIES | {"contiguous_copy", "masked_scatter", "masked_select", "take", "tril", "triu"}
_POINTWISE = frozenset(
    ("abs", "add", "addcdiv", "addcmul", "arange", "bernoulli", "bitwise_and", "bitwise_not",
     "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "copysign", "cos", "div", "elu", "eq",
     "erf", "exp", "exp2", "expm1", "exponential", "eye", "fill", "floor", "floor_divide", "fmod",
     "ge", "gelu", "gelu_backward", "glu", "glu_backward", "gt", "hardsigmoid", "hardswish",
     "hardswish_backward", "isfinite", "isinf", "isnan", "isneginf", "le", "leaky_relu",
     "leaky_relu_backward", "lerp", "linspace", "log", "log1p", "log2", "logical_and",
     "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mse_loss",
     "mse_loss_backward", "mul", "nan_to_num", "native_dropout", "native_dropout_backward", "ne",
     "neg", "normal", "pow", "random", "reciprocal", "relu", "remainder", "round", "rsqrt", "rsub",
     "sgn", "sigmoid", "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "smooth_l1_loss",
     "softplus", "sqrt", "square", "sub", "tanh", "tanh_backward", "threshold_backward", "uniform",
     "where", "zero")
)  # fmt: skip
# What makes or renames tensors, and what only calls others, which are listed themselves.
_ON_HOST = NO_KERNEL | frozenset(
    ("_autocast_to_full_precision", "_fused_sdp_choice", "_has_compatible_shallow_copy_type",
     "_nested_tensor", "_reshape_alias", "_safe_softmax", "_scaled_dot_product_attention_math",
     "_unsafe_view", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
     "adaptive_avg_pool3d", "alias", "as_strided",
     "as_strided_", "atleast_1d", "avg_pool1d", "batch_norm", "bilinear", "broadcast_tensors",
     "broadcast_to", "chunk", "conj", "contiguous", "conv1d", "conv2d", "conv3d",
     "cross_entropy_loss", "cudnn_is_acceptable", "detach_", "diagonal", "diff", "dropout",
     "dropout_", "einsum", "expand", "expand_as", "feature_dropout", "flatten", "full", "full_like",
     "group_norm", "hstack", "instance_norm", "is_nonzero", "is_pinned", "item", "kl_div",
     "layer_norm", "linalg_norm", "linear", "log_softmax", "mT", "matmul", "max_pool2d", "meshgrid",
     "moveaxis", "movedim", "narrow", "new_full", "new_ones", "new_zeros", "nll_loss",
     "nll_loss_nd", "normalize", "one_hot", "ones", "ones_like", "pad", "permute", "pin_memory",
     "pixel_shuffle", "rand", "rand_like", "randint", "randn", "randn_like", "randperm",
     "record_stream", "reshape", "reshape_as", "resize_as_", "resolve_conj", "resolve_neg",
     "rms_norm", "scalar_tensor", "scaled_dot_product_attention", "select", "slice", "softmax",
     "split", "split_with_sizes", "squeeze", "squeeze_", "swapaxes", "t", "t_", "tensor_split",
     "tile", "to", "to_dense", "transpose", "transpose_", "type_as", "unbind", "unflatten",
     "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze", "unsqueeze_", "view", "view_as",
     "vstack", "zeros", "zeros_like")
)  # fmt: skip
# Inductor's code is called under this name, and runs its C++ kernels inside.
_COMPILED_CODE = "## Call CompiledFxGraph"


def operation_kind(name: str) -> str | None:
    """The kind of an operation as the profiler names it; None where it is not known."""
    if name.startswith(_COMPILED_CODE):
        return FUSED
    house, _, inner = name.rpartition("::")
    if house != "aten":
        # Nodes of autograd, annotations, wrappers of the compiler: they call what computes.
        known = not house or house.startswith(("autograd", "torch", "inductor", "profiler"))
        return ON_HOST if known else None
    if inner in _ON_HOST:
        return ON_HOST
    plain = inner.rstrip("_") or inner
    for names, kind in (
        (MATMULS, "matmul"), (_CONVOLUTIONS, "conv"), (_REDUCTIONS, "reduction"),
        (_COPIES, "copy"), (_POINTWISE, "pointwise"),
    ):  # fmt: skip
        if inner in names or plain in names:
            return kind
    listed = inner.startswith(("_foreach_", "_fused_", "_amp_", "upsample_", "_upsample_"))
    if "attention" in inner or listed:
        return kind_of(inner)
    return None


# By the kernel's own name, in this order; attention's and convolutions' kernels are gemms too.
_KERNELS = (
    (re.compile(r"^triton_(poi|red|per|for)_"), FUSED),
    (re.compile(r"^triton_(tem|mm)_"), "matmul"),
    (re.compile(r"memcpy .*(HtoD|DtoH)", re.IGNORECASE), "transfer"),
    (re.compile(r"memcpy", re.IGNORECASE), "copy"),
    (re.compile(r"memset", re.IGNORECASE), "pointwise"),
    (re.compile(r"fmha|flash|attention", re.IGNORECASE), "attention"),
    (re.compile(r"conv|wgrad|dgrad|implicit_gemm", re.IGNORECASE), "conv"),
    (re.compile(r"gemm|gemv|cutlass|cublas|_mm_", re.IGNORECASE), "matmul"),
    (re.compile(r"softmax|norm|reduce|welford|Reduce"), "reduction"),
    (re.compile(r"copy|cat|index|gather|scatter|roll|transpose", re.IGNORECASE), "copy"),
    (re.compile(r"elementwise|multi_tensor|foreach|fused_adam", re.IGNORECASE), "pointwise"),
)
_ALWAYS_BY_NAME = frozenset((FUSED, "transfer"))


def kernel_kind(name: str, launched_by: str | None) -> str:
    """The kind of a kernel; `launched_by` is that of the innermost operation of a kind in which it
    was launched."""
    by_name = next((kind for pattern, kind in _KERNELS if pattern.search(name)), None)
    if by_name in _ALWAYS_BY_NAME:
        return str(by_name)
    if launched_by not in (None, OTHER, FUSED):
        return str(launched_by)
    return by_name or launched_by or OTHER
