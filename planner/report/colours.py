"""The categories of memory as every picture shows them: in which order, in which colours."""

from __future__ import annotations

from planner.ledger.ledger import Category
from planner.report.page.plotting import BLUE, BROWN, GREEN, GREY, ORANGE, SKY, VERMILION

# From the bottom of the stack to the top: what stays, then what comes and goes.
STACK: tuple[Category, ...] = (
    "parameters", "buffers", "optimizer_state", "gradients", "activations", "temporaries",
)  # fmt: skip
CONTEXT = BROWN  # what the CUDA context takes, and whatever else lies outside the allocator
COLOURS: dict[Category, str] = {
    "parameters": BLUE,
    "buffers": GREY,
    "optimizer_state": SKY,
    "gradients": GREEN,
    "activations": ORANGE,
    "temporaries": VERMILION,
}
