"""A predicted step: its seconds and its rate, of one device and of all, what they rest on and what
the devices exchange; and how long a whole training takes at that rate. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from planner.core.errors import UsageError, shorten
from planner.core.schema.record import Phase
from planner.machine.hardware.gpu import Gpu

# The bounds of `bound_seconds`: what keeps the device busy. The seconds of an operation all count
# under the bound that takes most of them.
BANDWIDTH, MATRIX_UNITS, KERNEL_STARTS = "bandwidth", "matrix units", "kernel starts"
HOST_LINK = "link to the host"
# The kinds of `kind_seconds` in which the device is idle: it waits for the host, or for a
# collective. Then what bounds these two.
HOST_WAIT, COLLECTIVE_WAIT = "waiting for the host", "waiting for other devices"
HOST, DEVICE_LINK = "host", "link between devices"


class Part(NamedTuple):
    """The seconds of a step that one kind of operation takes in one phase, under one bound."""

    phase: Phase
    kind: str
    bound: str
    seconds: float

    def as_json(self) -> dict[str, object]:
        return self._asdict()


class CallPart(NamedTuple):
    """The seconds of a step that all calls of one operation take in one module and phase. A wait
    has neither `name` nor `path`."""

    phase: Phase
    kind: str
    bound: str
    seconds: float
    name: str = ""
    path: str = ""


class Breakdown:
    """The seconds of `parts`, summed by phase, by kind and by bound: a mixin."""

    computed: tuple[str, ...] = ("phase_seconds", "kind_seconds", "bound_seconds")
    parts: tuple[Part, ...]

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        return _sum_by_name((part.phase, part.seconds) for part in self.parts)

    @property
    def kind_seconds(self) -> Mapping[str, float]:
        return _sum_by_name((part.kind, part.seconds) for part in self.parts)

    @property
    def bound_seconds(self) -> Mapping[str, float]:
        return _sum_by_name((part.bound, part.seconds) for part in self.parts)

    def bound_seconds_of(self, kind: str) -> Mapping[str, float]:
        """The seconds of one kind of operation, by bound."""
        return _sum_by_name((part.bound, part.seconds) for part in self.parts if part.kind == kind)


def _sum_by_name(entries: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in entries:
        sums[name] += seconds
    return dict(sums)


@dataclass(frozen=True)
class Communication:
    """What one optimizer step exchanges, as one device sees it.

    `seconds` is the sum over its collectives, with nothing beside them; `exposed_seconds` the part
    during which the device does nothing else; `sent_bytes` what the device sends to its neighbour
    in a ring. `alone_seconds` is the time of the same step without communication. `low_seconds` and
    `high_seconds` are the step's range, by that of its links.
    """

    link: str
    seconds: float
    exposed_seconds: float
    sent_bytes: int
    alone_seconds: float
    low_seconds: float
    high_seconds: float


# The least ratio of two predicted rates that count as different. Published rates on one card that
# differ by a tenth are all predicted in their order (tests/test_published.py).
MIN_RATIO = 1.1


@dataclass(frozen=True)
class Throughput(Breakdown):
    """A predicted optimizer step in seconds and images/s; `basis` says what the rates rest on.

    `uncertainty` is relative: 0.35 means that either figure may be off by 35% either way.
    The seconds of its `parts` (by phase, kind of operation, and what bounds it: host, bandwidth,
    matrix units, kernel starts, links), where it has any, sum to `step_seconds`. `host_seconds` is
    the host's time to issue the step. `matrix_flops` counts the step's FLOPs on matrix units,
    recomputed ones too; `peak_share` is their rate's share of the named GPU's peak; `launches`
    counts its kernels. `images_per_second` is the rate of one of `devices`. `communication` is what
    they exchange, where that is known. With `host_updates` the host updates the weights, whose time
    is left out.
    """

    computed = (*Breakdown.computed, "all_images_per_second")
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
        """The rate of all devices together."""
        return self.devices * self.images_per_second

    @property
    def left_out(self) -> tuple[str, ...]:
        """What else takes time, and is not counted."""
        omissions = ["loading the data", "clocks falling under sustained load"]
        if self.devices > 1 and self.communication is None:
            omissions.append("communication between devices")
        if self.host_updates:
            omissions.append(
                "the update of weights on the host, whose processor's rate nobody measured: the "
                "step takes longer than predicted"
            )
        return tuple(omissions)

    @property
    def is_whole(self) -> bool:
        """Whether the step counts all communication and all updates; if not, its rate is an upper
        bound."""
        return not self.host_updates and (self.devices == 1 or self.communication is not None)


def is_slower(step: Throughput, fastest: Throughput) -> bool:
    """Whether `step` is slower than `fastest` on the same card, whatever the card's rates are
    within their uncertainty. Both have the same rates, so that the seconds that they share cancel
    out. A ratio below MIN_RATIO counts for nothing."""
    excess: dict[str, float] = defaultdict(float)  # seconds per image, by bound
    for throughput, sign in ((step, 1), (fastest, -1)):
        num_images = throughput.images_per_second * throughput.step_seconds
        for bound, seconds in throughput.bound_seconds.items():
            excess[bound] += sign * seconds / num_images
    doubt = max(step.uncertainty, fastest.uncertainty) * sum(map(abs, excess.values()))
    is_distinct = step.images_per_second * MIN_RATIO < fastest.images_per_second
    return is_distinct and sum(excess.values()) > doubt


# A whole training.

IMAGENET_IMAGES = 1_281_167  # ImageNet-1k's training split, what an epoch means unless said
_MAX_COUNT = 1e12  # of epochs, or of images


@dataclass(frozen=True)
class TrainingLength:
    """The length of a training: `epochs` of `images_per_epoch` (or clips, or samples)."""

    epochs: float
    images_per_epoch: int = IMAGENET_IMAGES


@dataclass(frozen=True)
class Cost:
    """The `seconds` of a whole training on all `devices` together. The range follows from that of
    the predicted rate; its high end is None where the rate is only bounded from above. Only the
    steps count: not validation, compilation, or a loader that is slower than they are."""

    epochs: float
    images_per_epoch: int
    devices: int
    seconds: float
    low_seconds: float
    high_seconds: float | None


def training_cost(length: TrainingLength | None, throughput: Throughput | None) -> Cost | None:
    """The cost of a training at the rate of `throughput`; None without either."""
    if length is None or throughput is None:
        return None
    seconds = length.epochs * length.images_per_epoch / throughput.all_images_per_second
    uncertainty = throughput.uncertainty
    low_seconds, high_seconds = seconds / (1 + uncertainty), None
    if throughput.is_whole and uncertainty < 1:
        high_seconds = seconds / (1 - uncertainty)
    return Cost(
        length.epochs,
        length.images_per_epoch,
        throughput.devices,
        seconds,
        low_seconds,
        high_seconds,
    )


def read_length(
    epochs: float | None, images_per_epoch: int | None, gpu: Gpu | None
) -> TrainingLength | None:
    """The length that the two options give; None without either. Raises UsageError."""
    for option, value in (("--epochs", epochs), ("--images-per-epoch", images_per_epoch)):
        if value is None:
            continue
        if isinstance(value, bool) or not (isfinite(value) and 0 < value <= _MAX_COUNT):
            raise UsageError(
                f"{option} takes a number above 0, not {shorten(value)}.",
                f"For example {option} 300.",
            )
    if epochs is None and images_per_epoch is None:
        return None
    if epochs is None:
        raise UsageError(
            "--images-per-epoch is of a whole training, and its length was not said.",
            "Add --epochs 300.",
        )
    if gpu is None:
        raise UsageError(
            "how long a training takes depends on the GPU, and none was named.",
            'Add --gpu "RTX 3090".',
        )
    return TrainingLength(epochs, images_per_epoch or IMAGENET_IMAGES)
