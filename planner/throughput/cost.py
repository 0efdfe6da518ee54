"""How long a whole training takes at a predicted rate, and what that costs. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from planner.core.errors import UsageError, shorten
from planner.machine.hardware.gpu import Gpu
from planner.throughput.result import Throughput

IMAGENET_IMAGES = 1_281_167  # ImageNet-1k's training split, what an epoch means unless said
_MOST = 1e12  # of anything


@dataclass(frozen=True)
class Training:
    """`epochs` of `images_per_epoch` (or clips, or samples), and the `price_per_hour` of one GPU,
    in any currency."""

    epochs: float
    images_per_epoch: int = IMAGENET_IMAGES
    price_per_hour: float | None = None


@dataclass(frozen=True)
class Cost:
    """A whole training on all `devices` together: its `seconds`, and its `price`, in the currency
    of the price per hour of one GPU, None where none was named. The ends of both ranges are those
    of the predicted rate; the high one is None where the rate is only bounded from above. Only what
    a step takes is counted: not validation, compilation, or a loader that is slower."""

    epochs: float
    images_per_epoch: int
    devices: int
    price_per_hour: float | None
    seconds: float
    low_seconds: float
    high_seconds: float | None
    price: float | None
    low_price: float | None
    high_price: float | None


def cost_of(training: Training | None, predicted: Throughput | None) -> Cost | None:
    """None without either."""
    if training is None or predicted is None:
        return None
    seconds = training.epochs * training.images_per_epoch / predicted.all_images_per_second
    off, is_bounded = predicted.uncertainty, predicted.is_whole and predicted.uncertainty < 1
    ends = seconds, seconds / (1 + off), seconds / (1 - off) if is_bounded else None
    hourly = training.price_per_hour
    prices = [
        None if hourly is None or end is None else end / 3600 * predicted.devices * hourly
        for end in ends
    ]
    return Cost(
        training.epochs, training.images_per_epoch, predicted.devices, hourly, *ends, *prices
    )


def read_training(
    epochs: float | None,
    images_per_epoch: int | None,
    price_per_hour: float | None,
    gpu: Gpu | None,
) -> Training | None:
    """What is to be trained, None where nothing of it was said. Raises UsageError."""
    given = {
        "--epochs": epochs, "--images-per-epoch": images_per_epoch,
        "--price-per-hour": price_per_hour,
    }  # fmt: skip
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
            f"{' and '.join(said)} {'are' if len(said) > 1 else 'is'} of a whole training, and its "
            "length was not said.",
            "Add --epochs 300.",
        )
    if gpu is None:
        raise UsageError(
            "how long a training takes depends on the GPU, and none was named.",
            'Add --gpu "RTX 3090".',
        )
    return Training(epochs, images_per_epoch or IMAGENET_IMAGES, price_per_hour)
