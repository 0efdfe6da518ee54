"""The ledger: what one training step allocates, frees, computes and moves, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Category = Literal[
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries"
]
CATEGORIES: tuple[Category, ...] = (
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries",
)  # fmt: skip
# Where an update ran that backward made of one weight as soon as its gradient was there: the path
# of its events. The first of them is the call itself, which costs the host and no device.
IN_BACKWARD = "optimizer in backward"
OPTIMIZER_CALL = "Optimizer.step"
# A call of code that was compiled for one weight's update: it costs the host and no device.
COMPILED_CALL = "compiled update"
OperationKind = Literal["matmul", "conv", "attention", "pointwise", "reduction", "copy", "transfer"]
# The names of transfers: over the link between the device and the host, whose memory is pinned.
TO_HOST, TO_DEVICE = "copy to the host", "copy to the device"


class Allocated(NamedTuple):
    """A storage of `num_bytes` comes to life. `label` names the operation that asked for it and
    `path` the module it ran in."""

    storage: int
    num_bytes: int
    label: str
    path: str = ""


class Freed(NamedTuple):
    """The last reference to a storage is gone."""

    storage: int


class Tagged(NamedTuple):
    """From here on a storage counts as `category` (saved for backward, kept as a gradient …)."""

    storage: int
    category: Category


class Marked(NamedTuple):
    """A phase has just ended. `step` counts optimizer steps from 0; a steady one is 1 or later."""

    phase: str
    step: int


class Computed(NamedTuple):
    """An operation ran: `kernels` launches doing `flops` FLOPs (a multiply-add is two) and moving
    `num_bytes` bytes to and from device memory (a transfer: over the host's link), in `dtype`.
    `path` is the module it ran in."""

    name: str
    kind: OperationKind
    dtype: str
    flops: int
    num_bytes: int
    kernels: int
    path: str


Event = Allocated | Freed | Tagged | Marked | Computed


@dataclass(frozen=True)
class Ledger:
    """All events of building a model and running its first two optimizer steps at one batch size.

    The second step is the steady one: the optimizer's state exists from the end of the first on.
    """

    events: tuple[Event, ...]
    batch_size: int
    num_parameters: int
    notes: tuple[str, ...] = field(default=())
    # What forward saves in a pool that is never given back, so that no growth shows it.
    pooled_saved_bytes: int = 0

    def __hash__(self) -> int:
        """Without a look at every event: ledgers are kept by what is read of them."""
        return hash((len(self.events), self.batch_size, self.num_parameters, self.notes))

    def operations(self, step: int = 1) -> Iterator[tuple[str, Computed]]:
        """(phase, operation) of optimizer step `step`, in order; phase is forward, backward,
        optimizer or zero_grad, and optimizer too where it steps in backward. A validation after it
        is no part of it."""
        phase_ends = [(i, e) for i, e in enumerate(self.events) if isinstance(e, Marked)]
        start = 0
        for end, mark in phase_ends:
            if mark.step == step and mark.phase != "validation":
                for event in self.events[start:end]:
                    if isinstance(event, Computed):
                        yield "optimizer" if event.path == IN_BACKWARD else mark.phase, event
            start = end
