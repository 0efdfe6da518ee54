"""One predicted step, as its page is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.advice.advising import Way
from planner.estimation.estimate import Estimate, may_reserve
from planner.ledger.ledger import Ledger
from planner.machine.hardware import Gpu
from planner.memory.allocator_config import AllocatorConfig


@dataclass(frozen=True)
class Step:
    """One estimate with what it was made of. `title` names it beside others on a page;
    `link` is what joins several devices, as `planner estimate --link` takes it. `memory_bytes` is
    what was to be fitted into, `said` how the model was typed, `fields` what of it was.
    `largest` is at the largest batch that fits, and `ways` are what fits in place of it: both only
    where they were looked for."""

    estimate: Estimate
    ledger: Ledger
    gpu: Gpu | None = None
    allocator: AllocatorConfig | None = None
    link: str | None = None
    memory_bytes: int | None = None
    said: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    largest: Estimate | None = None
    ways: Sequence[Way] = ()

    @property
    def may_reserve(self) -> int | None:
        """Bytes that the allocator's own options let it reserve; None for no limit."""
        return may_reserve(self.gpu, self.memory_bytes, self.allocator)

    @property
    def title(self) -> str:
        device = f" on {self.gpu.name}" if self.gpu is not None else ""
        return f"{self.estimate.model.title}{device}"
