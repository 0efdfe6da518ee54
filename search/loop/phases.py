"""A search: the strategy's probes and those of the plain default, and what they prove."""

from __future__ import annotations

from functools import partial

from planner.core.schema import MeasurementRecord, Model, SwinConfig
from planner.core.schema.record import Recommendation
from planner.libraries.registry import find_library
from search.loop.options import SearchOptions
from search.loop.request import kept_options
from search.loop.result.exclusions import find_excluded
from search.loop.result.notes import plain_default_note, untried_note
from search.loop.result.recommend import recommend
from search.loop.result.summary import Summary
from search.loop.session import Session
from search.loop.space import Candidate, candidate
from search.loop.strategies.in_order import StartingWith
from search.loop.strategies.named import make_strategy
from search.loop.strategies.plain_default import (
    PlainDefaultHunt,
    WithPlainDefault,
    arm_candidates,
    plain_arm,
)
from search.loop.study.identity import Identity
from search.loop.surrogate.expectation import expectation
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import Prior

PLAIN_DEFAULT_SHARE = 0.15  # of the budget, at most kept to measure what the gain is over
# With four busy programs on two cores a step of Swin-T took 8 to 14 s at batch 8, and its five
# steps all that was left of a minute (torch 2.13, 2026-11-25).
HASTY_SECONDS = 90.0


def search_and_recommend(
    session: Session, identity: Identity, prior: Prior, options: SearchOptions, notes: list[str]
) -> Recommendation:
    """Searches, measures the plain default, and recommends. Ctrl-C ends it early, and so does a
    disk that is full: what was measured until then counts."""
    session.note(f"{len(session.space)} settings; {prior.basis}.")
    arm = plain_arm(session.space, library_attention(identity.model))
    posterior = Posterior(session.space, prior, session.budget_bytes, options.images)
    session.expect, session.listen = partial(expectation, posterior), posterior.tell
    first = session.space.first or _hasty_first(session, identity, posterior, arm)
    stopped, said = session.run_to_end(lambda: _probe(session, posterior, options, arm, first))
    notes = [*notes, *said]
    records = session.in_space()
    # Told of them anew, with what others of the study found, in the order that is all tuners'.
    posterior = Posterior(session.space, prior, session.budget_bytes, options.images)
    for record in records:
        posterior.tell(candidate(record.setting), record)
    notes += untried_note(records, posterior, options, stopped)
    notes += plain_default_note(arm, options)
    found = recommend(records, _summary(session, identity, posterior, options, arm, stopped, notes))
    return found.model_copy(update={"asked": kept_options(options)})


def _hasty_first(
    session: Session, identity: Identity, posterior: Posterior, arm: str | None
) -> Candidate | None:
    """What is surest to be measured where a new search has little time on a device of which nobody
    knows how fast it is now: the smallest batch of the plain default, for the gain to be over."""
    is_known = identity.device.kind == "cuda" and not posterior.time_is_guessed
    left = session.limits.seconds_left()
    if left is None or left >= HASTY_SECONDS or is_known or session.limits.spent_seconds:
        return None
    ladder = arm_candidates(session.space, arm or session.space.candidates[0].arm)
    least = 1 if isinstance(identity.model, SwinConfig) else 2  # batch norm may refuse one image
    return next((c for c in ladder if c.setting.batch_size >= least), ladder[0])


def _probe(
    session: Session, posterior: Posterior, options: SearchOptions, arm: str | None,
    first: Candidate | None,
) -> str:  # fmt: skip
    """The strategy's probes after the `first`, and those of the plain default. Returns why the
    strategy's ended."""
    own = make_strategy(options.strategy, posterior, options.tolerance, options.seed)
    if first is not None:
        own = StartingWith(first, own)
    if arm is None or not options.baseline:
        return session.run(own)
    kept = PLAIN_DEFAULT_SHARE * (options.budget_seconds or 0.0)
    return session.run(WithPlainDefault(own, PlainDefaultHunt(posterior, arm), kept))


def _summary(
    session: Session, identity: Identity, posterior: Posterior, options: SearchOptions,
    arm: str | None, stopped: str, notes: list[str],
) -> Summary:  # fmt: skip
    records: list[MeasurementRecord] = session.in_space()
    trials = session.limits.trials
    used_up = trials is not None and len(session.records) >= trials
    return Summary(
        model=identity.model,
        device=identity.device,
        versions=identity.versions,
        budget_bytes=session.budget_bytes,
        asked=options.asked if options.chose_batch else None,
        plain_arm=arm or "",
        images=options.images,
        num_candidates=len(session.space),
        stopped_because=stopped,
        trials_used=len(session.records) if used_up else None,
        ruled_out=find_excluded(posterior, records),
        ran=tuple(posterior.ran().values()),
        notes=tuple(notes),
    )


def library_attention(model: Model) -> str | None:
    """The attention a library has by itself on CUDA, for the plain default; None where the model is
    no Swin of ours."""
    if not isinstance(model, SwinConfig):
        return None
    return find_library(model.library).default_attention(model)
