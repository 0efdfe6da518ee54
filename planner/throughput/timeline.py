"""What a step exchanges with other devices, as a second timeline beside the device's.

The devices of a group (a communicator) carry collectives out one after the other, in the order in
which the host hands them over. One that follows what was computed waits for it; what needs its
result waits for it in turn, and that wait is what communication costs. While both go on they slow
each other down. Legend: n ranks.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from planner.core.schema import TrainSetting
from planner.core.schema.setting import Group
from planner.ledger.ledger import Exchanged, Ledger, Sent
from planner.machine.hardware.fabric import Fabric, bus_factor, find_fabric, has_usual_link
from planner.machine.hardware.gpu import Gpu
from planner.throughput.result import HOST, WAITING

# How much longer computing and communicating take while both go on. Published of A100: 1.1256
# (PKU-DAIR/Hetu-Galvatron @cea12ff, hardware_configs/overlap_coefficient.json).
CONTENTION = 1.1256


@dataclass(frozen=True)
class Exchanges:
    """The collectives of a step (`Ledger.exchanges`), the links they cross, and what overlapping
    costs. `scale` is what every collective takes more than its link says."""

    events: tuple[Exchanged, ...]
    fabric: Fabric
    contention: float = CONTENTION
    scale: float = 1.0


@dataclass(frozen=True)
class Communication:
    """What one optimizer step exchanges, as one device sees it.

    `seconds` are those of its collectives one after the other, with nothing beside them;
    `exposed_seconds` those in which it does nothing else; `sent_bytes` what it sends to its
    neighbour in a ring. `alone_seconds` are those of the same step if nothing were exchanged.
    """

    link: str
    seconds: float
    exposed_seconds: float
    sent_bytes: int
    alone_seconds: float
    low_seconds: float
    high_seconds: float


def exchanges_of(
    ledger: Ledger, setting: TrainSetting, gpu: Gpu | None, link: str | None = None
) -> Exchanges | None:
    """What a step exchanges over `link`, or over what joins several of `gpu` as a rule; None where
    it exchanges nothing, or nobody says over what.

    Raises UsageError: an unknown link, or one that joins fewer.
    """
    if setting.world_size == 1 or (gpu is None and link is None):
        return None
    events = ledger.exchanges()
    if not events:
        return None
    if link is None and gpu is not None and not has_usual_link(gpu):
        return None

    of_node = setting.devices_per_node
    return Exchanges(events, find_fabric(gpu, setting.nodes, link, of_node))


def communication_basis(exchanges: Exchanges | None, setting: TrainSetting) -> list[str]:
    """What the time of communication rests on, one line each."""
    if exchanges is None:
        return []
    fabric = exchanges.fabric
    links = [link for link in (fabric.within, fabric.between) if link is not None]
    sources = "; ".join(f"{link.name}: {', '.join(link.sources)}" for link in links)
    return [
        *fabric.assumed,
        "collectives take what was published or measured of their links, up to "
        f"{fabric.spread:.0%} more or less ({sources})",
        f"computing and communicating take {exchanges.contention:g} times as long while both go on "
        "(published of A100s by Galvatron)",
        *_compiled_basis(setting),
    ]


def _compiled_basis(setting: TrainSetting) -> list[str]:
    if setting.compile == "off":
        return []
    return [
        "what is compiled sends its gradients as it returns: torch.compile of the wrapped model "
        "may split backward at buckets (DDPOptimizer) and send earlier"
    ]


def group_of(setting: TrainSetting, group: Group) -> tuple[int, int, int]:
    """The ranks of a group, the machines they are on, and how many such groups share the network of
    a machine. Ranks count through one machine after the other; a set of shards is of neighbours."""
    world, shards = setting.world_size, setting.shard_size
    of_node = setting.devices_per_node
    if group == "shard" and shards > 1:
        return shards, -(-shards // of_node), 1
    if group == "replicate":
        copies = setting.num_copies
        return copies, min(setting.nodes, copies), min(shards, of_node)
    return world, setting.nodes, 1


def collective_seconds(exchanges: Exchanges, sent: Sent, setting: TrainSetting) -> float:
    """Of one collective with nothing beside it."""
    groups = group_of(setting, sent.group)
    took = exchanges.fabric.seconds(sent.collective, sent.num_bytes, *groups)
    return exchanges.scale * took


def sent_bytes(sent: Sent, setting: TrainSetting) -> float:
    """What each device sends of a collective, in a ring."""
    ranks = group_of(setting, sent.group)[0]
    return bus_factor(sent.collective, ranks) * sent.num_bytes if ranks > 1 else 0.0


def after_regions(
    exchanges: Iterable[Exchanged], phases: Sequence[str], regions: Sequence[str | None]
) -> tuple[Exchanged, ...]:
    """`exchanges` of a compiled step: a region hands over what it computed as it returns, so that
    nothing is sent or awaited within one."""
    found = []
    for exchange in exchanges:
        place = exchange.place
        while 0 < place < len(regions) and regions[place] is not None:
            if (regions[place], phases[place]) != (regions[place - 1], phases[place - 1]):
                break
            place += 1
        found.append(exchange._replace(place=place))
    return tuple(found)


@dataclass(eq=False)
class _Flying:
    """A collective that was handed over; `left` are its seconds with nothing beside it."""

    handle: int
    ready: float
    left: float


@dataclass(eq=False)
class _Communicator:
    """What one group was handed; `clock` is when it did what it has done."""

    clock: float = 0.0
    queue: deque[_Flying] = field(default_factory=deque)

    @property
    def next_start(self) -> float:
        return max(self.clock, self.queue[0].ready) if self.queue else inf


class Traffic:
    """The collectives in flight, as the device's clock goes on."""

    def __init__(self, exchanges: Exchanges, setting: TrainSetting) -> None:
        self.exchanges = exchanges
        self.setting = setting
        self.groups: dict[Group, _Communicator] = {}
        self.done: dict[int, float] = {}
        self.is_flying = False
        self._seconds: dict[tuple[object, ...], float] = {}

    def begin(self) -> None:
        """A step: its handles are those of the step before."""
        self.finish()
        self.done.clear()

    def finish(self) -> None:
        """All that is in flight, with nothing computed beside it."""
        for communicator in self.groups.values():
            while communicator.queue:
                self._finish(communicator)
        self.is_flying = False

    def send(self, sent: Sent, ready: float) -> None:
        """A collective that can start at `ready`."""
        key = sent[1:3], sent.group
        if key not in self._seconds:
            self._seconds[key] = collective_seconds(self.exchanges, sent, self.setting)
        communicator = self.groups.setdefault(sent.group, _Communicator())
        communicator.queue.append(_Flying(sent.handle, ready, self._seconds[key]))
        self.is_flying = True

    def awaited(self, handle: int, now: float) -> float:
        """When collective `handle` is there, if the device does nothing from `now` on."""
        self._idle_until(now)
        for communicator in self.groups.values():
            while any(flying.handle == handle for flying in communicator.queue):
                self._finish(communicator)
        self._look()
        return max(now, self.done.get(handle, now))

    def computed(self, now: float, busy: float) -> float:
        """When what takes the device `busy` seconds by itself is done, from `now` on."""
        self._idle_until(now)
        slower = self.exchanges.contention
        while busy > 0:
            active = [c for c in self.groups.values() if c.next_start <= now]
            coming = min(
                (c.next_start for c in self.groups.values() if c not in active), default=inf
            )
            if not active:
                alone = min(busy, coming - now)
                now, busy = now + alone, busy - alone
                if coming == inf:
                    break
                continue
            part = min(busy, (coming - now) / slower, *(c.queue[0].left for c in active))
            now, busy = now + part * slower, busy - part
            for communicator in active:
                self._progress(communicator, part, now)
        self._look()
        return now

    def _idle_until(self, now: float) -> None:
        """The device computes nothing until `now`: collectives take what they take."""
        for communicator in self.groups.values():
            while communicator.next_start < now:
                part = min(communicator.queue[0].left, now - communicator.next_start)
                self._progress(communicator, part, communicator.next_start + part)

    def _progress(self, communicator: _Communicator, part: float, now: float) -> None:
        flying = communicator.queue[0]
        flying.left -= part
        communicator.clock = now
        if flying.left <= 1e-12:
            communicator.queue.popleft()
            self.done[flying.handle] = now

    def _finish(self, communicator: _Communicator) -> None:
        flying = communicator.queue[0]
        self._progress(communicator, flying.left, communicator.next_start + flying.left)

    def _look(self) -> None:
        self.is_flying = any(communicator.queue for communicator in self.groups.values())


# Host and device side by side: the host issues operations ahead, the device waits if it is late.
# Beside the device, what it exchanges with others goes on.


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

    def begin(self) -> None:
        """What is `run` from here on counts."""
        for account in (self.accounts, self.issuing, self.exposed):
            account.clear()

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
