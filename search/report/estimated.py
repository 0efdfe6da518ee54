"""What the planner estimates of probes whose records do not say what was expected of them."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import PlannerError
from planner.memory.allocator_config import recorded_allocator
from planner.schema import MeasurementRecord, SwinConfig
from planner.schema.expected import Expected
from search.space import space_of
from search.surrogate.device_prior import device_prior
from search.surrogate.device_rates import kept_rates
from search.surrogate.estimator import DeviceEstimator
from search.surrogate.expectation import PriorExpectation
from search.surrogate.prior import GUESSED_SECONDS

ESTIMATE = "estimate"


def estimated_expectations(
    records: Sequence[MeasurementRecord],
) -> tuple[list[Expected | None], str]:
    """For each record what the estimate of its setting says on its device, and what that rests on;
    nothing where the model or the device is not known. Nothing is traced or measured for it."""
    first = next(iter(records), None)
    if first is None or not isinstance(first.model, SwinConfig):
        return [], ""
    try:
        allocator = recorded_allocator(first.versions)
        rates = kept_rates(first.device)
    except (PlannerError, OSError):
        return [], ""
    estimator = DeviceEstimator(first.device, rates, allocator)
    if first.device.kind == "cuda" and estimator.gpu is None and rates is None:
        return [], ""
    space = space_of(r.setting for r in records)
    prior, _ = device_prior(space, first.model, first.device, estimator, first.allowed_bytes)
    if prior.basis.startswith("no estimate"):
        return [], ""
    expect = PriorExpectation(space, prior, first.allowed_bytes)
    found = [
        expect(space.candidates[at], ESTIMATE)
        if r.model == first.model and (at := space.index(r.setting)) is not None
        else None
        for r in records
    ]
    if prior.seconds_scales == GUESSED_SECONDS:  # of the time nothing is known but its shape
        found = [e and e.model_copy(update={"images_per_second": None}) for e in found]
    return found, prior.basis
