"""Which settings were not worth a probe, and why: said for each arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp

from planner.core.errors import alternatives
from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import Excluded
from planner.core.units import format_bytes
from search.loop.space import candidate
from search.loop.strategies.planner_strategy import INFEASIBLE
from search.loop.surrogate.broken_parts import shared_parts
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import GUESSED_BYTES


def find_excluded(
    posterior: Posterior, records: Sequence[MeasurementRecord]
) -> tuple[Excluded, ...]:
    """Per arm the smallest batch that was not worth a probe, and why; larger ones go with it. The
    posterior was told of `records`."""
    space, budget_bytes = posterior.space, posterior.budget_bytes
    if budget_bytes is None:
        return ()
    predicted = posterior.predict()
    failed = _failed_arms(records, budget_bytes)
    found: dict[str, Excluded] = {}
    order = sorted(range(len(space)), key=lambda i: space.candidates[i].setting.batch_size)
    for i in order:
        c = space.candidates[i]
        fits = predicted.fits[i] > INFEASIBLE
        worth_it = fits and not predicted.excluded[i]
        if c.arm in found or i in posterior.records or worth_it:
            continue
        need = int(exp(min(predicted.log_bytes[i], 40.0)))
        found[c.arm] = Excluded(
            setting=c.setting,
            predicted_bytes=need,
            reason=failed.get(c.arm)
            or (_broken(c.setting, records) if fits else _over(need, posterior)),
        )
    return tuple(found.values())


def _over(need: int, posterior: Posterior) -> str:
    guess = "a guess of " if posterior.prior.bytes_scales == GUESSED_BYTES else ""
    budget = format_bytes(posterior.budget_bytes or 0)
    return f"{guess}about {format_bytes(need)} is over the {budget} allowed"


def _broken(setting: TrainSetting, records: Sequence[MeasurementRecord]) -> str:
    """What `setting` shares with most of the probes that failed, and with none that ran."""
    ran = {p for r in records if r.status == "measured" for p in shared_parts(r.setting)}
    shares = shared_parts(setting)
    failures = ("unsupported", "crashed", "non_finite")
    ends = [r for r in records if r.status in failures and not r.inconclusive]
    suspects = set(shares) - ran
    failed = Counter(p for r in ends for p in suspects.intersection(shared_parts(r.setting)))
    most = max(failed.values())
    parts = [p for p in shares if failed[p] == most]
    shown = alternatives("the compiler" if p == "compiler" else p for p in parts)
    count = "1 probe" if most == 1 else f"{most} probes"
    return f"unlikely to run, as {count} with {shown} failed"


def _failed_arms(records: Sequence[MeasurementRecord], budget_bytes: int) -> dict[str, str]:
    """Why larger batches of an arm were not tried, where a probe said so."""
    said = {}
    for record in records:
        if record.inconclusive:
            continue
        num_bytes = record.used_bytes or 0
        arm = candidate(record.setting).arm
        batch = record.setting.batch_size
        if record.status != "measured":
            said[arm] = f"batch {batch} was probed: {record.status.replace('_', ' ')}"
        elif num_bytes > budget_bytes:
            said[arm] = f"batch {batch} was probed and took {format_bytes(num_bytes)}"
    return said
