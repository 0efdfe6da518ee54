"""What the partitioner and the scheduler know of each operation, by its aten name.

From torch 2.13: `get_default_op_list` in torch/_functorch/partitioners.py; the pointwise ones are
those that carry `torch.Tag.pointwise`. A test lays these sets beside torch's own.
"""

from __future__ import annotations

VIEWS = frozenset((
    "alias", "as_strided", "broadcast_in_dim", "expand", "permute", "select", "slice", "split",
    "squeeze", "t", "unsqueeze", "view",
))  # fmt: skip
RECOMPUTABLE = VIEWS | frozenset((
    "_to_copy", "_unsafe_view", "abs", "acos", "add", "addcdiv", "addcmul", "amax", "any", "arange",
    "argmax", "asin", "atan", "atan2", "atanh", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone",
    "convert_element_type", "copysign", "cos", "cosh", "div", "elu", "empty", "empty_like", "eq",
    "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod", "frac",
    "full", "full_like", "gather", "ge", "gelu", "gelu_backward", "getitem", "gt", "hardsigmoid",
    "hardtanh", "hypot", "index", "iota", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp",
    "lgamma", "lift_fresh_copy", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill", "max", "maximum",
    "mean", "min", "minimum", "mish", "mul", "nan_to_num", "native_dropout_backward", "ne", "neg",
    "new_zeros", "ones", "pow", "prepare_softmax_online", "reciprocal", "relu", "relu6",
    "remainder", "reshape", "round", "rsqrt", "rsub", "scalar_tensor", "selu", "sgn", "sigmoid",
    "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "sinh", "softplus", "sqrt",
    "square", "std", "sub", "sum", "sum_to_size", "tan", "tanh", "tanh_backward", "threshold",
    "threshold_backward", "triu", "trunc", "type_as", "var", "var_mean", "where", "xlogy", "zeros",
    "zeros_like",
))  # fmt: skip
RANDOM = frozenset(("native_dropout", "rand_like", "randn_like"))
FUSIBLE = RECOMPUTABLE | RANDOM
