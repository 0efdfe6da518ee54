"""Comparisons with a number and filling where they hold: for attention masks, outside autograd."""

from __future__ import annotations

from planner.step.autograd import tracks
from planner.step.pointwise import unary
from planner.step.tensor import Tensor


def compare(x: Tensor, label: str) -> Tensor:
    """`x != number` (`aten.ne`), `x == number` (`aten.eq`): one byte an element."""
    return unary(x, label, "bool")


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill(mask, number)`: a new tensor. x needs no gradient."""
    assert not tracks(x), "masked_fill on shapes records nothing"
    assert mask.shape == x.shape
    return unary(x, "aten.masked_fill")
