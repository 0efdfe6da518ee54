"""The timelines of a step: the host's, the device's, and that of the collectives beside them.

First what a step exchanges and over which links, then `Traffic`, the collectives in flight, then
`Timeline`, which runs a step.

The devices of a group (a communicator) run collectives one after the other, in the order in which
the host issues them. A collective that follows a computation waits for it; a computation that needs
the collective's result waits in turn, and that wait is what communication costs. Computing and
communicating at the same time slow each other down.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from planner.core.schema import TrainSetting
from planner.core.schema.record import Phase
from planner.core.schema.setting import Group
from planner.ledger.ledger import Exchange, Ledger, Sent
from planner.machine.hardware.fabric import Fabric, bus_factor, find_fabric
from planner.machine.hardware.gpu import Gpu
from planner.throughput.result import HOST, HOST_WAIT

# How many times as long computing and communicating take while both go on. Published for the A100
# (PKU-DAIR/Hetu-Galvatron @cea12ff, hardware_configs/overlap_coefficient.json).
CONTENTION = 1.1256


@dataclass(frozen=True)
class Exchanges:
    """The collectives of a step (`Ledger.exchanges`), the links that they cross, and the cost of
    overlapping. Every collective takes `scale` times as long as its link says."""

    events: tuple[Exchange, ...]
    fabric: Fabric
    contention: float = CONTENTION
    scale: float = 1.0


def find_exchanges(
    ledger: Ledger, setting: TrainSetting, gpu: Gpu | None, link: str | None = None
) -> Exchanges | None:
    """The exchanges of a step over `link`, or over the usual link between several of `gpu`; None
    where the step exchanges nothing, or the link is unknown.

    Raises UsageError: no such link, or one that joins fewer devices.
    """
    if setting.world_size == 1 or (gpu is None and link is None):
        return None
    events = ledger.exchanges()
    if not events:
        return None
    if link is None and gpu is not None and gpu.joined_by is None:
        return None
    return Exchanges(events, find_fabric(gpu, setting.nodes, link, setting.devices_per_node))


def communication_basis(exchanges: Exchanges | None, setting: TrainSetting) -> list[str]:
    """The sources and assumptions of the communication's time, one line each."""
    if exchanges is None:
        return []
    fabric = exchanges.fabric
    links = [link for link in (fabric.within, fabric.between) if link is not None]
    sources = "; ".join(f"{link.name}: {', '.join(link.sources)}" for link in links)
    return [
        *fabric.assumed,
        "collectives take as long as was published or measured for their links, up to "
        f"{fabric.spread:.0%} more or less ({sources})",
        f"computing and communicating take {exchanges.contention:g} times as long while both go on "
        "(published of A100s by Galvatron)",
        *_compiled_basis(setting),
    ]


def _compiled_basis(setting: TrainSetting) -> list[str]:
    if setting.compile == "off":
        return []
    return [
        "compiled code sends its gradients as it returns: torch.compile of the wrapped model "
        "may split backward at buckets (DDPOptimizer) and send earlier"
    ]


def group_layout(setting: TrainSetting, group: Group) -> tuple[int, int, int]:
    """The number of ranks in a group, the number of machines that they are on, and how many such
    groups share the network of a machine. Ranks are numbered machine by machine; the ranks that
    shard one copy of the model are neighbours."""
    num_shards = setting.shard_size
    per_node = setting.devices_per_node
    if group == "shard" and num_shards > 1:
        return num_shards, -(-num_shards // per_node), 1
    if group == "replicate":
        copies = setting.num_copies
        return copies, min(setting.nodes, copies), min(num_shards, per_node)
    return setting.world_size, setting.nodes, 1


def collective_seconds(exchanges: Exchanges, sent: Sent, setting: TrainSetting) -> float:
    """The time of one collective with nothing beside it."""
    layout = group_layout(setting, sent.group)
    return exchanges.scale * exchanges.fabric.seconds(sent.collective, sent.num_bytes, *layout)


def sent_bytes(sent: Sent, setting: TrainSetting) -> float:
    """The bytes that each device sends for a collective, in a ring."""
    ranks = group_layout(setting, sent.group)[0]
    return bus_factor(sent.collective, ranks) * sent.num_bytes if ranks > 1 else 0.0


def delay_to_region_ends(
    exchanges: Iterable[Exchange], phases: Sequence[str], regions: Sequence[str | None]
) -> tuple[Exchange, ...]:
    """The exchanges of a compiled step. A region hands over its results as it returns, so that
    each exchange within a region moves to the region's end."""
    delayed = []
    for exchange in exchanges:
        place = exchange.place
        while 0 < place < len(regions) and regions[place] is not None:
            if (regions[place], phases[place]) != (regions[place - 1], phases[place - 1]):
                break
            place += 1
        delayed.append(exchange._replace(place=place))
    return tuple(delayed)


@dataclass(eq=False)
class _PendingCollective:
    """A collective that was issued, the time from which it may run, and the seconds that it still
    takes with nothing beside it."""

    handle: int
    ready: float
    seconds_left: float


@dataclass(eq=False)
class _Communicator:
    """The pending collectives of one group; `clock` is the time of its last progress."""

    clock: float = 0.0
    queue: deque[_PendingCollective] = field(default_factory=deque)

    @property
    def next_start(self) -> float:
        return max(self.clock, self.queue[0].ready) if self.queue else inf


class Traffic:
    """The collectives in flight, as the device's clock advances. `end_times` holds, by handle, when
    each collective of this step ended."""

    def __init__(self, exchanges: Exchanges, setting: TrainSetting) -> None:
        self.exchanges = exchanges
        self.setting = setting
        self.groups: dict[Group, _Communicator] = {}
        self.end_times: dict[int, float] = {}
        self.has_pending = False
        self._seconds: dict[tuple[object, ...], float] = {}

    def begin_step(self) -> None:
        """Ends what the step before left in flight; this step has the same handles."""
        for communicator in self.groups.values():
            while communicator.queue:
                self._finish_first(communicator)
        self.has_pending = False
        self.end_times.clear()

    def issue(self, sent: Sent, ready: float) -> None:
        """Queues a collective that may start at `ready`."""
        key = sent[1:3], sent.group
        if key not in self._seconds:
            self._seconds[key] = collective_seconds(self.exchanges, sent, self.setting)
        communicator = self.groups.setdefault(sent.group, _Communicator())
        communicator.queue.append(_PendingCollective(sent.handle, ready, self._seconds[key]))
        self.has_pending = True

    def wait_for(self, handle: int, time: float) -> float:
        """The time at which collective `handle` is done, if the device idles from `time` on."""
        self._idle_until(time)
        for communicator in self.groups.values():
            while any(pending.handle == handle for pending in communicator.queue):
                self._finish_first(communicator)
        self._update_pending()
        return max(time, self.end_times.get(handle, time))

    def compute(self, time: float, busy: float) -> float:
        """The time at which the device has done, from `time` on, what takes it `busy` seconds with
        nothing beside it."""
        self._idle_until(time)
        contention = self.exchanges.contention
        while busy > 0:
            active = [c for c in self.groups.values() if c.next_start <= time]
            next_start = min(
                (c.next_start for c in self.groups.values() if c not in active), default=inf
            )
            if not active:
                part = min(busy, next_start - time)
                time, busy = time + part, busy - part
                if next_start == inf:
                    break
                continue
            seconds_left = (communicator.queue[0].seconds_left for communicator in active)
            part = min(busy, (next_start - time) / contention, *seconds_left)
            time, busy = time + part * contention, busy - part
            for communicator in active:
                self._advance(communicator, part, time)
        self._update_pending()
        return time

    def _idle_until(self, time: float) -> None:
        """The device computes nothing until `time`: nothing slows the collectives down."""
        for communicator in self.groups.values():
            while communicator.next_start < time:
                part = min(communicator.queue[0].seconds_left, time - communicator.next_start)
                self._advance(communicator, part, communicator.next_start + part)

    def _advance(self, communicator: _Communicator, part: float, time: float) -> None:
        """The first collective has done `part` of its seconds by `time`."""
        pending = communicator.queue[0]
        pending.seconds_left -= part
        communicator.clock = time
        if pending.seconds_left <= 1e-12:
            communicator.queue.popleft()
            self.end_times[pending.handle] = time

    def _finish_first(self, communicator: _Communicator) -> None:
        seconds_left = communicator.queue[0].seconds_left
        self._advance(communicator, seconds_left, communicator.next_start + seconds_left)

    def _update_pending(self) -> None:
        self.has_pending = any(communicator.queue for communicator in self.groups.values())


# Host and device side by side: the host issues operations ahead, and the device waits where the
# host is late. Collectives run beside the device.


# The key that seconds count under: phase, kind, bound; and an operation's name and path.
Account = tuple[Phase, str, str, *tuple[str, ...]]


class Priced(NamedTuple):
    """The seconds that one operation costs the host to issue and the device to run."""

    phase: Phase
    account: Account  # what its seconds count under
    issue: float
    busy: float


class Timeline:
    """Host and device clocks in seconds, and the accounts of the device's time.

    `asynchronous`: the host runs ahead. `reads_scale`: GradScaler reads found_inf on the host
    before it lets the optimizer step. `exposed` is the device's wait for other devices, by (phase,
    micro-batch).
    """

    def __init__(self, asynchronous: bool, reads_scale: bool, traffic: Traffic | None) -> None:
        self.asynchronous = asynchronous
        self.reads_scale = reads_scale
        self.traffic = traffic
        self.host = 0.0
        self.device = 0.0
        self.phase = ""
        self.accounts: dict[Account, float] = defaultdict(float)
        self.issuing: dict[Phase, float] = defaultdict(float)
        self.exposed: dict[tuple[Phase, int], float] = defaultdict(float)
        self._gathering: set[int] = set()  # handles of weights that the host gathers ahead
        self._gather_ends: deque[float] = deque(maxlen=2)  # of the last gathered weights

    def clear_accounts(self) -> None:
        """Only what runs from here on counts."""
        for account in (self.accounts, self.issuing, self.exposed):
            account.clear()

    def run(self, operations: Sequence[Priced], exchanges: Sequence[Exchange] = ()) -> None:
        """Runs a step, from where the clocks stand."""
        self.phase = ""
        if self.traffic is not None:
            self.traffic.begin_step()
        start = 0
        for exchange in exchanges:
            self._run_operations(operations[start : exchange.place])
            start = exchange.place
            self._run_exchange(exchange)
        self._run_operations(operations[start:] if start else operations)

    def _run_operations(self, operations: Sequence[Priced]) -> None:
        accounts, issuing, asynchronous = self.accounts, self.issuing, self.asynchronous
        traffic = self.traffic
        for phase, key, issue, busy in operations:
            if phase != self.phase:
                self.phase = phase
                if phase == "optimizer" and self.reads_scale:
                    self.host = max(self.host, self.device)
            self.host += issue
            issuing[phase] += issue
            if self.host > self.device:
                accounts[phase, HOST_WAIT, HOST] += self.host - self.device
                self.device = self.host
            if traffic is not None and traffic.has_pending:
                busy = traffic.compute(self.device, busy) - self.device
            self.device += busy
            accounts[key] += busy
            if not asynchronous:
                self.host = self.device

    def _run_exchange(self, exchange: Exchange) -> None:
        assert self.traffic is not None, "there is a link"
        event = exchange.event
        if isinstance(event, Sent):
            self.traffic.issue(event, self._ready_time(event))
            return
        end = self.traffic.wait_for(event.handle, self.device)
        if end > self.device:
            self.exposed[exchange.phase, exchange.micro_batch] += end - self.device
            self.device = end
        if event.handle in self._gathering:
            self._gathering.remove(event.handle)
            self._gather_ends.append(self.device)
        if not self.asynchronous:
            self.host = self.device

    def _ready_time(self, sent: Sent) -> float:
        """The time from which a collective may run. Weights that are gathered ahead wait until the
        unit before the last one has its weights, whose buffer they take:
        `FSDPParamGroup.wait_for_unshard`
        (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""
        if sent.follows:
            return max(self.host, self.device)
        self._gathering.add(sent.handle)
        is_full = len(self._gather_ends) == self._gather_ends.maxlen
        return max(self.host, self._gather_ends[0]) if is_full else self.host
