"""The prior of a search on a device: estimated where the model can be, else a generic guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from planner.core.schema import DeviceInfo, Model
from planner.estimation.device_estimator import DeviceEstimator
from planner.memory.allocator_config import AllocatorConfig
from planner.throughput.prediction import DeviceRates
from search.loop.limits import PROBES_SHARE
from search.loop.space import Space
from search.loop.surrogate.prior import Estimator, Prior, estimated_prior, generic_prior

# Of the time left, that recording a model may take before the first probe: a judgement. A recorded
# step took 0.2 to 1 s, at three batches each (models of timm, torch 2.14, 2026-11-29).
RECORDING_SHARE = 0.25
# But so many seconds, up to half of the time left: an import of torch and one recorded step of a
# small model took 7 to 12 s on two busy cores (torch 2.14, 2026-11-26).
LEAST_SECONDS = 15.0


def device_prior(
    space: Space, model: Model, device: DeviceInfo, estimator: Estimator | Literal["auto"] | None,
    budget_bytes: int | None, *, rates: DeviceRates | None = None,
    allocator: AllocatorConfig | None = None, seconds_left: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Prior, list[str]]:  # fmt: skip
    """The prior, and what is to be said of it.

    "auto" estimates by `rates`, or by those of the catalogue, with the caching allocator's options
    that probes run with. A model that is no Swin of ours is recorded for it, in another process and
    within a share of `seconds_left`; what was recorded before is read from the cache.
    """
    if estimator is None:
        return generic_prior(space, device), []
    if estimator == "auto":
        estimator = DeviceEstimator(device, rates, allocator)
        limit = None if seconds_left is None else recording_seconds(seconds_left)
        settings = [c.setting for c in space.candidates]
        why = estimator.record(model, settings, limit, say)
        if why:
            first = why.partition("\n")[0].rstrip(".")
            note = f"There is no estimate of {model.title} before the first probe: {first}."
            say(note)
            return generic_prior(space, device), [note]
    prior = estimated_prior(space, model, device, estimator, budget_bytes)
    notes = _notes_of_stand_ins(estimator) if isinstance(estimator, DeviceEstimator) else []
    for note in notes:
        say(note)
    return prior, notes


def recording_seconds(seconds_left: float) -> float:
    """What recording may take of them."""
    least = min(LEAST_SECONDS, PROBES_SHARE * seconds_left)
    return max(RECORDING_SHARE * seconds_left, least)


def _notes_of_stand_ins(estimator: DeviceEstimator) -> list[str]:
    """A line for each parallelism that was not estimated, or with some checkpointing only."""
    notes = []
    for parallelism in sorted({parallelism for parallelism, _ in estimator.stood_in}):
        lacking = sorted(c for p, c in estimator.stood_in if p == parallelism)
        is_known = any(p == parallelism for p, _ in estimator.estimated)
        where = f" with checkpointing {', '.join(lacking)}" if is_known else ""
        notes.append(
            f"Not estimated before the first probe: what {parallelism} adds to one device's step"
            f"{where}. Settings are probed in the order of that."
        )
    return notes
