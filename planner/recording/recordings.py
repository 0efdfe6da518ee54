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
from typing import Any, TypeVar

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
from planner.ledger.cache import Key, decode, has_changed, ledger_key
from planner.ledger.ledger import LEDGER_MICRO_BATCHES, Ledger
from planner.libraries import names
from planner.libraries.factories import check_factory
from planner.machine.forking import ForkServer
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.allocator_config import VARIABLES
from planner.memory.compiled import has_known_graphs

T = TypeVar("T")
DEFAULT_CARD = "a100-sxm-80gb"  # whose kernels are taken where no card is named
FP8_CARD = "h100-sxm-80gb"  # the same for fp8, which an A100 lacks
LARGE_BYTES = 8 << 40  # of the card that is recorded on: what fits is replayed, not recorded
# Variables of torch that would change a recording: their effect is replayed instead.
REPLAYED = (*VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING")
EMULATED_GPU = "PLANNER_EMULATED_GPU"  # the emulated driver reads it as CUDA begins
# Variables that the recording process does not inherit: the last ones find the emulated machine.
NOT_TAKEN = (*REPLAYED, EMULATED_GPU, "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
PROBED = "'planner tune' can still measure it: it runs the model on a real GPU, without a prior."
# The modules that every recording imports, and that are slow: imported once, not in every fork.
IMPORTS = (
    "planner.recording.step", "torch._dynamo", "torch._inductor.output_code",
    "torch._inductor.runtime.triton_heuristics",
)  # fmt: skip
IMPORTED_LATE = {"transformers": ("transformers.modeling_utils",)}  # and torchao behind it
HOST = "Free memory on this machine, or record on one that has more: only the host's is short."
MAX_KINDS = 8  # of cards that are each recorded; of more kinds, one for each capability
MAX_CACHED = 128  # steps that this process holds, each of some 10,000 events
Recording = Ledger | PlannerError  # of a step: its ledger, or the error that it ended in


class RecordingRequest(BaseModel):
    """A call of `function`, a MODULE:NAME, with `arguments` and the model and the setting that are
    not None. `card` is the emulated machine's configuration; `folder`, `paths` and `environment`
    are the caller's."""

    function: str
    arguments: dict[str, Any]
    model: Model | None
    setting: TrainSetting | None
    card: str
    folder: str
    paths: list[str]
    environment: dict[str, str]


class RecordingServer:
    """The warm process that forks for each recording, and the emulated cards it recorded on."""

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
        """The ledger of a step of `model` on a card like `gpu`. Raises PlannerError for a model
        that cannot be built or trained, or not by `deadline` (of time.monotonic)."""
        gpu = gpu or find_gpu(DEFAULT_CARD)
        self.has_recorded = True
        sizes = [overheads_for(gpu, os.environ).workspace_bytes]
        function = "planner.recording.step:record_ledger"
        return self.ask(Ledger, function, model, setting, gpu, deadline, workspace_bytes=sizes)

    def look_up(self, library: str, name: str) -> dict[str, Any]:
        """The fields of the model that `library` has under a name; the library is imported in a
        fork. Raises PlannerError."""
        function = "planner.libraries.names:look_up_in_process"
        return self.ask(dict, function, library=library, name=name)

    def ask(
        self, kind: type[T], function: str, model: Model | None = None,
        setting: TrainSetting | None = None, gpu: Gpu | None = None, deadline: float | None = None,
        **arguments: Any,
    ) -> T:  # fmt: skip
        """What `function`, a MODULE:NAME, returns on a card like `gpu`: a `kind`. Raises the
        PlannerError that it raised, or one that says how its process ended."""
        library = str(arguments.get("library", getattr(model, "library", "")))
        with self._lock:
            request = RecordingRequest(
                function=function, arguments=arguments, model=model, setting=setting,
                card=self._card(gpu or find_gpu(DEFAULT_CARD)), folder=str(Path.cwd()),
                paths=sys.path,
                environment={k: os.environ[k] for k in os.environ if k not in NOT_TAKEN},
            ).model_dump_json()  # fmt: skip
            # Twice: while a compiler measures kernels it holds more memory than later.
            for _ in range(2 if setting is not None and setting.compiles else 1):
                answer, status = self._answer(request, library_modules(library), deadline)
        if status or not answer:
            assert model is not None, "to look a name up ends no process"
            raise _death_of(model, status)
        result = decode(base64.b64decode(answer), {})
        if isinstance(result, PlannerError):
            raise result
        assert isinstance(result, kind), "made by this very code"
        return result

    def _answer(
        self, request: str, imports: tuple[str, ...], deadline: float | None
    ) -> tuple[bytes, int]:
        """What a fork writes, and its exit status."""
        assert self._server is not None, "started with the first card"
        pieces: list[bytes] = []
        with self._server.fork("planner.recording.step:serve", [request], (), imports) as fork:
            while piece := fork.hear(None if deadline is None else max(deadline - monotonic(), 0)):
                if piece.startswith(b"ended"):
                    status = os.waitstatus_to_exitcode(int(piece.split()[1]))
                    return b"".join(pieces), status
                pieces.append(piece)
        if piece is None:
            raise PlannerError(
                "its step was not recorded in the time that was left.",
                "Record it first with 'planner estimate', which has no limit.",
            )
        raise PlannerError(
            "the process that records steps was ended from outside.",
            "Run the command again; what it said last is above.",
        )

    def _card(self, gpu: Gpu) -> str:
        """The configuration of an emulated card like `gpu`, with memory for anything."""
        if gpu.name not in self._cards:
            from planner.machine.emulated import EmulatedMachine, emulated_gpu, started

            card = emulated_gpu(gpu, memory_bytes=LARGE_BYTES, notice="")
            environment = {k: v for k, v in os.environ.items() if k not in REPLAYED}
            # torch.cuda.is_available() then asks NVML; otherwise it would initialise CUDA.
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            machine = self._stack.enter_context(started(EmulatedMachine((card,)), environment))
            if self._server is None:  # where it cannot start, the next request tries again
                path = os.pathsep.join(entry for entry in sys.path if entry)
                self._server = ForkServer(IMPORTS, {**machine, "PYTHONPATH": path}, output=2)
            self._cards[gpu.name] = machine[EMULATED_GPU]
        return self._cards[gpu.name]


def library_modules(library: str) -> tuple[str, ...]:
    """The modules of a library that a process imports to build its models; none for a user's own
    model."""
    if library in ("", "native", "microsoft"):
        return ()
    return (library, *IMPORTED_LATE.get(library, ()))


def _death_of(model: Model, status: int) -> PlannerError:
    """The error for a process that ended before it could answer."""
    way_out = "What it said last is above."
    if -status == signal.SIGKILL:
        way_out = f"The kernel kills what takes too much of the host's memory. {HOST}"
    how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    message = f"the process that recorded the step of {model.title} ended {how}."
    return PlannerError(message, f"{way_out} {PROBED}")


_cached: OrderedDict[RecordedStep, Recording] = OrderedDict()
_fresh: set[RecordedStep] = set()  # steps that are recorded anew, whatever is on disk
recorder = RecordingServer()


def _look_up(library: str, name: str) -> dict[str, Any]:
    """The fields of a named model, from the process that will record it; from this one where no
    such process can run."""
    try:
        return recorder.look_up(library, name)
    except (UsageError, UnsupportedError):
        raise
    except PlannerError:
        return names.look_up_in_process(library, name)


names.look_up = _look_up
atexit.register(recorder.close)


@dataclass(frozen=True)
class RecordedStep:
    """A step that is or may be recorded. `kind` is what of a card decides which memory a step
    requests: `card` stands for all cards of its kind, and does not count in comparisons."""

    model: Model
    setting: ResolvedSetting
    kind: tuple[tuple[int, int] | None, int | None, int]
    card: Gpu = field(compare=False)

    @cached_property
    def key(self) -> Key | None:
        """The key of the recording on disk; None where nobody can tell what it depends on."""
        key = ledger_key(self.model, self.setting, self.setting.batch_size)
        return None if key is None else {**key, "card": ",".join(map(str, self.kind))}


def stand_ins(gpus: Iterable[Gpu | None]) -> dict[Gpu | None, Gpu | None]:
    """The card on which the step of each GPU is recorded: the GPU itself, or where there are more
    than MAX_KINDS the first of its capability, whose scratch may be some percent more or less."""
    unique = list(dict.fromkeys(gpus))
    if len(unique) <= MAX_KINDS:
        return {gpu: gpu for gpu in unique}
    first: dict[object, Gpu | None] = {}
    return {gpu: first.setdefault(gpu.capability if gpu else None, gpu) for gpu in unique}


def step_of(model: Model, setting: ResolvedSetting, gpu: Gpu | None) -> RecordedStep:
    """The step whose recording a setting takes. Settings with the same events share it: kernels
    that are tuned change no buffer, and CUDA graphs are added later (`pool_graph_memory`)."""
    changes: dict[str, object] = {"accumulate": min(setting.accumulate, LEDGER_MICRO_BATCHES)}
    if has_known_graphs(setting):
        changes["compile"] = "default"
    else:
        setting = setting.uncompiled()
    default = FP8_CARD if setting.precision == "fp8" else DEFAULT_CARD
    card = gpu if gpu is not None and gpu.capability is not None else find_gpu(default)
    kind = card.capability, card.num_sms, card.threads_per_sm
    return RecordedStep(model, setting.model_copy(update=changes), kind, card)


def find(step: RecordedStep) -> Recording | None:
    """The recording of a step, held here or on disk: its ledger, or the error that it ended in.
    None where there is none."""
    if step not in _cached and step.key is not None and step not in _fresh:
        entry = cache.load(step.key)
        if isinstance(entry, Ledger | PlannerError):
            _remember(step, entry)
    if step in _cached:
        _cached.move_to_end(step)
    return _cached.get(step)


def ledger_of(step: RecordedStep) -> Ledger:
    """The ledger of a step, which is recorded now if it is not kept. Raises the PlannerError that
    the step ended in."""
    if find(step) is None:
        record([step])
    recording = find(step)
    if isinstance(recording, PlannerError):
        raise recording.with_traceback(None)  # a cached error grows with every raise
    assert recording is not None, "recorded, or an error"
    return recording


def forget(steps: Iterable[RecordedStep]) -> None:
    """These steps will be recorded anew, whatever is cached."""
    for step in steps:
        _cached.pop(step, None)
        _fresh.add(step)


def forget_changed(model: FactoryModel) -> None:
    """Forgets the recordings held here if a file of the factory has changed since, or if one of its
    steps ended in an error, as it may run by now."""
    failed = (step.model for step, entry in _cached.items() if isinstance(entry, PlannerError))
    if has_changed(model.parts[0]) or model in failed:
        clear()


def clear() -> None:
    """Forgets the recordings held here; those on disk stay."""
    _cached.clear()


def record(
    steps: Sequence[RecordedStep],
    say: Callable[[str], None] | None = None,
    limit_seconds: float | None = None,
) -> None:
    """Records the `steps` that are not kept, in their order and for at most `limit_seconds`. `say`
    hears what is recorded and what was left out (None: standard error). Raises UsageError for a
    factory whose module cannot be found."""
    missing = [step for step in dict.fromkeys(steps) if find(step) is None]
    if not missing:
        return
    for model in {step.model for step in missing}:
        if isinstance(model, FactoryModel):
            check_factory(model.factory)
    tell = say or _say
    num_compiled = sum(step.setting.compile != "off" for step in missing)
    if num_compiled or not recorder.has_recorded or len(missing) > MAX_KINDS:
        tell(_announcement(missing, num_compiled))
    deadline = None if limit_seconds is None else monotonic() + limit_seconds
    with nullcontext() if say else shows_seconds():
        for number, step in enumerate(missing):
            if deadline is not None and monotonic() > deadline:
                left = len(missing) - number
                tell(f"{left} of {len(missing)} steps were not recorded in {limit_seconds:.0f} s.")
                break
            _remember(step, _record(step, deadline))


def _announcement(missing: Sequence[RecordedStep], num_compiled: int) -> str:
    title, cards = missing[0].model.title, {step.card.name for step in missing}
    where = f"an emulated {missing[0].card.name}" if len(cards) == 1 else "emulated GPUs"
    steps = f"{len(missing)} steps" if len(missing) > 1 else "a step"
    wait = f"{num_compiled} to {3 * num_compiled} minutes" if num_compiled else "some seconds"
    return f"Recording {steps} of {title} on {where}, once: {wait}."


def _record(step: RecordedStep, deadline: float | None) -> Recording:
    recording: Recording
    try:
        ledger = recorder.record(step.model, step.setting, step.card, deadline)
        recording = replace(ledger, notes=(*ledger.notes, *_notes(step)))
    except PlannerError as error:
        recording = error
    is_lasting = isinstance(recording, Ledger | ContractError | UnsupportedError)
    if step.key is not None and is_lasting and not isinstance(recording, UsageError):
        cache.store(step.key, recording)
    _fresh.discard(step)
    return recording


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


def _remember(step: RecordedStep, recording: Recording) -> None:
    _cached[step] = recording
    while len(_cached) > MAX_CACHED:
        _cached.popitem(last=False)
