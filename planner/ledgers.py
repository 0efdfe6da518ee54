"""The ledger of any model and setting at any batch: from the step on shapes, or from a trace.

A trace is made once and kept (`planner.ledger_cache`): recorded at two batches, checked at a third.
Imports no torch: where nothing else has, traces are made in a process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache

from planner import ledger_cache
from planner.affine import AffineLedger, NotAffineError, Recorder
from planner.compiled import in_graph_pool, is_compiled, is_one_graph
from planner.errors import PlannerError, UnsupportedError
from planner.ledger import Ledger
from planner.ledger_cache import Kept, NotAffine
from planner.ledger_key import ANY_BATCH, Key, ledger_key
from planner.libraries.registry import find_library
from planner.schema import FactoryModel, Model, ResolvedSetting, SwinConfig
from planner.schema.setting import GRAPH_MODES
from planner.step.training import record_training

# One ledger holds at most so many micro-batches: the third repeats the second.
RECORDED_MICRO_BATCHES = 2
# A line goes through the first two. The third is well above them: chunks of a batch, or pairs of
# its samples, look affine between neighbours.
RECORDED_BATCHES = (2, 3, 7)
# Steps that a process holds, each of some 10,000 events.
MAX_HELD = 128


def step_ledger(model: Model, setting: ResolvedSetting, traced: bool = False) -> Ledger:
    """The events of building the model and of its first two optimizer steps.

    Of a `SwinConfig` on shapes, unless `traced`; of any other model from a trace. A compiled step
    comes from a trace or, on shapes, from the trace that is kept; where there is none, it is the
    eager step, which `planner.compiled` says how far to trust. At most `RECORDED_MICRO_BATCHES`
    micro-batches are recorded, since the third repeats the second.
    Raises PlannerError for what cannot be recorded.
    """
    if is_on_shapes(model, traced):
        assert isinstance(model, SwinConfig)
        ledger = _kept_compiled(model, setting) or _eager_on_shapes(model, setting)
    else:
        step = traced_step(model, setting)
        if step.answer(setting.batch_size) is None:
            record_ledgers([(model, setting)])
        ledger = step.ledger(setting.batch_size)
    is_graphed = setting.compile in GRAPH_MODES and is_compiled(ledger)
    return in_graph_pool(ledger) if is_graphed else ledger


def _kept_compiled(config: SwinConfig, setting: ResolvedSetting) -> Ledger | None:
    if setting.compile == "off" or not is_one_graph(config, setting):
        return None
    step, batch_size = traced_step(config, setting), setting.batch_size
    is_known = step.answer(batch_size) is not None and step.error(batch_size) is None
    return step.ledger(batch_size) if is_known else None


def _eager_on_shapes(config: SwinConfig, setting: ResolvedSetting) -> Ledger:
    eager = _alike(config, setting).model_copy(update={"compile": "off"})
    ledger = _on_shapes(config, eager).ledger(setting.batch_size)
    drift = find_library(config.library).drift(config)
    return replace(ledger, notes=(*ledger.notes, *drift)) if drift else ledger


def is_on_shapes(model: Model, traced: bool = False) -> bool:
    """Whether the ledger comes from the step on shapes: at once, and without torch."""
    return isinstance(model, SwinConfig) and not traced


def record_ledgers(
    requests: Sequence[tuple[Model, ResolvedSetting]],
    say: Callable[[str], None] | None = None,
    limit_seconds: float | None = None,
) -> list[PlannerError | None]:
    """Traces what of `requests` is not kept; for each of them the error that it ended with.

    Where this process has not imported torch, one other process makes all traces, and ends after
    `limit_seconds`. `say` is told what is traced (standard error, where it is not given).
    """
    wanted = [(traced_step(*request), request[1].batch_size) for request in requests]
    missing = [(step, batch) for step, batch in wanted if step.answer(batch) is None]
    if missing:
        title = missing[0][0].model.title
        what = f"{title} ({len(missing)} settings)" if len(missing) > 1 else title
        compiles = any(step.setting.compile != "off" for step, _ in missing)
        wait = "a minute or so, compiled" if compiles else "some seconds"
        where = ledger_cache.folder()
        (say or _say)(f"Tracing {what} on fake tensors, which takes {wait}; kept in {where}.")
        if "torch" in sys.modules:
            for step, batch in missing:
                step.record(batch)
        else:
            from planner.trace_process import trace_elsewhere

            trace_elsewhere(missing, limit_seconds)
    return [step.error(batch) for step, batch in wanted]


def traced_step(model: Model, setting: ResolvedSetting) -> TracedStep:
    """The trace of a model and setting, whatever the batch: one object for all alike."""
    return _held_step(model, _alike(model, setting))


def retrace(model: Model, setting: ResolvedSetting) -> None:
    """The next ledger of these is traced anew, whatever is kept."""
    traced_step(model, setting).is_fresh = True


@dataclass
class TracedStep:
    """A real module's step at any batch. `setting` has batch 1.

    `held` is what is known so far: under `ANY_BATCH` the ledger of all batches from 2 on, or why
    there is none; under a batch its own ledger, or the PlannerError that its trace ended in. A
    batch of 1 is another step, of other strides. A step that is not affine is traced batch by
    batch.
    """

    model: Model
    setting: ResolvedSetting
    is_fresh: bool = False  # nothing is read from the cache
    held: dict[int, Kept] = field(default_factory=dict)

    def answer(self, batch_size: int) -> Kept | None:
        """What is known of a batch, here or on disk: a ledger, an affine one, an error."""
        found = self._find(ANY_BATCH) if batch_size > 1 else None
        return found if isinstance(found, AffineLedger) else self._find(batch_size)

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger of a batch that has an answer. Raises the PlannerError that this is."""
        found = self.answer(batch_size)
        if isinstance(found, PlannerError):
            raise found
        assert isinstance(found, AffineLedger | Ledger)
        return found.ledger(batch_size) if isinstance(found, AffineLedger) else found

    def error(self, batch_size: int) -> PlannerError | None:
        """The error that the trace of a batch ended in."""
        found = self.answer(batch_size)
        return found if isinstance(found, PlannerError) else None

    @property
    def reason(self) -> str:
        """Why the step is not affine in the batch, if it was found not to be."""
        found = self._find(ANY_BATCH)
        return found.reason if isinstance(found, NotAffine) else ""

    def record(self, batch_size: int) -> None:
        """Traces a batch without an answer, here, and keeps what comes of it. Imports torch."""
        if self.answer(batch_size) is not None:
            return
        if batch_size > 1 and not self.reason:
            self._record_affine()
        if self.answer(batch_size) is None:
            try:
                ledger = self._trace(batch_size)
                self._keep(batch_size, replace(ledger, notes=self._notes(ledger, batch_size)))
            except PlannerError as error:
                self._keep(batch_size, self._at_1(error) if batch_size == 1 else error)

    def _record_affine(self) -> None:
        try:
            first, second, third = (self._trace(batch) for batch in RECORDED_BATCHES)
            affine = AffineLedger.through(first, second)
            affine.check(third)
            at = replace(affine.at, notes=self._notes(affine.at, ANY_BATCH))
            self._keep(ANY_BATCH, replace(affine, at=at))
        except NotAffineError as error:
            self._keep(ANY_BATCH, NotAffine(error.message))
        except PlannerError as error:  # it may run at the batch that was asked for
            said = error.message.partition("\n")[0]
            batches = ", ".join(map(str, RECORDED_BATCHES))
            self.held[ANY_BATCH] = NotAffine(f"batches {batches} cannot all be traced: {said}")

    def _find(self, batch_size: int) -> Kept | None:
        if batch_size not in self.held and not self.is_fresh and self._key is not None:
            kept = ledger_cache.load({**self._key, "batch": batch_size})
            if kept is not None:
                self.held[batch_size] = kept
        return self.held.get(batch_size)

    def _keep(self, batch_size: int, kept: Kept) -> None:
        """Any error but an UnsupportedError may be gone the next time: it is not put on disk."""
        self.held[batch_size] = kept
        if self._key is not None and not (
            isinstance(kept, PlannerError) and type(kept) is not UnsupportedError
        ):
            ledger_cache.store({**self._key, "batch": batch_size}, kept)

    @cached_property
    def _key(self) -> Key | None:
        return ledger_key(self.model, self.setting, ANY_BATCH)

    def _trace(self, batch_size: int) -> Ledger:
        try:
            from planner.trace import trace_estimate
        except ModuleNotFoundError as error:
            raise PlannerError(
                f"{self.model.title} is estimated by running the real module on fake tensors, and "
                f"{error.name} is not installed.",
                "Install it, or name a Swin of 'planner models' without --trace.",
            ) from error
        return trace_estimate(
            self.model, self.setting.model_copy(update={"batch_size": batch_size})
        )

    def _notes(self, ledger: Ledger, batch_size: int) -> tuple[str, ...]:
        day = datetime.now(UTC).date().isoformat()
        if batch_size == ANY_BATCH:
            how = f"recorded at batches {RECORDED_BATCHES[0]} and {RECORDED_BATCHES[1]}, checked at"
            notes = [f"traced on {day}: {how} {RECORDED_BATCHES[2]}, every size affine in between"]
        else:
            notes = [f"traced on {day} at batch {batch_size} by itself"]
            notes += [f"{self.reason} Each batch size is traced"] if self.reason else []
        if isinstance(self.model, FactoryModel):
            notes.append(
                "kept until the factory's file, or one of yours that it imports, changes; "
                "--retrace traces anew what reads other files"
            )
        return (*ledger.notes, *notes)

    def _at_1(self, error: PlannerError) -> PlannerError:
        if not isinstance(self._find(ANY_BATCH), AffineLedger):
            return error
        return UnsupportedError(f"batch 1 cannot be traced: {error.message}", "Take 2 or more.")


@lru_cache(MAX_HELD)
def _held_step(model: Model, alike: ResolvedSetting) -> TracedStep:
    return TracedStep(model, alike)


@lru_cache(MAX_HELD)
def _on_shapes(config: SwinConfig, alike: ResolvedSetting) -> Recorder:
    """Other batch sizes are read from two recordings."""
    build = find_library(config.library).on_shapes(config, alike)

    def record(batch_size: int) -> Ledger:
        at_batch = alike.model_copy(update={"batch_size": batch_size})
        return record_training(build, config, at_batch)

    return Recorder(record)


def _alike(model: Model, setting: ResolvedSetting) -> ResolvedSetting:
    """What does not change the events shares a recording."""
    return setting.model_copy(
        update={
            "batch_size": 1,
            "accumulate": min(setting.accumulate, RECORDED_MICRO_BATCHES),
            # Tuning kernels changes no buffer, and CUDA graphs are put on top (`in_graph_pool`).
            "compile": "default" if is_one_graph(model, setting) else "off",
        }
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
