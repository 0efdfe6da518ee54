"""Fits what kernels reach of a datasheet's figures to published measurements:
`python -m tests.benchmarks.fit_rates`.

Prints the rows, the fit and its errors, on the rows that enter it and on those held out. The
constants of planner/throughput/efficiency.py are of an earlier state of the rows, as is said there.
Needs scipy, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log

from planner.core.schema import TrainSetting
from planner.core.torch_version import as_of
from planner.machine.hardware import Gpu
from planner.report.settings import describe_setting
from planner.throughput.efficiency import memory_kind
from planner.throughput.fusing import Operation
from planner.throughput.prediction import DeviceRates, device_seconds, rates_for
from search.tuning.validation.compare import accuracy_of
from tests.truth.published import (
    PublishedRow,
    predicted_rate,
    read_published,
    timed_operations,
)

# Where the fit starts, and between which limits it stays: a share is no more than all there is.
START = {
    "bandwidth HBM": 0.7, "bandwidth GDDR": 0.8, "reduction": 0.8, "fp32 matmul": 0.8,
    "backward matmul": 0.8,
}  # fmt: skip
LIMITS = (0.1, 1.0)
# Beyond this error, as a logarithm, a row pulls less than its square: outliers do not lead.
SOFT_FROM = 0.05


@dataclass(frozen=True)
class Timed:
    """A row, its setting and card, its operations with how often each runs, and its seconds."""

    row: PublishedRow
    gpu: Gpu
    setting: TrainSetting
    operations: tuple[tuple[Operation, int], ...]
    seconds: float


def timed_rows() -> list[Timed]:
    """The rows of Swins whose time an estimate is held to, in the file's order."""
    return [
        _timed(row)
        for row in read_published()
        if not row.is_traced and row.why_time_is_only_listed is None
    ]


def _timed(row: PublishedRow) -> Timed:
    _, setting = row.resolved
    assert row.device is not None
    assert row.images_per_second is not None
    with as_of(row.release):
        operations = Counter((p, o._replace(path="")) for p, o in timed_operations(row))
    seconds = setting.batch_size / row.images_per_second
    return Timed(row, row.device, setting, tuple(operations.items()), seconds)


def rates_with(gpu: Gpu, shares: Mapping[str, float]) -> DeviceRates:
    """The rates of `gpu` if `shares` were what kernels reach."""
    known = rates_for(gpu)
    return replace(
        known,
        matmul_flops={
            **known.matmul_flops, "float32": gpu.fp32_flops * shares["fp32 matmul"]
        },
        bandwidth=gpu.bandwidth * shares[f"bandwidth {memory_kind(gpu)}"],
        kind_share={**known.kind_share, "reduction": shares["reduction"]},
        backward_matmul_share=shares["backward matmul"],
    )  # fmt: skip


def predicted_seconds(timed: Timed, shares: Mapping[str, float]) -> float:
    """The device's time alone: at these batches it never waits for the host."""
    rates = rates_with(timed.gpu, shares)
    return sum(
        count * device_seconds(phase, operation, rates, timed.setting)
        for (phase, operation), count in timed.operations
    )


def fit(rows: list[Timed]) -> dict[str, float]:
    """The shares with which `rows` are met best, in logarithms of their times."""
    from scipy.optimize import least_squares

    names = list(START)

    def residuals(values: list[float]) -> list[float]:
        shares = dict(zip(names, values, strict=True))
        return [log(predicted_seconds(timed, shares) / timed.seconds) for timed in rows]

    found = least_squares(
        residuals, list(START.values()), bounds=LIMITS, loss="soft_l1", f_scale=SOFT_FROM
    )
    return {name: float(value) for name, value in zip(names, found.x, strict=True)}


def errors(rows: list[Timed], shares: Mapping[str, float]) -> list[tuple[Timed, float]]:
    """(row, relative error of the predicted rate), the host's time counted too."""
    found = []
    for timed in rows:
        with as_of(timed.row.release):
            rate = predicted_rate(timed.row, rates_with(timed.gpu, shares))
        assert rate is not None
        assert timed.row.images_per_second is not None
        found.append((timed, rate / timed.row.images_per_second - 1))
    return found


def main() -> None:
    rows = timed_rows()
    fitted = [timed for timed in rows if not timed.row.is_held_out]
    held_out = [timed for timed in rows if timed.row.is_held_out]
    shares = fit(fitted)
    for title, chosen in (("fitted", fitted), ("held out", held_out)):
        print(f"\n{title}: predicted over measured rate")
        found = errors(chosen, shares)
        for timed, error in found:
            what = f"{timed.row.model}, {timed.row.span}, {describe_setting(timed.setting)}"
            print(f"  {error:+7.1%}  {timed.gpu.name:14} {what}")
        summary = accuracy_of([error for _, error in found])
        assert summary is not None
        print(f"  {summary.count} rows, median {summary.median:.1%}, worst {summary.worst:.1%}")
    print("\nworst error by card and span:")
    for key, worst in sorted(worst_by_card(errors(rows, shares)).items()):
        print(f"  {', '.join(key)}: {worst:.1%}")
    print("\nplanner/throughput/efficiency.py:")
    for name, value in shares.items():
        print(f"  {name:16} {value:.4f}")


def worst_by_card(found: list[tuple[Timed, float]]) -> dict[tuple[str, str], float]:
    """(card, span) -> the largest error, sign left out."""
    worst: dict[tuple[str, str], float] = {}
    for timed, error in found:
        key = timed.gpu.name, timed.row.span
        worst[key] = max(worst.get(key, 0.0), abs(error))
    return worst


if __name__ == "__main__":
    main()
