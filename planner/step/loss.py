"""Classification losses over logits [B, classes]."""

from __future__ import annotations

from planner.step.autograd import Gradients, Node, begin, finish
from planner.step.normalization import log_softmax
from planner.step.pointwise import _one, autocast_up
from planner.step.tensor import Tensor, empty


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`F.cross_entropy(logits, labels)`: labels [B] int64; a scalar, fp32 under autocast.

    The log-softmax keeps the logits' dtype; `nll_loss` is what autocast casts up for.
    """
    return nll_loss(log_softmax(logits), labels)


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
    grad = _one(grads)
    y = empty(x.storage.device, x.shape, x.dtype, "aten.nll_loss_backward")
    y.storage.device.compute(
        "aten.nll_loss_backward", "pointwise", y.dtype, y.shape[0], y.num_bytes, 2
    )
    del labels, total_weight, grad
    return (y,)
