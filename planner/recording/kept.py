"""The recorded step of a model and setting at a batch, on a kind of card: made once, and kept.

Imports no torch: a warm process records (`recording.client`), one for all that this process asks.
"""

from __future__ import annotations

import atexit
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from time import monotonic
from typing import Any

from planner.core.errors import (
    ContractError,
    PlannerError,
    UnsupportedError,
    UsageError,
    printable,
)
from planner.core.schema import FactoryModel, Model, ResolvedSetting
from planner.core.terminal import shows_seconds
from planner.ledger import cache
from planner.ledger.cache import Key, have_changed, ledger_key
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger
from planner.libraries import named
from planner.libraries.building import check_factory
from planner.machine.hardware import Gpu, find_gpu
from planner.memory.compiled import has_known_graphs
from planner.recording.client import DEFAULT_CARD, Recorder

FP8_CARD = "h100-sxm-80gb"  # and where the precision is one that it lacks
MAX_KINDS = 8  # of cards that are each recorded on; of more, one for each capability
MAX_HELD = 128  # steps that a process holds, each of some 10,000 events
Kept = Ledger | PlannerError
_held: OrderedDict[Step, Kept] = OrderedDict()
_fresh: set[Step] = set()  # what is recorded anew, whatever is kept on disk
recorder = Recorder()


def _look_up(library: str, name: str) -> dict[str, Any]:
    """By the process that will record it; here, where none can be had."""
    try:
        return recorder.look_up(library, name)
    except (UsageError, UnsupportedError):
        raise
    except PlannerError:
        return named.look_up_here(library, name)


named.look_up = _look_up
atexit.register(recorder.close)


@dataclass(frozen=True)
class Step:
    """What is recorded; two alike are equal. `setting` has its batch, `card` stands for all of its
    `kind`: what of a card decides what a step asks for."""

    model: Model
    setting: ResolvedSetting
    kind: tuple[tuple[int, int] | None, int | None, int]
    card: Gpu = field(compare=False)

    @cached_property
    def key(self) -> Key | None:
        """On disk. None where nobody can tell what a recording depends on."""
        found = ledger_key(self.model, self.setting, self.setting.batch_size)
        return None if found is None else {**found, "card": ",".join(map(str, self.kind))}


def stand_ins(gpus: Iterable[Gpu | None]) -> dict[Gpu | None, Gpu | None]:
    """The card on which what `gpus` need is recorded: each itself, or of more than MAX_KINDS the
    first of its capability, whose scratch may be some percent more or less."""
    known = list(dict.fromkeys(gpus))
    if len(known) <= MAX_KINDS:
        return {gpu: gpu for gpu in known}
    first: dict[object, Gpu | None] = {}
    return {gpu: first.setdefault(gpu.capability if gpu else None, gpu) for gpu in known}


def step_of(model: Model, setting: ResolvedSetting, gpu: Gpu | None) -> Step:
    """What does not change the events shares a recording: kernels that are tuned change no buffer,
    and CUDA graphs are put on top (`in_graph_pool`)."""
    changes: dict[str, object] = {"accumulate": min(setting.accumulate, RECORDED_MICRO_BATCHES)}
    if has_known_graphs(setting):
        changes["compile"] = "default"
    else:
        setting = ResolvedSetting(setting.uncompiled())
    is_known = gpu is not None and gpu.capability is not None and gpu.num_sms is not None
    default = FP8_CARD if setting.precision == "fp8" else DEFAULT_CARD
    card = gpu if gpu is not None and is_known else find_gpu(default)
    kind = card.capability, card.num_sms, card.threads_per_sm
    return Step(model, setting.model_copy(update=changes), kind, card)


def find(step: Step) -> Kept | None:
    """What is known of a step, here or on disk: its ledger, or the error that it ended in."""
    if step not in _held and step.key is not None and step not in _fresh:
        kept = cache.load(step.key)
        if isinstance(kept, Ledger | PlannerError):
            _hold(step, kept)
    if step in _held:
        _held.move_to_end(step)
    return _held.get(step)


def ledger_of(step: Step) -> Ledger:
    """Recorded now, if it is not known. Raises the PlannerError that it ended in."""
    if find(step) is None:
        record([step])
    found = find(step)
    if isinstance(found, PlannerError):
        raise found.with_traceback(None)  # one that is held grows with every raise
    assert found is not None, "recorded, or an error"
    return found


def forget(steps: Iterable[Step]) -> None:
    """They are recorded anew, whatever is kept."""
    for step in steps:
        _held.pop(step, None)
        _fresh.add(step)


def forget_changed(model: FactoryModel) -> None:
    """What is held of a factory is of its files as they were; what ended in an error may run by
    now."""
    failed = (step.model for step, kept in _held.items() if isinstance(kept, PlannerError))
    if have_changed(model.parts[0]) or model in failed:
        clear()


def clear() -> None:
    """Of what is known here; what is on disk stays."""
    _held.clear()


def record(
    steps: Sequence[Step],
    say: Callable[[str], None] | None = None,
    limit_seconds: float | None = None,
) -> None:
    """Records what of `steps` is not known, in the given order and for at most `limit_seconds`.
    `say` is told what is recorded, and what was left out; standard error, where none is given.
    Raises UsageError for a factory whose module is nowhere."""
    missing = [step for step in dict.fromkeys(steps) if find(step) is None]
    if not missing:
        return
    for model in {step.model for step in missing}:
        if isinstance(model, FactoryModel):
            check_factory(model.factory)
    tell = say or _say
    num_compiled = sum(step.setting.compile != "off" for step in missing)
    if num_compiled or not recorder.has_recorded or len(missing) > MAX_KINDS:
        tell(_said(missing, num_compiled))
    deadline = None if limit_seconds is None else monotonic() + limit_seconds
    with nullcontext() if say else shows_seconds():
        for number, step in enumerate(missing):
            if deadline is not None and monotonic() > deadline:
                left = len(missing) - number
                tell(f"{left} of {len(missing)} steps were not recorded in {limit_seconds:.0f} s.")
                break
            _hold(step, _recorded(step, deadline))


def _said(missing: Sequence[Step], num_compiled: int) -> str:
    title, cards = missing[0].model.title, {step.card.name for step in missing}
    where = f"an emulated {missing[0].card.name}" if len(cards) == 1 else "emulated GPUs"
    steps = f"{len(missing)} steps" if len(missing) > 1 else "a step"
    wait = f"{num_compiled} to {3 * num_compiled} minutes" if num_compiled else "some seconds"
    return f"Recording {steps} of {title} on {where}, once: {wait}."


def _recorded(step: Step, deadline: float | None) -> Kept:
    found: Kept
    try:
        ledger = recorder.record(step.model, step.setting, step.card, deadline)
        found = replace(ledger, notes=(*ledger.notes, *_notes(step)))
    except PlannerError as error:
        found = error
    is_lasting = isinstance(found, Ledger | ContractError | UnsupportedError)
    if step.key is not None and is_lasting and not isinstance(found, UsageError):
        cache.store(step.key, found)
    _fresh.discard(step)
    return found


def _notes(step: Step) -> list[str]:
    day, batch = datetime.now(UTC).date().isoformat(), step.setting.batch_size
    notes = [f"recorded on {day} at batch {batch} on an emulated {step.card.name}"]
    if isinstance(step.model, FactoryModel):
        notes.append(
            "kept until the factory's file, or one of yours that it imports, changes; "
            "--fresh records anew what reads other files"
        )
    return notes


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _hold(step: Step, kept: Kept) -> None:
    _held[step] = kept
    while len(_held) > MAX_HELD:
        _held.popitem(last=False)
