"""A ledger small enough to follow by hand."""

from __future__ import annotations

from planner.core.units import MIB
from planner.ledger.ledger import Allocated, Event, Freed, Ledger, Marked, Tagged


def layered_ledger(num_layers: int = 4, num_micro_batches: int = 1) -> Ledger:
    """Two steps of a model of equal layers: 8 MiB of weights, 100 MiB saved and 30 MiB scratch."""
    events: list[Event] = []
    for layer in range(num_layers):
        events += [
            Allocated(layer, 8 * MIB, "empty", f"layers.{layer}"),
            Tagged(layer, "parameters"),
        ]
    events.append(Marked("build", 0))
    for step in range(2):
        for micro in range(num_micro_batches):
            events += forward(num_layers)
            events.append(Marked("forward", step))
            events += backward(num_layers, first=micro == 0)
            events.append(Marked("backward", step))
        for layer in range(num_layers if step == 0 else 0):
            events += [
                Allocated(400 + layer, 16 * MIB, "zeros_like"),
                Tagged(400 + layer, "optimizer_state"),
            ]
        events += [Allocated(500, 20 * MIB, "sqrt"), Freed(500), Marked("optimizer", step)]
        events += [Freed(300 + layer) for layer in range(num_layers)]
        events.append(Marked("zero_grad", step))
    return Ledger(tuple(events), batch_size=2, num_parameters=num_layers)


def forward(num_layers: int) -> list[Event]:
    events: list[Event] = []
    for layer in range(num_layers):
        path = f"layers.{layer}.mlp"
        events += [
            Allocated(100 + layer, 100 * MIB, "addmm", path),
            Tagged(100 + layer, "activations"),
        ]
        events += [Allocated(200, 30 * MIB, "gelu", path), Freed(200)]
    return events


def backward(num_layers: int, *, first: bool) -> list[Event]:
    events: list[Event] = []
    for layer in reversed(range(num_layers)):
        events += [
            Allocated(200, 30 * MIB, "mm", f"layers.{layer}.mlp"),
            Freed(100 + layer),
            Freed(200),
        ]
        if first:
            events += [Allocated(300 + layer, 8 * MIB, "mm"), Tagged(300 + layer, "gradients")]
    return events
