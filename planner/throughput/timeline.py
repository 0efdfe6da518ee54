"""Host and device side by side: the host issues operations ahead, the device waits if it is late.

Beside the device, what it exchanges with others goes on (`planner.throughput.communication`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from planner.ledger.ledger import Exchanged, Sent
from planner.throughput.communication import Traffic

WAITING = "waiting for the host"  # the entry of `kind_seconds` in which the device is idle
OTHERS = "waiting for other devices"  # and that in which it waits for a collective
HOST, BETWEEN = "host", "link between devices"  # what bounds these


class Priced(NamedTuple):
    """What one operation costs the host to issue and the device to do, in seconds."""

    phase: str
    account: tuple[str, ...]  # what its seconds are counted as: phase, kind, bound …
    issue: float
    busy: float


class Timeline:
    """Host and device clocks in seconds, and where the device's time went in what was `run`.

    `asynchronous`: the host runs ahead. `reads_scale`: GradScaler reads found_inf on the host
    before it lets the optimizer step. `exposed` is the device's wait for others, by (phase,
    micro-batch).
    """

    def __init__(self, asynchronous: bool, reads_scale: bool, traffic: Traffic | None) -> None:
        self.asynchronous = asynchronous
        self.reads_scale = reads_scale
        self.traffic = traffic
        self.host = 0.0
        self.device = 0.0
        self.phase = ""
        self.accounts: dict[tuple[str, ...], float] = defaultdict(float)
        self.issuing: dict[str, float] = defaultdict(float)
        self.exposed: dict[tuple[str, int], float] = defaultdict(float)
        self._gathering: set[int] = set()  # handles of weights that the host asked for ahead
        self._gathered: deque[float] = deque(maxlen=2)  # when the last of them were there

    def advance(self, operations: Sequence[Priced], exchanges: Sequence[Exchanged] = ()) -> None:
        """`run` without account of it."""
        if exchanges:
            self.run(operations, exchanges)
            self.accounts.clear()
            self.issuing.clear()
            self.exposed.clear()
            return
        for phase, _, issue, busy in operations:
            if phase != self.phase:
                self._enter(phase)
            self.host += issue
            if self.host > self.device:
                self.device = self.host
            self.device += busy

    def run(self, operations: Sequence[Priced], exchanges: Sequence[Exchanged] = ()) -> None:
        """A step, from where the clocks stand."""
        self.phase = ""
        if self.traffic is not None:
            self.traffic.begin()
        done = 0
        for exchange in exchanges:
            self._run(operations[done : exchange.place])
            done = exchange.place
            self._exchange(exchange)
        self._run(operations[done:] if done else operations)

    def _run(self, operations: Sequence[Priced]) -> None:
        accounts, issuing, asynchronous = self.accounts, self.issuing, self.asynchronous
        traffic = self.traffic
        for phase, key, issue, busy in operations:
            if phase != self.phase:
                self._enter(phase)
            self.host += issue
            issuing[phase] += issue
            if self.host > self.device:
                accounts[phase, WAITING, HOST] += self.host - self.device
                self.device = self.host
            if traffic is not None and traffic.is_flying:
                busy = traffic.computed(self.device, busy) - self.device
            self.device += busy
            accounts[key] += busy
            if not asynchronous:
                self.host = self.device

    def _exchange(self, exchange: Exchanged) -> None:
        assert self.traffic is not None, "there is a link"
        event = exchange.event
        if isinstance(event, Sent):
            self.traffic.send(event, self._ready(event))
            return
        there = self.traffic.awaited(event.handle, self.device)
        if there > self.device:
            self.exposed[exchange.phase, exchange.micro_batch] += there - self.device
            self.device = there
        if event.handle in self._gathering:
            self._gathering.remove(event.handle)
            self._gathered.append(self.device)
        if not self.asynchronous:
            self.host = self.device

    def _ready(self, sent: Sent) -> float:
        """When a collective may start. Weights that are gathered ahead wait until the unit before
        the last one has its own, whose buffer they take: `FSDPParamGroup.wait_for_unshard`
        (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""
        if sent.follows:
            return max(self.host, self.device)
        self._gathering.add(sent.handle)
        is_behind = len(self._gathered) == self._gathered.maxlen
        return max(self.host, self._gathered[0]) if is_behind else self.host

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if phase == "optimizer" and self.reads_scale:
            self.host = max(self.host, self.device)
