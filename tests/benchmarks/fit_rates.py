"""Fits what kernels reach of a datasheet's figures to published measurements and to our own of an
NVIDIA H200 and H100: `python -m tests.benchmarks.fit_rates`.

Prints the errors of the shares that are committed, on the rows that enter the fit and on those held
out, and what the fit finds today. Of our rows those count whose time is the device's: a host that
is late makes the others. Needs scipy, no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log, sqrt
from pathlib import Path
from statistics import median

from planner.core.schema import MeasurementRecord, Model, SwinConfig, TrainSetting
from planner.core.torch_version import as_of
from planner.estimation.estimate import resolve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Operation
from planner.machine.hardware import Gpu
from planner.report.text import describe_setting
from planner.throughput import rates as committed
from planner.throughput.prediction import device_seconds, predict_step
from planner.throughput.rates import DeviceRates, memory_kind, rates_for
from planner.throughput.result import HOST_WAIT
from search.loop.records import read_records
from tests.truth.compare import accuracy_of, gpu_of
from tests.truth.fit import is_held_out
from tests.truth.published import read_published, timed_operations

MEASURED = [Path(__file__).parents[1] / "truth" / card for card in ("h200", "h100")]
COMMITTED = {
    "bandwidth GDDR": committed.BANDWIDTH_SHARE["GDDR"],
    "bytes a clock Ampere": committed.EAGER_BYTES_PER_CLOCK["Ampere"],
    "bytes a clock Hopper": committed.EAGER_BYTES_PER_CLOCK["Hopper"],
    "reduction": committed.REDUCTION_SHARE,
    "fp32 matmul": committed.FP32_MATMUL_SHARE[""],
    "fp32 matmul Hopper": committed.FP32_MATMUL_SHARE["Hopper"],
    "backward matmul": committed.BACKWARD_MATMUL_SHARE,
}
# Where the fit starts, and between which limits it stays: a share is no more than all there is.
START = {
    "bandwidth GDDR": 0.8, "bytes a clock Ampere": 7.0, "bytes a clock Hopper": 9.0,
    "reduction": 0.8, "fp32 matmul": 0.8, "fp32 matmul Hopper": 0.8, "backward matmul": 0.8,
}  # fmt: skip
LIMITS = {name: (0.1, 20.0 if name.startswith("bytes") else 1.0) for name in START}
# Beyond this error, as a logarithm, a row pulls less than its square: outliers do not lead.
SOFT_FROM = 0.05
# Of the device's own time, which a step may wait for the host and still count, and how much slower
# than assumed a host may be: the H100's took 35 to 44 ms for a Swin-T's small steps, the H200's 29.
WAITS = 0.02
SLOW_HOST = 1.6


@dataclass(frozen=True)
class Timed:
    """A row: its model, setting and card, all its operations, and its seconds by `release` of
    torch."""

    what: str
    model: Model
    gpu: Gpu
    setting: TrainSetting
    operations: tuple[Operation, ...]
    seconds: float
    release: str
    is_held_out: bool
    is_published: bool = True


@cache
def _counted(operations: tuple[Operation, ...]) -> Counter[Operation]:
    """The operations with how often each runs."""
    return Counter((phase, one._replace(path="")) for phase, one in operations)


def timed_rows() -> list[Timed]:
    """The published rows of Swins whose time an estimate is held to, in the file's order."""
    found = []
    for row in read_published():
        if row.is_traced or row.why_time_is_only_listed is not None:
            continue
        model, setting = row.resolved
        with as_of(row.release):
            operations = tuple(timed_operations(row))
        found.append(Timed(
            f"{row.model}, {row.span}", model, row.device, setting, operations,
            setting.batch_size / row.images_per_second, row.release, row.is_held_out,
        ))  # fmt: skip
    return found


def measured_rows() -> list[Timed]:
    """Eager steps of Swins on the H200 and the H100 that do not wait for the host."""
    files = [card / f"{name}.jsonl" for card in MEASURED for name in ("rows", "tuned")]
    records = [record for file in files for record in read_records(file).records]
    found = [_measured(r) for r in records if _is_timed(r)]
    return [timed for timed in found if not _waits(timed)]


def _is_timed(record: MeasurementRecord) -> bool:
    unsure = any("the median is known to" in flag for flag in record.flags)
    eager = record.setting.compile == "off" and isinstance(record.model, SwinConfig)
    return record.status == "measured" and eager and not unsure


def _measured(record: MeasurementRecord) -> Timed:
    gpu = gpu_of(record)
    with as_of(record.versions["torch"]):
        model, setting = resolve(record.model, record.setting)
        operations = tuple(step_ledger(model, setting).operations())
    return Timed(
        record.model.title, model, gpu, setting, operations, median(record.step_seconds),
        record.versions["torch"], is_held_out(record), is_published=False,
    )  # fmt: skip


def _waits(timed: Timed) -> bool:
    rates = rates_for(timed.gpu, timed.model)
    slow = {phase: SLOW_HOST * seconds for phase, seconds in rates.host_seconds.items()}
    rates = replace(rates, host_seconds=slow, launch_seconds=SLOW_HOST * rates.launch_seconds)
    step = predict_step(timed.operations, rates, timed.setting)
    waited = step.kind_seconds.get(HOST_WAIT, 0.0)
    return waited > WAITS * (step.step_seconds - waited)


def rates_with(timed: Timed, shares: Mapping[str, float]) -> DeviceRates:
    """The rates of its card if `shares` were what kernels reach."""
    gpu = timed.gpu
    known = rates_for(gpu, timed.model)
    fp32 = "fp32 matmul Hopper" if gpu.architecture == "Hopper" else "fp32 matmul"
    return replace(
        known,
        matmul_flops={**known.matmul_flops, "float32": gpu.fp32_flops * shares[fp32]},
        bandwidth=_moved(gpu, shares),
        kind_share={**known.kind_share, "reduction": shares["reduction"]},
        backward_matmul_share=shares["backward matmul"],
    )


def _moved(gpu: Gpu, shares: Mapping[str, float]) -> float:
    """Bytes/s of what moves large tensors in an eager step."""
    if memory_kind(gpu) == "GDDR":
        return gpu.bandwidth * shares["bandwidth GDDR"]
    moved = shares[f"bytes a clock {gpu.architecture}"] * gpu.num_sms * gpu.boost_mhz * 1e6
    return min(gpu.bandwidth * committed.BANDWIDTH_SHARE["HBM"], moved)


def predicted_seconds(timed: Timed, shares: Mapping[str, float]) -> float:
    """The device's time alone: at these batches it never waits for the host."""
    rates = rates_with(timed, shares)
    return sum(
        count * device_seconds(phase, operation, rates, timed.setting)
        for (phase, operation), count in _counted(timed.operations).items()
    )


def fit(rows: Sequence[Timed]) -> dict[str, float]:
    """The shares with which `rows` are met best, in logarithms of their times."""
    from scipy.optimize import least_squares

    names = list(START)

    def residuals(values: list[float]) -> list[float]:
        shares = dict(zip(names, values, strict=True))
        return [log(predicted_seconds(timed, shares) / timed.seconds) for timed in rows]

    found = least_squares(
        residuals,
        list(START.values()),
        bounds=list(zip(*LIMITS.values(), strict=True)),
        loss="soft_l1",
        f_scale=SOFT_FROM,
    )
    return {name: float(value) for name, value in zip(names, found.x, strict=True)}


def loss(rows: Sequence[Timed], shares: Mapping[str, float]) -> float:
    """What `fit` makes as small as can be: the squares of errors, softer beyond SOFT_FROM."""
    errors = (log(predicted_seconds(timed, shares) / timed.seconds) / SOFT_FROM for timed in rows)
    return sum(sqrt(1 + error * error) - 1 for error in errors)


def errors(rows: Sequence[Timed]) -> list[tuple[Timed, float]]:
    """(row, relative error of the predicted rate), with the committed shares and the host's time
    counted too."""
    found = []
    for timed in rows:
        with as_of(timed.release):
            rates = rates_for(timed.gpu, timed.model)
            step = predict_step(timed.operations, rates, timed.setting, 1)
        found.append((timed, timed.seconds / step.step_seconds - 1))
    return found


def main() -> None:
    rows = timed_rows() + measured_rows()
    for published, held_out in product((True, False), (False, True)):
        print("\npublished" if published else "\nmeasured", "held out" if held_out else "fitted")
        chosen = [t for t in rows if (t.is_published, t.is_held_out) == (published, held_out)]
        found = errors(chosen)
        for timed, error in found:
            row = f"{timed.gpu.name:14} {timed.what}, {describe_setting(timed.setting)}"
            print(f"  {error:+7.1%}  {row}")
        summary = accuracy_of([error for _, error in found])
        print(f"  {summary.count} rows, median {summary.median:.1%}, worst {summary.worst:.1%}")
    print("\nwhat the fit finds:")
    for name, value in fit([timed for timed in rows if not timed.is_held_out]).items():
        print(f"  {name:18} {value:.4f}")


if __name__ == "__main__":
    main()
