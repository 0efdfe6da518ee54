"""When a predicted step does what: each kernel, wait and collective from its start to its end.

The same timeline that predicts the seconds, with its clocks kept after every operation. Seconds
are counted from where the earlier of the two clocks, host and device, stands as the step begins.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from planner.core.collectives import Group
from planner.core.schema import TrainSetting
from planner.ledger.ledger import Computed, Exchanged, Ledger, Sent
from planner.throughput.fusing import Operation, with_updates_last
from planner.throughput.timeline import BETWEEN, HOST, OTHERS, WAITING, Priced, Timeline

if TYPE_CHECKING:
    from planner.throughput.communication import Exchanges, Traffic
    from planner.throughput.prediction import DeviceRates

Track = Literal["host", "device", "link"]


class Span(NamedTuple):
    """From `start` to `end`, in seconds: a kernel issued (host) or run (device), a wait of the
    device's, a collective (link). `kernel` is its number among the step's kernels, -1 for what is
    none."""

    track: Track
    phase: str
    kind: str
    bound: str
    start: float
    end: float
    kernel: int = -1
    sent: Sent | None = None


@dataclass(frozen=True)
class StepSpans:
    """A step of `micro_batches` recorded micro-batches, in time. `kernels` are what the device
    runs, `kernel_of` says of each of the ledger's operations which of them it is part of."""

    spans: list[Span]
    kernels: list[Computed]
    kernel_of: list[int]
    micro_batches: int

    def of(self, track: Track) -> list[Span]:
        return [span for span in self.spans if span.track == track]

    def starts(self) -> list[float]:
        """When the device begins each of the ledger's operations."""
        begun = {span.kernel: span.start for span in self.of("device") if span.kernel >= 0}
        return [begun[kernel] for kernel in self.kernel_of]


def step_spans(
    ledger: Ledger, setting: TrainSetting, rates: DeviceRates, exchanges: Exchanges | None = None
) -> StepSpans:
    """The recorded micro-batches of a ledger's steady step, as `step_time` predicts them."""
    from planner.ledger.ledger import RECORDED_MICRO_BATCHES
    from planner.throughput.prediction import prepared

    recorded = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    operations = list(ledger.operations())
    step, kernels, found = prepared(operations, rates, setting, recorded, exchanges)
    line = step.line(found, Recording)
    assert isinstance(line, Recording)
    return StepSpans(
        spans=line.recorded(),
        kernels=[kernel for _, kernel in kernels],
        kernel_of=_kernel_of(operations, kernels, setting),
        micro_batches=recorded,
    )


def _kernel_of(
    operations: Sequence[Operation], kernels: Sequence[Operation], setting: TrainSetting
) -> list[int]:
    """Of each operation the number of its kernel: itself, or the one that a chain is fused to."""
    numbered = [(phase, (place, one)) for place, (phase, one) in enumerate(operations)]
    order = with_updates_last(numbered, setting)
    found = [0] * len(operations)
    at = 0
    for number, (_, kernel) in enumerate(kernels):
        length = 1
        if kernel is not order[at][1][1]:
            length = int(kernel.name.rpartition("_")[2])  # `fused_3`: planner.throughput.fusing
        for _, (place, _) in order[at : at + length]:
            found[place] = number
        at += length
    assert at == len(order), "every operation is in one kernel"
    return found


class Recording(Timeline):
    """A timeline that keeps when everything of its last step began and ended."""

    def __init__(self, asynchronous: bool, reads_scale: bool, traffic: Traffic | None) -> None:
        super().__init__(asynchronous, reads_scale, traffic)
        self._spans: list[Span] = []
        self._sent: list[tuple[str, Sent, float]] = []
        self._phase_of_exchange = ""
        self._begun = 0.0
        self._kernel = 0

    def recorded(self) -> list[Span]:
        """The last step's spans, from its beginning on."""
        spans = [*self._spans, *self._collectives()]
        return [
            span._replace(start=span.start - self._begun, end=span.end - self._begun)
            for span in spans
        ]

    def run(self, operations: Sequence[Priced], exchanges: Sequence[Exchanged] = ()) -> None:
        self._spans, self._sent, self._kernel = [], [], 0
        self._begun = min(self.host, self.device)
        super().run(operations, exchanges)

    def _run(self, operations: Sequence[Priced]) -> None:
        for priced in operations:
            phase, (_, kind, bound, *_) = priced.phase, priced.account
            if phase != self.phase:
                self._enter(phase)
            issued, free = self.host + priced.issue, self.device
            self._add("host", phase, kind, HOST, self.host, issued, self._kernel)
            if issued > free:
                self._add("device", phase, WAITING, HOST, free, issued)
            super()._run((priced,))
            self._add("device", phase, kind, bound, max(free, issued), self.device, self._kernel)
            self._kernel += 1

    def _exchange(self, exchange: Exchanged) -> None:
        self._phase_of_exchange, free = exchange.phase, self.device
        super()._exchange(exchange)
        if self.device > free:
            self._add("device", exchange.phase, OTHERS, BETWEEN, free, self.device)

    def _ready(self, sent: Sent) -> float:
        ready = super()._ready(sent)
        self._sent.append((self._phase_of_exchange, sent, ready))
        return ready

    def _add(
        self, track: Track, phase: str, kind: str, bound: str, start: float, end: float,
        kernel: int = -1,
    ) -> None:  # fmt: skip
        self._spans.append(Span(track, phase, kind, bound, start, end, kernel))

    def _collectives(self) -> Iterable[Span]:
        """Those of a group one after the other, each from when it could start."""
        if self.traffic is None:
            return
        self.traffic.finish()
        ended: dict[Group, float] = {}
        for phase, sent, ready in self._sent:
            end = self.traffic.done[sent.handle]
            start = min(max(ready, ended.get(sent.group, ready)), end)
            ended[sent.group] = end
            yield Span("link", phase, sent.collective, BETWEEN, start, end, sent=sent)
