"""Classification losses over logits [B, classes]."""

from __future__ import annotations

from planner.step.autograd import (
    Gradients,
    Node,
    begin,
    finish,
    only_gradient,
    pointwise_cost,
    tracks,
)
from planner.step.normalization import log_softmax
from planner.step.pointwise import (
    add,
    autocast_up,
    div,
    mul,
    neg,
    reduce_sum,
    scale,
    sum_dims,
    unary,
)
from planner.step.tensor import Tensor, empty

# Comparisons with a number and filling where they hold: for attention masks, outside autograd.


def compare(x: Tensor, label: str) -> Tensor:
    """`x != number` (`aten.ne`), `x == number` (`aten.eq`): one byte an element."""
    return unary(x, label, "bool")


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill(mask, number)`: a new tensor. x needs no gradient."""
    assert not tracks(x), "masked_fill on shapes records nothing"
    assert mask.shape == x.shape
    return unary(x, "aten.masked_fill")


def cross_entropy(logits: Tensor, targets: Tensor, smoothed: bool = False) -> Tensor:
    """`F.cross_entropy(logits, targets, label_smoothing=…)`: a scalar, fp32 under autocast.

    Targets are labels [B] int64, or probabilities [B, classes] fp32. The log-softmax keeps the
    logits' dtype; `nll_loss` is what autocast casts up for. The C++ function's own names live to
    its end (aten/src/ATen/native/LossNLL.cpp).
    """
    if targets.is_floating:
        return _of_probabilities(logits, targets)
    if smoothed:
        return _smoothed(logits, targets)
    return nll_loss(log_softmax(logits), targets)


def _of_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy_loss_prob_target`: -(input * target).sum() / B; C++ drops what a statement
    made on the way at its end."""
    log_probabilities = log_softmax(logits)
    products = mul(log_probabilities, targets)
    total = sum_dims(products)
    negative = neg(total)
    return scale(negative, "aten.div")


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """`cross_entropy_loss_label_smoothing`: a share of nll_loss, and one of the mean over classes.

    Labels to be ignored are looked for even where there are none.
    """
    log_probabilities = log_softmax(logits)
    loss = nll_loss(log_probabilities, labels)
    smooth_loss = neg(sum_dims(log_probabilities, (1,)))
    ignore_mask = compare(labels, "aten.eq")
    smooth_loss = _masked_fill_(smooth_loss, ignore_mask)
    mean = _mean_of_kept(smooth_loss, ignore_mask)
    return add(scale(loss), scale(mean))


def _masked_fill_(x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill_(mask, 0.0)`: x's own storage under a new node, which saves the mask."""
    node = begin("MaskedFillBackward0", (x,), _masked_fill_backward, (mask,))
    pointwise_cost(x.storage.device, "aten.masked_fill_", x, 1)
    return finish(Tensor(x.storage, x.shape, x.strides, x.dtype), node)


def _masked_fill_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    mask = node.unpack(0)
    y = unary(only_gradient(grads), "aten.masked_fill")
    del mask
    return (y,)


def _mean_of_kept(x: Tensor, mask: Tensor) -> Tensor:
    """`x.sum() / (~mask).sum()`: the right side first; temporaries live to the statement's end."""
    inverse = unary(mask, "aten.bitwise_not")
    count = reduce_sum(inverse, range(len(mask.shape)), False, dtype="int64")
    total = sum_dims(x)
    return div(total, count)


def nll_loss(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """`F.nll_loss(x, labels)`: saves x, the labels and the total weight, one more scalar."""
    x = autocast_up(log_probabilities)
    device = x.storage.device
    node = begin("NllLossBackward0", (x,), _nll_backward, (x, labels))
    loss = empty(device, (), x.dtype, "aten.nll_loss_forward")
    total_weight = empty(device, (), x.dtype, "aten.nll_loss_forward")
    device.compute("aten.nll_loss_forward", "reduction", x.dtype, x.shape[0], labels.num_bytes)
    return finish(loss, node, (total_weight,))


def _nll_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    x, labels, total_weight = node.unpack(0), node.unpack(1), node.unpack(2)
    grad = only_gradient(grads)
    y = empty(x.storage.device, x.shape, x.dtype, "aten.nll_loss_backward")
    y.storage.device.compute(
        "aten.nll_loss_backward", "pointwise", y.dtype, y.shape[0], y.num_bytes, 2
    )
    del labels, total_weight, grad
    return (y,)
