"""Asks a warm process for recordings; imports no torch. One process serves a whole command."""

from __future__ import annotations

import base64
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, TrainSetting
from planner.ledger.cache import decode
from planner.ledger.ledger import Ledger
from planner.machine.forking import ForkServer
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.allocator_config import VARIABLES

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
    "torch._inductor.runtime.triton_heuristics", "planner.recording.worker",
)  # fmt: skip
IMPORTED_LATE = {"transformers": ("transformers.modeling_utils",)}  # and torchao behind it
HOST = "Free memory on this machine, or record on one that has more: only the host's is short."


class Recorder:
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
        found = self.ask("planner.libraries.named:look_up_here", library=library, name=name)
        assert isinstance(found, dict), "made by this very code"
        return found

    def ask(
        self, function: str, model: Model | None = None, setting: TrainSetting | None = None,
        gpu: Gpu | None = None, deadline: float | None = None, **arguments: Any,
    ) -> Ledger | dict[str, Any]:  # fmt: skip
        """What `function`, a MODULE:NAME, answers on a card like `gpu`. Raises the PlannerError
        that it ended in, or that says how its process did."""
        from planner.recording.worker import Request

        library = str(arguments.get("library", getattr(model, "library", "")))
        with self._lock:
            request = Request(
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
        with self._server.fork("planner.recording.worker:answer", [request], (), imports) as fork:
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
