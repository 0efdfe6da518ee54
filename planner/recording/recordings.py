"""The recorded step of a model and setting at a batch, on a kind of card: made once, and cached.

Imports no torch: a warm process records (`planner.recording.step`), one for all that this one asks.
"""

from __future__ import annotations

import atexit
import base64
import os
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import BaseModel

from planner.core.errors import (
    ContractError,
    PlannerError,
    UnsupportedError,
    UsageError,
    printable,
)
from planner.core.schema import FactoryModel, Model, ResolvedSetting, TrainSetting
from planner.core.terminal import shows_seconds
from planner.ledger import cache
from planner.ledger.cache import Key, decode, have_changed, ledger_key
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger
from planner.libraries import names
from planner.libraries.building import check_factory
from planner.machine.forking import ForkServer
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.allocator_config import VARIABLES
from planner.memory.compiled import has_known_graphs

DEFAULT_CARD = "a100-sxm-80gb"  # whose kernels are taken where no card is named
LARGE_BYTES = 8 << 40  # of the card that is recorded on: what fits is replayed, not recorded
# Variables of torch's that would change what is recorded, and are replayed instead.
# Nor is taken over what the emulated machine is found by.
REPLAYED = (*VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING")
CONFIGURATION = "PLANNER_EMULATED_GPU"  # what the emulated driver reads as CUDA begins
NOT_TAKEN = (*REPLAYED, CONFIGURATION, "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
PROBED = "'planner tune' can still measure it: it runs the model on a real GPU, without a prior."
# What every recording imports; and building a model, apart from its own library: found out once,
# not in every fork.
IMPORTS = (
    "planner.recording.step", "torch._dynamo", "torch._inductor.output_code",
    "torch._inductor.runtime.triton_heuristics",
)  # fmt: skip
IMPORTED_LATE = {"transformers": ("transformers.modeling_utils",)}  # and torchao behind it
HOST = "Free memory on this machine, or record on one that has more: only the host's is short."
FP8_CARD = "h100-sxm-80gb"  # and where the precision is one that it lacks
MAX_KINDS = 8  # of cards that are each recorded on; of more, one for each capability
MAX_CACHED = 128  # steps that this process has at hand, each of some 10,000 events
Recording = Ledger | PlannerError  # of a step: its ledger, or the error that it ended in


class RecordingRequest(BaseModel):
    """To call `function`, a MODULE:NAME, with `arguments` and what is there of the next two.
    `card` is the emulated machine's configuration; `folder`, `paths` and `environment` are the
    asker's."""

    function: str
    arguments: dict[str, Any]
    model: Model | None
    setting: TrainSetting | None
    card: str
    folder: str
    paths: list[str]
    environment: dict[str, str]


class RecordingServer:
    """The warm process, and the emulated cards that it was asked for."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cards: dict[str, str] = {}
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        self.has_recorded = False  # the first step takes some seconds

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._cards.clear()
        self._stack.close()

    def record(
        self, model: Model, setting: ResolvedSetting, gpu: Gpu | None = None,
        deadline: float | None = None,
    ) -> Ledger:  # fmt: skip
        """The step of `model`, on a card like `gpu`. Raises PlannerError for what cannot be built
        or trained, or not by `deadline` (of time.monotonic)."""
        gpu = gpu or find_gpu(DEFAULT_CARD)
        self.has_recorded = True
        sizes = [overheads_for(gpu, os.environ).workspace_bytes]
        function = "planner.recording.step:record_ledger"
        found = self.ask(function, model, setting, gpu, deadline, workspace_bytes=sizes)
        assert isinstance(found, Ledger), "made by this very code"
        return found

    def look_up(self, library: str, name: str) -> dict[str, Any]:
        """What `library` says of a name, which is imported there. Raises PlannerError."""
        found = self.ask("planner.libraries.names:look_up_here", library=library, name=name)
        assert isinstance(found, dict), "made by this very code"
        return found

    def ask(
        self, function: str, model: Model | None = None, setting: TrainSetting | None = None,
        gpu: Gpu | None = None, deadline: float | None = None, **arguments: Any,
    ) -> Ledger | dict[str, Any]:  # fmt: skip
        """What `function`, a MODULE:NAME, answers on a card like `gpu`. Raises the PlannerError
        that it ended in, or that says how its process did."""
        library = str(arguments.get("library", getattr(model, "library", "")))
        with self._lock:
            request = RecordingRequest(
                function=function, arguments=arguments, model=model, setting=setting,
                card=self._card(gpu or find_gpu(DEFAULT_CARD)), folder=str(Path.cwd()),
                paths=sys.path,
                environment={k: os.environ[k] for k in os.environ if k not in NOT_TAKEN},
            ).model_dump_json()  # fmt: skip
            # While a compiler measures kernels it holds more than later.
            for _ in range(2 if setting is not None and setting.compiles else 1):
                answer, status = self._answer(request, library_modules(library), deadline)
        if status or not answer:
            assert model is not None, "to look a name up ends no process"
            raise _death_of(model, status)
        found = decode(base64.b64decode(answer), {})
        if isinstance(found, PlannerError):
            raise found
        assert found is not None, "made by this very code"
        return found

    def _answer(
        self, request: str, imports: tuple[str, ...], deadline: float | None
    ) -> tuple[bytes, int]:
        """What a fork says, and its exit status."""
        assert self._server is not None, "started with the first card"
        pieces: list[bytes] = []
        with self._server.fork("planner.recording.step:serve", [request], (), imports) as fork:
            while said := fork.hear(None if deadline is None else max(deadline - monotonic(), 0.0)):
                if said.startswith(b"ended"):
                    status = os.waitstatus_to_exitcode(int(said.split()[1]))
                    return b"".join(pieces), status
                pieces.append(said)
        if said is None:
            raise PlannerError("its step was not recorded in the time that was left.")
        raise PlannerError(
            "the process that records steps was ended from outside.", "What it said last is above."
        )

    def _card(self, gpu: Gpu) -> str:
        """The configuration of an emulated card like `gpu` with memory for anything."""
        if gpu.name not in self._cards:
            from planner.machine.emulated import EmulatedMachine, emulated_gpu, started

            card = emulated_gpu(gpu, memory_bytes=LARGE_BYTES, notice="")
            environment = {k: v for k, v in os.environ.items() if k not in REPLAYED}
            # torch.cuda.is_available() then asks NVML, where it would else initialise CUDA.
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            made = self._stack.enter_context(started(EmulatedMachine((card,)), environment))
            if self._server is None:  # where it cannot start, the next request tries again
                path = os.pathsep.join(entry for entry in sys.path if entry)
                self._server = ForkServer(IMPORTS, {**made, "PYTHONPATH": path}, output=2)
            self._cards[gpu.name] = made[CONFIGURATION]
        return self._cards[gpu.name]


def library_modules(library: str) -> tuple[str, ...]:
    """What a process imports that builds models of a library; nothing for a user's own."""
    if library in ("", "native", "microsoft"):
        return ()
    return (library, *IMPORTED_LATE.get(library, ()))


def _death_of(model: Model, status: int) -> PlannerError:
    """What a person is told where the process ended before it could answer."""
    way_out = "What it said last is above."
    if -status == signal.SIGKILL:
        way_out = f"The kernel kills what takes too much of the host's memory. {HOST}"
    how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    message = f"the process that recorded the step of {model.title} ended {how}."
    return PlannerError(message, f"{way_out} {PROBED}")


_cached: OrderedDict[RecordedStep, Recording] = OrderedDict()
_fresh: set[RecordedStep] = set()  # what is recorded anew, whatever is on disk
recorder = RecordingServer()


def _look_up(library: str, name: str) -> dict[str, Any]:
    """By the process that will record it; here, where none can be had."""
    try:
        return recorder.look_up(library, name)
    except (UsageError, UnsupportedError):
        raise
    except PlannerError:
        return names.look_up_here(library, name)


names.look_up = _look_up
atexit.register(recorder.close)


@dataclass(frozen=True)
class RecordedStep:
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


def step_of(model: Model, setting: ResolvedSetting, gpu: Gpu | None) -> RecordedStep:
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
    return RecordedStep(model, setting.model_copy(update=changes), kind, card)


def find(step: RecordedStep) -> Recording | None:
    """What is known of a step, here or on disk: its ledger, or the error that it ended in."""
    if step not in _cached and step.key is not None and step not in _fresh:
        found = cache.load(step.key)
        if isinstance(found, Ledger | PlannerError):
            _remember(step, found)
    if step in _cached:
        _cached.move_to_end(step)
    return _cached.get(step)


def ledger_of(step: RecordedStep) -> Ledger:
    """Recorded now, if it is not known. Raises the PlannerError that it ended in."""
    if find(step) is None:
        record([step])
    found = find(step)
    if isinstance(found, PlannerError):
        raise found.with_traceback(None)  # one that is cached grows with every raise
    assert found is not None, "recorded, or an error"
    return found


def forget(steps: Iterable[RecordedStep]) -> None:
    """They are recorded anew, whatever is cached."""
    for step in steps:
        _cached.pop(step, None)
        _fresh.add(step)


def forget_changed(model: FactoryModel) -> None:
    """What is cached here of a factory is of its files as they were; what ended in an error may run
    by now."""
    failed = (step.model for step, found in _cached.items() if isinstance(found, PlannerError))
    if have_changed(model.parts[0]) or model in failed:
        clear()


def clear() -> None:
    """Of what is known here; what is on disk stays."""
    _cached.clear()


def record(
    steps: Sequence[RecordedStep],
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
            _remember(step, _recorded(step, deadline))


def _said(missing: Sequence[RecordedStep], num_compiled: int) -> str:
    title, cards = missing[0].model.title, {step.card.name for step in missing}
    where = f"an emulated {missing[0].card.name}" if len(cards) == 1 else "emulated GPUs"
    steps = f"{len(missing)} steps" if len(missing) > 1 else "a step"
    wait = f"{num_compiled} to {3 * num_compiled} minutes" if num_compiled else "some seconds"
    return f"Recording {steps} of {title} on {where}, once: {wait}."


def _recorded(step: RecordedStep, deadline: float | None) -> Recording:
    found: Recording
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


def _notes(step: RecordedStep) -> list[str]:
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


def _remember(step: RecordedStep, found: Recording) -> None:
    _cached[step] = found
    while len(_cached) > MAX_CACHED:
        _cached.popitem(last=False)
