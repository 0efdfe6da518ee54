"""Whether tiles and waves of matrix products belong in the time model: the fit of `fit_rates` with
products as they are, padded to tiles, and as far as waves of tiles leave SMs idle: `python -m
tests.benchmarks.fit_tiles`, over the published rows.

A kernel computes whole tiles of its result, and a card as many at once as it has SMs (NVIDIA,
Matrix Multiplication Background User's Guide DU-09799-001, whose section 2.3 lists the tiles of
cuBLAS below). Of the tiles that the list has, a product takes the one that costs it least. Needs
scipy, no torch.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from statistics import fmean, median
from unittest import mock

from planner.ledger.ledger import Computed
from planner.machine.hardware import Gpu
from planner.step import matmul
from planner.step.tensor import Device, Tensor
from tests.benchmarks.fit_rates import Timed, fit, predicted_seconds, timed_rows

Tile = tuple[int, int]
LISTED: tuple[Tile, ...] = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
)  # fmt: skip
# The tiles, and the share that is felt of the SMs' idleness while all of a product's waves run.
CASES: dict[str, tuple[tuple[Tile, ...], float]] = {
    "as they are": (((1, 1),), 0),
    "tiles, any listed": (LISTED, 0),
    "tiles, 256 x 128": (((256, 128), (128, 256)), 0),
    **{f"128 x 128, waves {felt:.0%}": (((128, 128),), felt) for felt in (0, 0.25, 0.5, 0.75, 1)},
    "waves, any listed": (LISTED, 1),
    "waves, 256 x 128": (((256, 128), (128, 256)), 1),
}


def _with_shape(device: Device, name: str, y: Tensor, inner: int, num_bytes: int) -> None:
    """As `matmul._matmul_cost`, with (batch, rows, columns, inner) behind the operation's name."""
    batch = y.shape[0] if len(y.shape) == 3 else 1
    shape = f"{batch},{y.shape[-2]},{y.shape[-1]},{inner}"
    flops = 2 * y.numel * inner
    device.compute(f"{name} {shape}", "matmul", y.dtype, flops, num_bytes + y.num_bytes)


def padded(operation: Computed, gpu: Gpu, tiles: tuple[Tile, ...], felt: float) -> Computed:
    """`operation` by its own name, with the FLOPs that whole tiles and idle SMs amount to."""
    if operation.kind != "matmul":
        return operation
    name, shape = operation.name.split()
    batch, rows, columns, inner = map(int, shape.split(","))
    assert gpu.num_sms is not None
    flops = []
    for height, width in tiles:
        number = batch * ceil(rows / height) * ceil(columns / width)
        idle = 1 - number / (ceil(number / gpu.num_sms) * gpu.num_sms)
        flops.append(2 * number * height * width * inner / (1 - felt * idle))
    return operation._replace(name=name, flops=round(min(flops)))


def _padded_row(timed: Timed, tiles: tuple[Tile, ...], felt: float) -> Timed:
    operations = (
        (phase, padded(operation, timed.gpu, tiles, felt)) for phase, operation in timed.operations
    )
    return replace(timed, operations=tuple(operations))


def _errors(rows: list[Timed], shares: dict[str, float]) -> str:
    found = [abs(timed.seconds / predicted_seconds(timed, shares) - 1) for timed in rows]
    return f"{median(found):.1%} {fmean(found):.1%} {max(found):.1%}"


def main() -> None:
    with mock.patch.object(matmul, "_matmul_cost", _with_shape):
        rows = timed_rows()
    print(f"{'products':20} median, mean and worst error of the fitted rows; of those held out")
    for title, (tiles, felt) in CASES.items():
        chosen = [_padded_row(timed, tiles, felt) for timed in rows]
        fitted = [timed for timed in chosen if not timed.is_held_out]
        held_out = [timed for timed in chosen if timed.is_held_out]
        shares = fit(fitted)
        print(f"{title:20} {_errors(fitted, shares)}; {_errors(held_out, shares)}")


if __name__ == "__main__":
    main()
