"""The planner's strategy for loaders: one process first, then what is expected to gain most."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from planner.schema.expected import Expected
from planner.schema.loading import LoaderRecord, LoaderSetting, Pipeline
from search.loader.law import ASSUMED_IMAGE_SECONDS, ImageCost, expected_rate
from search.loader.posterior import Posterior, draw_unknowns
from search.space import Candidate, Space
from search.strategies.strategy import Choice, Phase, Situation, Strategy

LEAST_PROBES = 3  # that ended well, before a search may end: a start, a step, and what it gained

# Of all settings, that are probed at most: what no third of them shows, no probe more would.
MOST_SHARE = 1 / 3
LoaderCandidate = Candidate[LoaderSetting]
LoaderChoice = Choice[LoaderSetting]


class LoaderStrategy:
    """Every pipeline without workers, which says what one image costs in it; then, by the law and
    all probes so far, the setting with the largest expected gain over the best, until none is
    expected to gain `tolerance` of it and the next larger number of workers of the best is known.
    Of settings that should gain alike, the plainest."""

    def __init__(
        self, space: Space[LoaderSetting], cpus: float, tolerance: float, seed: int = 0
    ) -> None:
        self.space, self.cpus, self.tolerance = space, cpus, tolerance
        self.candidates = space.candidates
        self.unknowns = draw_unknowns(len(space), seed)
        self.records: dict[str, list[LoaderRecord]] = {}
        self.stopped_because = ""

    def tell(self, candidate: LoaderCandidate, record: LoaderRecord) -> None:
        if not record.inconclusive:
            self.records.setdefault(candidate.id, []).append(record)

    def ask(self, situation: Situation) -> LoaderChoice | None:
        able = self._able(situation)
        if not able:
            self.stopped_because = "every setting that can run is probed"
            return None
        start = self._unknown_pipeline(able)
        if start is not None:
            return self._unknown(start)
        if len(self.records) >= max(LEAST_PROBES, int(MOST_SHARE * len(self.space))):
            self.stopped_because = f"{len(self.records)} of {len(self.space)} settings are probed"
            return None
        posterior = Posterior(self.space, self.cpus, self.unknowns, self._all())
        measured = [r.images_per_second for r in self._all() if r.images_per_second]
        best = max(measured, default=min(posterior.expected()))
        gains = posterior.gains(best)
        at = {c.id: i for i, c in enumerate(self.space.candidates)}
        choice = max(able, key=lambda c: (round(gains[at[c.id]], 3), -at[c.id]))
        if gains[at[choice.id]] < self.tolerance and len(measured) >= LEAST_PROBES:
            more = self._next_of_best(able)
            if more is not None:
                return self._expecting(posterior, at[more.id], "finalists")
            self.stopped_because = (
                f"no other setting is expected to gain {self.tolerance:.1%} or more"
            )
            return None
        return self._expecting(posterior, at[choice.id], "search")

    def _unknown(self, candidate: LoaderCandidate) -> LoaderChoice:
        """The first of its pipeline, of which only a guess is known."""
        guess = ImageCost(ASSUMED_IMAGE_SECONDS, ASSUMED_IMAGE_SECONDS)
        rate = expected_rate(candidate.setting, guess, self.cpus)
        return Choice(candidate, "calibrate", expected_rate=rate)

    def _expecting(self, posterior: Posterior, index: int, phase: Phase) -> LoaderChoice:
        rates = posterior.range_of(index)
        expected = Expected(phase=phase, basis="probes", images_per_second=rates)
        rate = float(posterior.expected()[index])
        return Choice(self.candidates[index], phase, expected_rate=rate, expected=expected)

    def _next_of_best(self, able: list[LoaderCandidate]) -> LoaderCandidate | None:
        """The best with the next larger number of workers, where it was not probed: a curve that
        still rises ends no search."""
        ran = [r for r in self._all() if r.images_per_second]
        best = max(ran, key=lambda r: r.images_per_second or 0.0).setting
        same = [
            c
            for c in able
            if c.setting.workers > best.workers
            and c.setting.model_copy(update={"workers": best.workers}) == best
        ]
        wanted = next((n for n in self.space.rungs if n > best.workers), None)
        return next((c for c in same if c.setting.workers == wanted), None)

    def _all(self) -> list[LoaderRecord]:
        return [record for records in self.records.values() for record in records]

    def _unknown_pipeline(self, able: list[LoaderCandidate]) -> LoaderCandidate | None:
        """The plainest setting of a pipeline of which nothing is measured."""
        known = {r.setting.pipeline for r in self._all() if r.status == "measured"}
        return next((c for c in able if c.setting.pipeline not in known), None)

    def _able(self, situation: Situation) -> list[LoaderCandidate]:
        """What is not probed, and not ruled out by a failure in its pipeline."""
        records = self._all()
        most = {p: most_workers(records, p) for p in {c.setting.pipeline for c in self.candidates}}
        return [
            c
            for c in self.candidates
            if c.id not in self.records
            and c.id not in situation.busy
            and c.setting.workers <= most[c.setting.pipeline]
        ]


class SkipUnsupported:
    """A strategy that does not learn across settings, kept from a pipeline that cannot run here:
    what one of its loaders said is told of all of them."""

    def __init__(
        self, strategy: Strategy[LoaderSetting, LoaderRecord], space: Space[LoaderSetting]
    ) -> None:
        self.strategy, self.space = strategy, space
        self.stopped_because = ""

    def tell(self, candidate: LoaderCandidate, record: LoaderRecord) -> None:
        alike = [candidate]
        if record.status == "unsupported":
            alike = [c for c in self.space.candidates if c.arm == candidate.arm]
        for each in alike:
            self.strategy.tell(each, record)

    def ask(self, situation: Situation) -> LoaderChoice | None:
        choice = self.strategy.ask(situation)
        self.stopped_because = self.strategy.stopped_because
        return choice


def most_workers(records: Sequence[LoaderRecord], pipeline: Pipeline) -> float:
    """With how many workers a pipeline may be probed: where some failed, as many as ran, or half
    way from there to the fewest that failed. A loader that crashed once is not pushed further."""
    own = [r for r in records if r.setting.pipeline == pipeline]
    failed = min((r.setting.workers for r in own if r.status != "measured"), default=None)
    if failed is None:
        return inf
    ran = [r.setting.workers for r in own if r.status == "measured" and r.setting.workers < failed]
    return (max(ran) + failed) // 2 if ran else -1
