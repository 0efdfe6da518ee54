"""Records held against the estimate: errors, their median and worst."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import MeasurementRecord, Model, SwinConfig
from planner.core.schema.setting import GRAPH_MODES
from planner.core.torch_version import as_of
from planner.estimation.arguments import Target
from planner.estimation.estimate import Estimate, estimate_ledger, resolve
from planner.estimation.ledgers import step_ledger
from planner.libraries.names import HUB
from planner.machine.hardware import Gpu, recognise_gpu
from planner.memory.allocator_config import recorded_allocator
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates
from planner.throughput.result import Throughput

HUB_TITLES = frozenset(f"transformers:{name}" for name in HUB)
QUANTITIES = ("allocated", "reserved", "device", "step time")


@dataclass(frozen=True)
class Comparison:
    """One measured record and its estimate. Figures by quantity: (predicted, measured), bytes or
    seconds.

    A replayed CUDA graph allocates nothing, so torch counts only what lives outside the graph's
    pool, and the ledger counts the pool: there only reserved and device bytes are compared.
    """

    record: MeasurementRecord
    estimate: Estimate
    figures: dict[str, tuple[float, float]]

    def error(self, quantity: str) -> float | None:
        """(predicted - measured) / measured, or None where it was not measured."""
        pair = self.figures.get(quantity)
        return None if pair is None else pair[0] / pair[1] - 1


def compare(records: Iterable[MeasurementRecord]) -> list[Comparison]:
    """Every measured record on a GPU that an analytic estimate exists for, in order."""
    return [
        comparison
        for record in records
        if record.status == "measured"
        and record.device.kind == "cuda"
        and is_swin(record.model)
        and is_modelled(record)
        and (comparison := _compare(record)) is not None
    ]


def is_swin(model: Model) -> bool:
    """Whether it is a Swin of ours, or one of those that torchvision and transformers build."""
    return isinstance(model, SwinConfig) or ":swin_" in model.title or model.title in HUB_TITLES


def _compare(record: MeasurementRecord) -> Comparison | None:
    """None where the parallelism of a record is measured and not estimated."""
    try:
        estimate = estimate_of(record)
    except UnsupportedError:
        if record.setting.parallelism == "none":
            raise
        return None
    figures: dict[str, tuple[float, float]] = {}
    pairs = (
        ("allocated", estimate.peak_allocated_bytes, record.peak_allocated_bytes),
        ("reserved", estimate.peak_reserved_bytes, record.peak_reserved_bytes),
        ("device", estimate.device_total_bytes, record.device_bytes),
    )
    graphs = record.setting.compile in GRAPH_MODES
    for quantity, predicted, measured in pairs:
        if measured and not (graphs and quantity == "allocated"):
            figures[quantity] = (float(predicted), float(measured))
    if estimate.throughput and record.step_seconds and not record.device.emulated:
        figures["step time"] = (estimate.throughput.step_seconds, median(record.step_seconds))
    return Comparison(record, estimate, figures)


def estimate_of(record: MeasurementRecord) -> Estimate:
    """What the planner says of a record's model and setting on the record's device, with the torch
    and the allocator's options that it ran with."""
    model, setting = resolve(record.model, record.setting)
    with as_of(record.versions.get("torch", "")):
        target = Target(gpu_of(record), allocator=recorded_allocator(record.versions))
        ledger = step_ledger(model, setting)
        return estimate_ledger(record.model, record.setting, ledger, target, allow_retries=True)


def predicted_step(record: MeasurementRecord, rates: DeviceRates) -> Throughput:
    """A record's step by `rates`, with the torch that it ran with."""
    with as_of(record.versions["torch"]):
        model, setting = resolve(record.model, record.setting)
        return step_time(step_ledger(model, setting), setting, rates)


def is_modelled(record: MeasurementRecord) -> bool:
    """Whether an estimate can be made for what the record was measured under."""
    try:
        recorded_allocator(record.versions)
    except PlannerError:
        return False
    return True


def gpu_of(record: MeasurementRecord) -> Gpu | None:
    """The catalogue's entry for the device a record names, if it has one."""
    return recognise_gpu(record.device.name, record.device.total_bytes)


@dataclass(frozen=True)
class Accuracy:
    """How far predictions are off over `count` rows, as shares."""

    count: int
    median: float
    worst: float


def accuracy(comparisons: Sequence[Comparison], quantity: str) -> Accuracy | None:
    """How far predictions of `quantity` are off, or None where none was measured."""
    return accuracy_of([e for c in comparisons if (e := c.error(quantity)) is not None])


def accuracy_of(errors: Sequence[float]) -> Accuracy | None:
    """Of signed errors; None where there is none."""
    sizes = [abs(error) for error in errors]
    return Accuracy(len(sizes), median(sizes), max(sizes)) if sizes else None
