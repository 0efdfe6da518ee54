"""A predicted step: its seconds, its rate, of one device and of all, and what both rest on; and how
long a whole training takes at that rate. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from planner.core.errors import UsageError, shorten
from planner.machine.hardware.gpu import Gpu

if TYPE_CHECKING:
    from planner.throughput.timeline import Communication

# What the device is busy with, or waits for, by `bound_seconds`: an operation counts whole as that
# which takes most of it.
BANDWIDTH, MATRIX_UNITS, STARTS = "bandwidth", "matrix units", "kernel starts"
LINK = "link to the host"
WAITING = "waiting for the host"  # the entry of `kind_seconds` in which the device is idle
OTHERS = "waiting for other devices"  # and that in which it waits for a collective
HOST, BETWEEN = "host", "link between devices"  # what bounds these


class Part(NamedTuple):
    """Seconds of a step that one kind of operation takes in one phase, and what bounds it."""

    phase: str
    kind: str
    bound: str
    seconds: float

    def as_json(self) -> dict[str, object]:
        return self._asdict()


class Spent(NamedTuple):
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
    def device_seconds(self) -> float:
        """What the device would take if it waited for nobody."""
        waits = self.kind_seconds
        return self.step_seconds - waits.get(WAITING, 0.0) - waits.get(OTHERS, 0.0)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What takes time as well, and is not counted."""
        found = ["loading the data", "clocks falling under sustained load"]
        if self.devices > 1 and self.communication is None:
            found.append("communication between devices")
        if self.host_updates:
            found.append(
                "the update of weights on the host, whose processor's rate nobody measured: the "
                "step takes at least what is predicted"
            )
        return tuple(found)

    @property
    def is_whole(self) -> bool:
        """Whether it holds what devices exchange, and all updates; else the rate is an upper
        bound."""
        return not self.host_updates and (self.devices == 1 or self.communication is not None)


def is_slower(one: Throughput, fastest: Throughput) -> bool:
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


# A whole training.

IMAGENET_IMAGES = 1_281_167  # ImageNet-1k's training split, what an epoch means unless said
_MOST = 1e12  # of anything


@dataclass(frozen=True)
class Training:
    """`epochs` of `images_per_epoch` (or clips, or samples)."""

    epochs: float
    images_per_epoch: int = IMAGENET_IMAGES


@dataclass(frozen=True)
class Cost:
    """A whole training on all `devices` together: its `seconds`. The ends of the range are those of
    the predicted rate; the high one is None where the rate is only bounded from above. Only what a
    step takes is counted: not validation, compilation, or a loader that is slower."""

    epochs: float
    images_per_epoch: int
    devices: int
    seconds: float
    low_seconds: float
    high_seconds: float | None


def cost_of(training: Training | None, predicted: Throughput | None) -> Cost | None:
    """None without either."""
    if training is None or predicted is None:
        return None
    seconds = training.epochs * training.images_per_epoch / predicted.all_images_per_second
    off, is_bounded = predicted.uncertainty, predicted.is_whole and predicted.uncertainty < 1
    ends = seconds, seconds / (1 + off), seconds / (1 - off) if is_bounded else None
    return Cost(training.epochs, training.images_per_epoch, predicted.devices, *ends)


def read_training(
    epochs: float | None, images_per_epoch: int | None, gpu: Gpu | None
) -> Training | None:
    """What is to be trained, None where nothing of it was said. Raises UsageError."""
    given = {"--epochs": epochs, "--images-per-epoch": images_per_epoch}
    said = {name: value for name, value in given.items() if value is not None}
    for name, value in said.items():
        if isinstance(value, bool) or not (isfinite(value) and 0 < value <= _MOST):
            raise UsageError(
                f"{name} takes a number above 0, not {shorten(value)}.", f"For example {name} 300."
            )
    if not said:
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
    return Training(epochs, images_per_epoch or IMAGENET_IMAGES)
