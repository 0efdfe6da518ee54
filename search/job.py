"""A search from its first probe to its recommendation, on a device or over a replay."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.errors import PlannerError
from planner.libraries.registry import find_library
from planner.schema import MeasurementRecord, Model, SwinConfig
from planner.schema.result import Recommendation
from planner.units import format_seconds
from search.interrupts import ending, hold
from search.options import SearchOptions
from search.result.exclusions import find_excluded
from search.result.recommend import Search, recommend
from search.session import Book, Limits, OnProgress, Prober, Progress, Session
from search.space import Space
from search.strategies.plain_default import PlainDefaultHunt, plain_arm
from search.strategies.planner_strategy import PlannerStrategy
from search.strategies.strategy import Choice, Strategy
from search.strategies.walks import WALKS, WalkStrategy
from search.study.records import RecordsNotWrittenError, append_records
from search.study.study import Identity, Study
from search.surrogate.prior import Prior
from search.surrogate.probe_cost import ProbeCosts

BASELINE_SHARE = 0.15  # of the budget, kept to measure what the gain is over
# A probe that takes longer than all of this is hung: imports and building took under a minute on
# the slowest machine seen, compiling five times its guess.
START_SECONDS = 120.0
TIMING_SECONDS = 60.0
STEPS_TO_WAIT = 8  # two of warm-up, three timed, and some for a guess that is too low


@dataclass
class Job:
    """All that a search is about, put together: run it, get its recommendation."""

    identity: Identity
    space: Space
    prior: Prior
    budget_bytes: int | None
    options: SearchOptions
    notes: list[str]

    def run(
        self, book: Book, prober: Prober, limits: Limits, on_progress: OnProgress
    ) -> Recommendation:
        """Searches, measures the plain default, and recommends. Ctrl-C ends it early, and so does
        a disk that is full: what was measured until then counts."""
        session = Session(
            self.space, book, prober, limits, self._deadline, self.budget_bytes, on_progress
        )
        on_progress(Progress("note", f"{len(self.space)} settings; {self.prior.basis}."))
        arm = plain_arm(self.space, library_attention(self.identity.model))
        wants_baseline = arm is not None and self.options.baseline
        try:
            if wants_baseline and self.options.budget_seconds:
                limits.reserved_seconds = BASELINE_SHARE * self.options.budget_seconds
            stopped = session.run(self._strategy())
            limits.reserved_seconds = 0.0
            if arm and wants_baseline and session.best_rate():
                session.run(PlainDefaultHunt(self.space, self.prior, self.budget_bytes, arm))
            hold()
        except KeyboardInterrupt:
            stopped = ending()
            self._save(book, session)
        except PlannerError as error:
            if not session.records:
                raise
            stopped = "what was measured could not be kept"
            if not isinstance(error, RecordsNotWrittenError):
                stopped = error.message
            self.notes.append(str(error))
        hold()
        records = session.in_space()
        search = self._search(records, arm, stopped)
        used_up = limits.trials is not None and len(session.records) >= limits.trials
        return recommend(
            records, replace(search, trials_used=len(session.records) if used_up else None)
        )

    def _save(self, book: Book, session: Session) -> None:
        """An interrupt may have come between a probe's end and its line on disk."""
        try:
            session.hear()
            if isinstance(book, Study) and book.records_path:
                append_records(book.records_path, session.records)
        except PlannerError as error:
            self.notes.append(str(error))

    def _search(self, records: list[MeasurementRecord], arm: str | None, stopped: str) -> Search:
        return Search(
            model=self.identity.model,
            device=self.identity.device,
            versions=self.identity.versions,
            budget_bytes=self.budget_bytes,
            asked=self.options.asked,
            plain_arm=arm or "",
            images=self.options.images,
            num_candidates=len(self.space),
            stopped_because=stopped,
            ruled_out=find_excluded(self.space, self.prior, self.budget_bytes, records),
            notes=(*self.notes, *self._untried_note(records, stopped), *self._baseline_note(arm)),
        )

    def _untried_note(self, records: list[MeasurementRecord], stopped: str) -> list[str]:
        """The compile modes that the budget ended before, and how long each takes."""
        if self.options.strategy != "planner" or "budget" not in stopped:
            return []
        ends = {r.status for r in records if r.setting.compile != "off"}
        if ends and "measured" not in ends:
            return []  # no compiler here, as far as was seen
        costs = ProbeCosts(self.space, self.prior.compile_seconds)
        for record in records:
            costs.observe(record)
        tried = {"off", *(r.setting.compile for r in records)}
        modes = [m for m in self.space.choices["compile"] if m not in tried]
        waits = [f"{m} (about {format_seconds(costs.compile_seconds(m))})" for m in modes]
        if not waits:
            return []
        return [
            f"Not tried, as compiling takes long and the budget ended: {', '.join(waits)}. "
            "A longer --budget may find more."
        ]

    def _baseline_note(self, arm: str | None) -> list[str]:
        if arm is None and self.options.baseline:
            return [
                "The plain default (fp32, eager, no checkpointing) was excluded, so no gain can be "
                "given."
            ]
        return []

    def _strategy(self) -> Strategy:
        name = self.options.strategy
        if name == "planner":
            return PlannerStrategy(
                self.space, self.prior, self.budget_bytes,
                tolerance=self.options.tolerance, images=self.options.images,
            )  # fmt: skip
        if name in WALKS:
            walk = WALKS[name](self.space, self.prior, self.budget_bytes, self.options.seed)
            return WalkStrategy(walk)
        from search.strategies.optuna_samplers import SamplerStrategy, make_sampler

        sampler = make_sampler(name, self.options.seed)
        return SamplerStrategy(self.space, sampler, self.budget_bytes)

    def _deadline(self, choice: Choice) -> float:
        """Seconds after which a probe is hung and not slow."""
        compiling = 5 * self.prior.compile_seconds[choice.candidate.setting.compile]
        rate = choice.expected_rate
        stepping = STEPS_TO_WAIT * choice.candidate.images / rate if rate else 0.0
        return START_SECONDS + TIMING_SECONDS + compiling + 2 * min(stepping, 3600.0)


def library_attention(model: Model) -> str | None:
    """The attention a library has by itself on CUDA, for the plain default; None for a factory."""
    if not isinstance(model, SwinConfig):
        return None
    return find_library(model.library).default_attention(model)
