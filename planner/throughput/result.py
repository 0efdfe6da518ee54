"""A predicted step as an estimate holds it: its rate, of one device and of all, and its basis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from planner.core.schema import Model, TrainSetting
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger
from planner.machine.hardware.gpu import Gpu
from planner.machine.hardware.precisions import peak_flops

if TYPE_CHECKING:
    from planner.throughput.communication import Communication, Exchanges
    from planner.throughput.prediction import DeviceRates, StepTime


# Where the seconds of a step go: by phase, by kind of operation, and by what bounds them.


class Part(NamedTuple):
    """Seconds of a step that one kind of operation takes in one phase, and what bounds it."""

    phase: str
    kind: str
    bound: str
    seconds: float

    def as_json(self) -> dict[str, object]:
        return self._asdict()


class Cost(NamedTuple):
    """Seconds of a step that one operation takes in one module and phase, all its calls together;
    what it waits for has neither `name` nor `path`."""

    phase: str
    kind: str
    bound: str
    seconds: float
    name: str = ""
    path: str = ""


class Accounts:
    """The same seconds, summed three ways. A mixin of what has `parts`."""

    computed: tuple[str, ...] = ("phase_seconds", "kind_seconds", "bound_seconds")
    parts: tuple[Part, ...]

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        return _sums((part.phase, part.seconds) for part in self.parts)

    @property
    def kind_seconds(self) -> Mapping[str, float]:
        return _sums((part.kind, part.seconds) for part in self.parts)

    @property
    def bound_seconds(self) -> Mapping[str, float]:
        return _sums((part.bound, part.seconds) for part in self.parts)

    def bounds_of(self, kind: str) -> Mapping[str, float]:
        """What bounds the operations of one kind."""
        return _sums((part.bound, part.seconds) for part in self.parts if part.kind == kind)


def _sums(entries: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in entries:
        sums[name] += seconds
    return dict(sums)


# Times as long: rates closer than this are not told apart. Of published rates on one card, those
# that differ by a tenth are all predicted in their order (tests/test_published.py).
APART = 1.1


@dataclass(frozen=True)
class Throughput(Accounts):
    """A predicted optimizer step in seconds and images/s; `basis` says what the rates rest on.

    `uncertainty` is relative: 0.35 means that either figure may be off by 35% either way.
    The seconds of its `parts` (by phase, kind of operation, and what bounds it: host, bandwidth,
    matrix units, kernel starts, links), where it has any, sum to `step_seconds`; `host_seconds` is
    what the host needs to issue the step. `matrix_flops` are the step's FLOPs on matrix units,
    recomputed ones too; `peak_share` the share that they are of the named GPU's peak; `launches`
    are its kernels. `images_per_second` are those of one of `devices`. `communication` is what they
    exchange, where that is known. With `host_updates` the host updates weights, which is left out.
    """

    computed = (*Accounts.computed, "all_images_per_second")
    step_seconds: float
    images_per_second: float
    basis: str
    uncertainty: float
    parts: tuple[Part, ...] = ()
    host_seconds: float = 0.0
    matrix_flops: float = 0.0
    peak_share: float | None = None
    launches: int = 0
    devices: int = 1
    communication: Communication | None = None
    host_updates: bool = False

    @property
    def all_images_per_second(self) -> float:
        """Of all devices together."""
        return self.devices * self.images_per_second

    @property
    def is_whole(self) -> bool:
        """Whether it holds what devices exchange, and all updates; else the rate is an upper
        bound."""
        return not self.host_updates and (self.devices == 1 or self.communication is not None)


def is_slower(one: Throughput | StepTime, fastest: Throughput | StepTime) -> bool:
    """Whether a step is slower than another on the same card, whatever the card's rates are within
    their uncertainty: both have the same rates, so that what both wait for alike cancels out, and
    less than APART counts for nothing."""
    more: dict[str, float] = defaultdict(float)  # seconds of an image, by what bounds them
    for step, sign in ((one, 1), (fastest, -1)):
        for bound, seconds in step.bound_seconds.items():
            more[bound] += sign * seconds / (step.images_per_second * step.step_seconds)
    doubt = max(one.uncertainty, fastest.uncertainty) * sum(map(abs, more.values()))
    is_apart = one.images_per_second * APART < fastest.images_per_second
    return is_apart and sum(more.values()) > doubt


def datasheet_rates(gpu: Gpu | None, model: Model | None = None) -> DeviceRates | None:
    if gpu is None:
        return None
    from planner.throughput.prediction import rates_for

    return rates_for(gpu, model)


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
    from planner.machine.hardware.fabric import find_fabric, has_usual_link
    from planner.throughput.communication import Exchanges

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


def step_time(
    ledger: Ledger,
    setting: TrainSetting,
    rates: DeviceRates | None,
    exchanges: Exchanges | None = None,
) -> StepTime | None:
    """One optimizer step as it was recorded; None without rates."""
    if rates is None:
        return None
    from planner.throughput.prediction import predict_step

    recorded = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    return predict_step(ledger.operations(), rates, setting, recorded, exchanges)


def step_costs(
    ledger: Ledger,
    setting: TrainSetting,
    rates: DeviceRates | None,
    exchanges: Exchanges | None = None,
) -> tuple[Cost, ...]:
    """The seconds of `step_time`, by operation and the module it ran in: they sum to the same. None
    without rates.

    What the device waits for has no operation: its `name` and `path` are "". Of a compiled step
    the operations are the kernels that they are fused to, in the module of their first.
    """
    if rates is None:
        return ()
    from planner.throughput.prediction import prepared

    recorded = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    step, kernels, events = prepared(ledger.operations(), rates, setting, recorded, exchanges)
    step.operations = [
        priced._replace(account=(*priced.account, operation.name, operation.path))
        for priced, (_, operation) in zip(step.operations, kernels, strict=True)
    ]
    return tuple(Cost(*part, *what) for part, what in step.spent(step.line(events)))


def throughput_of(
    time: StepTime | None, gpu: Gpu | None, setting: TrainSetting
) -> Throughput | None:
    if time is None:
        return None
    peak = None if gpu is None else peak_flops(gpu, setting.precision)
    return Throughput(
        time.step_seconds,
        time.images_per_second,
        time.basis,
        time.uncertainty,
        time.parts,
        time.host_seconds,
        time.matrix_flops,
        None if peak is None else time.matrix_flops / time.step_seconds / peak,
        time.launches,
        setting.world_size,
        time.communication,
        setting.offload_optimizer != "none",
    )
