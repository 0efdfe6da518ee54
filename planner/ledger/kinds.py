"""Which kind of work an operation of torch is, by its name. The one place that says so: a recording
before launch and the profile after it agree by it.

To follow one more operation, add its name here. Names are those of ATen without `aten::`.
"""

from __future__ import annotations

from planner.ledger.ledger import OperationKind

MATMULS = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation",
     "_scaled_mm", "_grouped_mm")
)  # fmt: skip
CONVOLUTIONS = frozenset(("convolution", "convolution_backward", "_convolution"))
REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "prod", "any", "all", "var",
     "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod",
     "topk", "sort", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
     "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
     "_native_batch_norm_legit", "_fused_rms_norm", "_fused_rms_norm_backward", "_softmax",
     "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward",
     "nll_loss_backward", "_foreach_norm", "avg_pool2d", "max_pool2d_with_indices",
     "_adaptive_avg_pool2d", "_amp_foreach_non_finite_check_and_unscale_")
)  # fmt: skip
COPIES = frozenset(
    ("_to_copy", "clone", "copy_", "constant_pad_nd", "roll", "flip", "cat", "stack", "index",
     "index_put", "index_put_", "_index_put_impl_", "index_select", "gather", "scatter",
     "scatter_add", "scatter_add_", "embedding", "embedding_dense_backward", "repeat",
     "slice_scatter", "select_scatter", "slice_backward", "select_backward", "im2col", "col2im")
)  # fmt: skip
# What starts no kernel: it makes or renames tensors.
NO_KERNEL = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "detach",
     "_local_scalar_dense", "lift_fresh", "set_", "resize_")
)  # fmt: skip


def kind_of(name: str) -> OperationKind:
    """The kind of an operation that computes: what is in no set works element by element."""
    if name in MATMULS:
        return "matmul"
    if name in CONVOLUTIONS:
        return "conv"
    if "attention" in name:
        return "attention"
    if name in REDUCTIONS:
        return "reduction"
    return "copy" if name in COPIES else "pointwise"
