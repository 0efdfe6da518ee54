"""The trace of one model and setting, at any batch: made once, and kept on disk.

Recorded at two batches and checked at one between them. Imports no torch until it has to trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache

from planner.core.errors import ContractError, PlannerError, UnsupportedError
from planner.core.schema import FactoryModel, Model, ResolvedSetting
from planner.core.schema.distribution import DEEPSPEED
from planner.ledger import cache as ledger_cache
from planner.ledger.affine import AffineLedger, NotAffineError
from planner.ledger.cache import Kept, NotAffine
from planner.ledger.key import ANY_BATCH, Key, have_changed, ledger_key
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger
from planner.libraries.limits import batch_unit
from planner.memory.compiled import has_known_graphs
from planner.step.zero import on_one_device

# A line goes through the first and the last, which lie well apart: chunks of a batch, or pairs of
# its samples, look affine between neighbours. At the one between them a library's model is checked
# by one step: what a further one does besides is the optimizer's, which knows no batch. A model of
# one's own may keep something from step to step (a queue), and is checked by as many.
RECORDED_BATCHES = (2, 3, 7)
# Steps that a process holds, each of some 10,000 events.
MAX_HELD = 128
_failed: set[Model] = set()  # models whose trace is known to have ended in an error


def alike(model: Model, setting: ResolvedSetting) -> ResolvedSetting:
    """What does not change the events shares a recording.

    Tuning kernels changes no buffer, and CUDA graphs are put on top (`in_graph_pool`); a graph of
    any batch saves at each what one of that batch does, but for one number (8 B, torch 2.13). What
    ZeRO does is inserted into the step on one device.
    """
    if setting.parallelism in DEEPSPEED:
        setting = on_one_device(setting)
    if has_known_graphs(model, setting):
        compiled = {"compile": "default", "compile_dynamic": False, "compile_fullgraph": False}
    else:
        compiled = {}
        setting = ResolvedSetting(setting.uncompiled())
    accumulate = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    # One device and each of many that hold a copy of the model do the same.
    alone = {"world_size": 1, "nodes": 1} if setting.parallelism in ("none", "ddp") else {}
    return setting.model_copy(
        update={"batch_size": 1, "accumulate": accumulate, **alone, **compiled}
    )


def traced_step(model: Model, setting: ResolvedSetting) -> TracedStep:
    """The trace of a model and setting, whatever the batch: one object for all alike."""
    return _held_step(model, alike(model, setting))


def retrace(model: Model, setting: ResolvedSetting) -> None:
    """The next ledger of these is traced anew, whatever is kept."""
    traced_step(model, setting).is_fresh = True


def forget_changed(model: FactoryModel) -> None:
    """What is held of a factory is of its files as they were when it was traced; and what ended in
    an error may run by now."""
    if have_changed(model.parts[0]) or model in _failed:
        _failed.clear()
        _held_step.cache_clear()


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
        error = self.error(batch_size)
        if error is not None:
            raise error.with_traceback(None)  # one that is held grows with every raise
        found = self.answer(batch_size)
        assert isinstance(found, AffineLedger | Ledger)
        return found.ledger(batch_size) if isinstance(found, AffineLedger) else found

    def error(self, batch_size: int) -> PlannerError | None:
        """The error that the trace of a batch ended in."""
        found = self.answer(batch_size)
        if not isinstance(found, PlannerError):
            return None
        _failed.add(self.model)
        return found

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
            self._record_affine(batch_size)
        if self.answer(batch_size) is None:
            try:
                ledger = self._trace(batch_size)
                if batch_size > 1 and self.reason:  # not an error of the moment: this batch runs
                    self._keep(ANY_BATCH, NotAffine(self.reason))
                self._keep(batch_size, replace(ledger, notes=self._notes(ledger, batch_size)))
            except PlannerError as error:
                self._keep(batch_size, self._at_1(error) if batch_size == 1 else error)

    def _record_affine(self, batch_size: int) -> None:
        try:
            first, between, last = self._recorded_batches
            affine = AffineLedger.through(self._trace(first), self._trace(last))
            affine.check(self._trace(between, self._checked_steps))
            at = replace(affine.at, notes=self._notes(affine.at, ANY_BATCH))
            self._keep(ANY_BATCH, replace(affine, at=at))
        except NotAffineError as error:
            self._keep(ANY_BATCH, NotAffine(error.message))
        except ContractError as error:  # at whatever batch
            self._keep(batch_size, error)
        except PlannerError as error:  # it may run at the batch that was asked for
            said = error.message.partition("\n")[0]
            batches = ", ".join(map(str, self._recorded_batches))
            self.held[ANY_BATCH] = NotAffine(f"batches {batches} cannot all be traced: {said}")

    @property
    def _checked_steps(self) -> int | None:
        return None if isinstance(self.model, FactoryModel) else 1

    @property
    def _recorded_batches(self) -> tuple[int, ...]:
        return tuple(batch_unit(self.setting) * batch for batch in RECORDED_BATCHES)

    def _find(self, batch_size: int) -> Kept | None:
        if batch_size not in self.held and self._key is not None and not self.is_fresh:
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

    def _trace(self, batch_size: int, num_steps: int | None = None) -> Ledger:
        """Of `num_steps`, without validation; else of `steps_until_steady`, and with it."""
        setting = self.setting.model_copy(update={"batch_size": batch_size})
        if num_steps is not None:
            setting = setting.model_copy(update={"validation_batch_size": 0})
        try:
            from planner.trace.ledger import trace_estimate
        except ModuleNotFoundError as error:
            raise PlannerError(
                f"{self.model.title} is estimated by running the real module on fake tensors, and "
                f"{error.name} is not installed.",
                "Install it, or name a Swin of 'planner models' without --trace.",
            ) from error
        return trace_estimate(self.model, setting, num_steps=num_steps)

    def _notes(self, ledger: Ledger, batch_size: int) -> tuple[str, ...]:
        day = datetime.now(UTC).date().isoformat()
        if batch_size == ANY_BATCH:
            first, between, last = self._recorded_batches
            how = f"recorded at batches {first} and {last}, checked at {between}"
            how += " by one step" if self._checked_steps == 1 else ""
            notes = [f"traced on {day}: {how}: every size is affine in the batch"]
        else:
            notes = [f"traced on {day} at batch {batch_size} by itself"]
            notes += [f"{self.reason} Each batch size is traced by itself"] if self.reason else []
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
