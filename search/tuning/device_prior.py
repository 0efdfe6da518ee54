"""The prior of a search on a device: estimated where the model can be, else a generic guess."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

from pydantic import TypeAdapter

from planner.core.schema import DeviceInfo, Model
from planner.estimation.device_estimator import DeviceEstimator
from planner.estimation.ledgers import is_on_shapes
from planner.ledger import cache
from planner.ledger.cache import Key, own_digest
from planner.memory.allocator_config import AllocatorConfig
from search.loop.search import PROBES_SHARE
from search.loop.space import Space
from search.loop.surrogate.prior import Estimator, Prior, estimated_prior, generic_prior

# Of the time left, that recording a model may take before the first probe: a judgement. A recorded
# step took 0.2 to 1 s, at three batches each (models of timm, torch 2.14, 2026-11-29).
RECORDING_SHARE = 0.25
# But so many seconds, up to half of the time left: an import of torch and one recorded step of a
# small model took 7 to 12 s on two busy cores (torch 2.14, 2026-11-26).
LEAST_SECONDS = 15.0
_PRIOR = TypeAdapter(Prior)


def device_prior(
    space: Space, model: Model, device: DeviceInfo, estimator: Estimator | Literal["auto"] | None,
    *, allocator: AllocatorConfig | None = None, seconds_left: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Prior, list[str]]:  # fmt: skip
    """The prior, and what is to be said of it where there is no estimate.

    "auto" estimates by the catalogue's rates, with the caching allocator's options that probes run
    with. A model that is no Swin of ours is recorded for it, in another process and
    within a share of `seconds_left`; what was recorded before is read from the cache.
    """
    if estimator is None:
        return generic_prior(space, device), []
    if estimator != "auto":
        return estimated_prior(space, model, device, estimator), []
    estimator = DeviceEstimator(device, allocator)
    limit = None if seconds_left is None else recording_seconds(seconds_left)
    why = estimator.record(model, [c.setting for c in space.candidates], limit, say)
    if why:
        first = why.partition("\n")[0].rstrip(".")
        note = f"There is no estimate of {model.title} before the first probe: {first}."
        say(note)
        return generic_prior(space, device), [note]
    if any(
        not is_on_shapes(model, c.setting) or c.setting.world_size > 1 for c in space.candidates
    ):  # it rests on what could be recorded in the time there was
        return estimated_prior(space, model, device, estimator), []
    key = _key(space, model, device, allocator)
    if isinstance(kept := cache.load(key), dict):
        return _PRIOR.validate_python(kept), []
    prior = estimated_prior(space, model, device, estimator)
    cache.store(key, _PRIOR.dump_python(prior, mode="json"))
    return prior, []


def _key(space: Space, model: Model, device: DeviceInfo, allocator: AllocatorConfig | None) -> Key:
    """What decides a prior."""
    ids = ",".join(c.id for c in space.candidates)
    return {
        "title": f"{model.title} on {device.name}, before probes",
        "model": model.model_dump(mode="json"),
        "device": device.model_dump(mode="json", exclude={"uuid"}),
        "settings": hashlib.sha256(ids.encode()).hexdigest(),
        "allocator": repr(allocator),
        "source": own_digest((".", "../search/loop")),
    }


def recording_seconds(seconds_left: float) -> float:
    """What recording may take of them."""
    least = min(LEAST_SECONDS, PROBES_SHARE * seconds_left)
    return max(RECORDING_SHARE * seconds_left, least)
