"""The planner's strategy for loaders: twice the workers while that is faster, then what lies beside
the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from planner.core.schema.loading import LoaderRecord, LoaderSetting, Pipeline
from search.loop.space import Candidate, Space
from search.loop.strategies.strategy import Choice, Situation, Strategy

# Of all settings, that are probed at most. Three at least: a start, a step, and what it gained.
MOST_SHARE, LEAST_PROBES = 1 / 3, 3
_AXES = ("pipeline", "workers", "prefetch_factor", "pin_memory")
LoaderCandidate = Candidate[LoaderSetting]
LoaderChoice = Choice[LoaderSetting]


class LoaderStrategy:
    """The first pipeline that runs with 0, 1, 2, 4 … workers, until twice as many gain less than
    the share `tolerance`; then every neighbour of the fastest setting so far: the other pipelines,
    and the next number of workers, of batches ahead and of pinning, up and down. It ends when these
    are all probed, or a third of all settings and each pipeline."""

    def __init__(self, space: Space[LoaderSetting], tolerance: float) -> None:
        self.space, self.tolerance = space, tolerance
        self.records: dict[str, list[LoaderRecord]] = {}
        self.stopped_because = ""

    def tell(self, candidate: LoaderCandidate, record: LoaderRecord) -> None:
        if not record.inconclusive:
            self.records.setdefault(candidate.id, []).append(record)

    def ask(self, situation: Situation) -> LoaderChoice | None:
        """The first step of the walk that is not probed and may be: the walk begins anew each time,
        so that others' probes, and those of earlier runs, are steps of it too."""
        records = [record for of_one in self.records.values() for record in of_one]
        rates = [record.images_per_second for record in records if record.images_per_second]
        probed, allowed = len(self.records), max(LEAST_PROBES, int(MOST_SHARE * len(self.space)))
        for candidate in self._walk():
            if candidate.id in self.records or candidate.id in situation.busy:
                continue
            if candidate.setting.workers > most_workers(records, candidate.setting.pipeline):
                continue
            is_known = any(r.setting.pipeline == candidate.setting.pipeline for r in records)
            if is_known and probed >= allowed:
                self.stopped_because = f"{probed} of {len(self.space)} loaders are probed"
                return None
            left, quickest = situation.seconds_left, self._quickest(records)
            if left is not None and quickest is not None and left < quickest:
                self.stopped_because = "the quickest probe takes longer than the budget has left"
                return None
            return Choice(candidate, "search", expected_rate=min(rates, default=None))
        self.stopped_because = (
            "all loaders beside the fastest are probed"
            if rates
            else "none ran, and more workers would load the same items"
        )
        return None

    @staticmethod
    def _quickest(records: Sequence[LoaderRecord]) -> float | None:
        """Seconds of the quickest probe that ran."""
        return min((r.probe_seconds for r in records if r.status == "measured"), default=None)

    def _walk(self) -> Iterator[LoaderCandidate]:
        for pipeline in self.space.choices["pipeline"]:
            yield from self._double(pipeline)
            if self._rate(self._fastest()):
                break
        for axis in _AXES:
            yield from self._beside(self._fastest(), axis)

    def _double(self, pipeline: object) -> Iterator[LoaderCandidate]:
        fastest, last = 0.0, 0
        for workers in self.space.rungs:
            if workers < 2 * last:
                continue
            candidate = self._like(self.space.candidates[0], pipeline=pipeline, workers=workers)
            yield candidate
            rate = self._rate(candidate)
            # One worker does no more than the process itself, which then waits.
            if workers > 1 and rate <= fastest * (1 + self.tolerance):
                return
            fastest, last = max(fastest, rate), workers

    def _beside(self, center: LoaderCandidate, axis: str) -> Iterator[LoaderCandidate]:
        values = self.space.rungs if axis == "workers" else self.space.choices[axis]
        if axis in ("workers", "prefetch_factor"):
            at = values.index(getattr(center.setting, axis))
            values = (*values[at + 1 : at + 2], *values[max(at - 1, 0) : at])
        for value in values:
            yield self._like(center, **{axis: value})

    def _like(self, center: LoaderCandidate, **fields: object) -> LoaderCandidate:
        """The plainest of those with these fields that share most of the others with `center`."""
        wanted = center.setting.model_copy(update=fields)

        def likeness(candidate: LoaderCandidate) -> tuple[int, ...]:
            same = [getattr(candidate.setting, axis) == getattr(wanted, axis) for axis in _AXES]
            return sum(same[_AXES.index(name)] for name in fields), sum(same)

        return max(self.space.candidates, key=likeness)

    def _fastest(self) -> LoaderCandidate:
        return max(self.space.candidates, key=self._rate)

    def _rate(self, candidate: LoaderCandidate) -> float:
        """The mean of its probes; 0 where none ran."""
        ran = [r.images_per_second or 0.0 for r in self.records.get(candidate.id, ())]
        return sum(ran) / len(ran) if ran else 0.0


class SkipUnsupported:
    """A strategy that does not learn across settings, kept from a pipeline that cannot run here:
    what one of its loaders said is told of all of them."""

    def __init__(
        self, strategy: Strategy[LoaderSetting, LoaderRecord], space: Space[LoaderSetting]
    ) -> None:
        self.strategy, self.space = strategy, space

    @property
    def stopped_because(self) -> str:
        return self.strategy.stopped_because

    def tell(self, candidate: LoaderCandidate, record: LoaderRecord) -> None:
        alike = [candidate]
        if record.status == "unsupported":
            alike = [c for c in self.space.candidates if c.arm == candidate.arm]
        for each in alike:
            self.strategy.tell(each, record)

    def ask(self, situation: Situation) -> LoaderChoice | None:
        return self.strategy.ask(situation)


def most_workers(records: Sequence[LoaderRecord], pipeline: Pipeline) -> float:
    """With how many workers a pipeline may be probed: where some failed, as many as ran, or half
    way from there to the fewest that failed. A loader that crashed once is not pushed further."""
    own = [r for r in records if r.setting.pipeline == pipeline]
    failed = min((r.setting.workers for r in own if r.status != "measured"), default=None)
    if failed is None:
        return inf
    ran = [r.setting.workers for r in own if r.status == "measured" and r.setting.workers < failed]
    return (max(ran) + failed) // 2 if ran else -1
