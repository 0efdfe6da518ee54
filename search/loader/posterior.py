"""What is expected of every loader after the probes.

The law of `law.py` with what it does not know drawn many times: each draw is a machine. Beside it
the law itself is off, by a Gaussian process that is alike for settings with nearly as many workers.
Each draw is weighed by how well it foretells the measurements, and corrected by what they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.schema.expected import Range
from planner.schema.loading import LoaderRecord, LoaderSetting
from search.loader.law import (
    ASSUMED_IMAGE_SECONDS,
    Ceilings,
    Floats,
    ImageCost,
    image_cost,
    main_seconds,
    rate_with_workers,
    stages_seconds,
)
from search.space import Space

NUM_DRAWS = 2048
NOISE = 0.015  # of a probe's rate, as a share: two probes on a calm machine differ by about this
PARTS = 4  # of a probe, in order: what they differ by says how calm the machine is
# How far the law is off, as shares, where a number of workers differs by much (of all pipelines,
# and of one), where the prefetch does, and where memory is pinned: judgements.
OFF_BY_WORKERS, OFF_BY_PIPELINE, OFF_BY_PREFETCH, OFF_BY_PINNING = 0.04, 0.12, 0.015, 0.02
DOUBLINGS = 1.0  # of workers, over which the law is off alike


@dataclass(frozen=True)
class Unknowns:
    """Draws of what the law does not know; shapes [draws]. Widths are judgements.

    `slowdown` of a worker against a process by itself; `efficiency` of processors that share cores
    and caches; `disk` against what the processors would do, without end in most draws; `main`
    against what is assumed of it; `own_errors` [candidates, draws] is standard normal.
    """

    slowdown: Floats
    efficiency: Floats
    disk: Floats
    main: Floats
    crowding: Floats
    sharpness: Floats
    own_errors: Floats


def draw_unknowns(num_candidates: int, seed: int) -> Unknowns:
    random, count = np.random.default_rng(seed), NUM_DRAWS
    has_disk = random.random(count) < 0.4
    return Unknowns(
        slowdown=np.exp(random.normal(0.05, 0.1, count)),
        efficiency=np.exp(np.minimum(random.normal(-0.15, 0.25, count), 0.1)),
        disk=np.where(has_disk, np.exp(random.uniform(np.log(0.05), np.log(2.0), count)), np.inf),
        main=np.exp(random.normal(0.0, 1.2, count)),
        crowding=np.abs(random.normal(0.0, 0.1, count)),
        sharpness=random.uniform(3.0, 16.0, count),
        own_errors=random.standard_normal((num_candidates, count)),
    )


class Posterior:
    """Rates of all candidates in every draw [candidates, draws], and the weights of the draws."""

    def __init__(
        self, space: Space[LoaderSetting], cpus: float, unknowns: Unknowns,
        records: Sequence[LoaderRecord],
    ) -> None:  # fmt: skip
        measured = [r for r in records if r.status == "measured" and r.images_per_second]
        settings = [c.setting for c in space.candidates]
        logs = _law_logs(settings, cpus, unknowns, known_costs(measured))
        at = [i for r in measured if (i := space.index(r.setting)) is not None]
        seen = np.log([r.images_per_second or 1.0 for r in measured if space.find(r.setting)])
        covariance = _covariance(settings, settings)
        if at:
            own = covariance[np.ix_(at, at)] + noise_of(measured) ** 2 * np.eye(len(at))
            reach = np.linalg.solve(own, covariance[at]).T
            misfit = seen[:, None] - logs[at]
            fit = -0.5 * (misfit * np.linalg.solve(own, misfit)).sum(axis=0)
            self.weights: Floats = np.exp(fit - fit.max())
            logs = logs + reach @ misfit
            left = np.diag(covariance) - (reach * covariance[:, at]).sum(axis=1)
        else:
            self.weights = np.ones(len(unknowns.main))
            left = np.diag(covariance)
        self.weights = self.weights / self.weights.sum()
        deviation = np.sqrt(np.maximum(left, 0.0))
        self.logs = logs
        self.rates: Floats = np.exp(logs + deviation[:, None] * unknowns.own_errors)

    def expected(self) -> Floats:
        """Images/s of every candidate, as expected."""
        found: Floats = np.exp(self.logs @ self.weights)
        return found

    def range_of(self, index: int) -> Range:
        """(low, middle, high) images/s that a probe of a candidate should find, its noise included;
        95% lies between the first and the last."""
        order = np.argsort(self.rates[index])
        below = np.cumsum(self.weights[order])
        at = np.minimum(np.searchsorted(below, (0.025, 0.5, 0.975)), len(order) - 1)
        noise = np.exp(np.array([-2.0, 0.0, 2.0]) * NOISE)
        rates = self.rates[index][order][at] * noise
        low, middle, high = (float(f"{rate:.6g}") for rate in rates)
        return low, middle, high

    def gains(self, best: float) -> Floats:
        """How much every candidate is expected to gain over `best` images/s, as a share of it."""
        found: Floats = np.maximum(self.rates / best - 1, 0.0) @ self.weights
        return found


def noise_of(measured: Sequence[LoaderRecord]) -> float:
    """How far a probe's rate is off, as a share: by what the parts of all probes differ within
    each (the error of a mean of batches that follow one another, as of independent parts)."""
    spreads = [_spread(r.batch_seconds) for r in measured if len(r.batch_seconds) >= 2 * PARTS]
    mean = sum(spreads) / len(spreads) if spreads else 0.0
    return float(np.sqrt(NOISE**2 + mean / PARTS))


def _spread(samples: Sequence[float]) -> float:
    """The variance between the logarithms of the medians of a probe's parts."""
    parts = np.array_split(np.log(samples), PARTS)
    return float(np.var([np.median(part) for part in parts], ddof=1))


def _law_logs(
    settings: Sequence[LoaderSetting], cpus: float, u: Unknowns, costs: dict[str, ImageCost]
) -> Floats:
    """The logarithm of the law's rate of every setting in every draw; the law knows no prefetch."""
    guess = ImageCost(ASSUMED_IMAGE_SECONDS, ASSUMED_IMAGE_SECONDS)
    fastest = min((c.cpu_seconds for c in costs.values()), default=ASSUMED_IMAGE_SECONDS)
    known: dict[tuple[object, ...], Floats] = {}
    for setting in settings:
        key = (setting.pipeline, setting.workers, setting.pin_memory)
        if key in known:
            continue
        cost = costs.get(setting.pipeline, guess)
        if setting.workers == 0:
            known[key] = np.full_like(u.main, -np.log(cost.seconds))
            continue
        ceilings = Ceilings(
            processors=u.efficiency * cpus / cost.cpu_seconds,
            main=1 / (main_seconds(setting) * u.main),
            disk=u.disk * cpus / fastest, crowding=u.crowding, sharpness=u.sharpness,
        )  # fmt: skip
        seconds = cost.seconds * u.slowdown
        known[key] = np.log(rate_with_workers(setting.workers, seconds, cpus, ceilings))
    return np.stack([known[s.pipeline, s.workers, s.pin_memory] for s in settings])


def _covariance(ours: Sequence[LoaderSetting], others: Sequence[LoaderSetting]) -> Floats:
    """Of how far the law is off, in the logarithm, between settings; [ours, others]."""

    def column(name: str, settings: Sequence[LoaderSetting]) -> Floats:
        return np.array([float(getattr(s, name) or 0) for s in settings])

    def apart(name: str) -> Floats:
        """In doublings."""
        a, b = (np.log2(1 + column(name, settings)) for settings in (ours, others))
        found: Floats = a[:, None] - b[None, :]
        return found

    near = np.exp(-0.5 * (apart("workers") / DOUBLINGS) ** 2)
    codes = {p: i for i, p in enumerate(dict.fromkeys(s.pipeline for s in (*ours, *others)))}
    a, b = (np.array([codes[s.pipeline] for s in settings]) for settings in (ours, others))
    same = a[:, None] == b[None, :]
    found: Floats = (
        OFF_BY_WORKERS**2 * near
        + OFF_BY_PIPELINE**2 * near * same
        + OFF_BY_PREFETCH**2 * np.exp(-np.abs(apart("prefetch_factor")))
        + OFF_BY_PINNING**2 * np.exp(-np.abs(apart("pin_memory")) * 10)
    )
    return found


def known_costs(measured: Sequence[LoaderRecord]) -> dict[str, ImageCost]:
    """What one image costs in each pipeline: by its probe without workers, else by what its
    stages took in one process, else by the processor time of any of its probes."""
    found: dict[str, ImageCost] = {}
    for record in sorted(measured, key=lambda r: r.setting.workers, reverse=True):
        if record.setting.workers == 0:
            found[record.setting.pipeline] = image_cost(record)
            continue
        stages = stages_seconds(record)
        cpu = record.cpu_seconds_per_image or stages
        if cpu:
            found[record.setting.pipeline] = ImageCost(max(stages, cpu), cpu)
    return found
