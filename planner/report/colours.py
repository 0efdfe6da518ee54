"""The categories of memory as every picture shows them: in which order, in which colours."""

from __future__ import annotations

from planner.ledger import Category
from planner.page.plotting import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION

# From the bottom of the stack to the top: what stays, then what comes and goes.
STACK: tuple[Category, ...] = (
    "parameters", "buffers", "optimizer_state", "gradients", "activations", "temporaries",
)  # fmt: skip
COLOURS: dict[Category, str] = {
    "parameters": BLUE,
    "buffers": GREY,
    "optimizer_state": SKY,
    "gradients": GREEN,
    "activations": ORANGE,
    "temporaries": VERMILION,
}
