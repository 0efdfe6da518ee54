"""Asks a warm process for recordings; imports no torch. One process serves a whole command."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from select import select
from time import monotonic
from typing import Any

from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, TrainSetting
from planner.ledger.cache import decode
from planner.ledger.ledger import Ledger
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import overheads_for

DEFAULT_CARD = "a100-sxm-80gb"  # whose kernels are taken where no card is named
LARGE_BYTES = 8 << 40  # of the card that is recorded on: what fits is replayed, not recorded
# Variables of torch's that would change what is recorded, and are replayed instead.
# Nor is taken over what the emulated machine is found by.
REPLAYED = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
CONFIGURATION = "PLANNER_EMULATED_GPU"  # what the emulated driver reads as CUDA begins
NOT_TAKEN = (*REPLAYED, CONFIGURATION, "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
PROBED = "'planner tune' can still measure it: it runs the model on a real GPU, without a prior."
HOST = "Free memory on this machine, or record on one that has more: only the host's is short."


class Recorder:
    """The warm process, and the emulated cards that it was asked for."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cards: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self.has_recorded = False  # the first step takes some seconds

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
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
        from planner.recording.worker import ENDED, Request

        with self._lock:
            request = Request(
                function=function, arguments=arguments, model=model, setting=setting,
                card=self._card(gpu or find_gpu(DEFAULT_CARD)), folder=str(Path.cwd()),
                paths=sys.path,
                environment={k: os.environ[k] for k in os.environ if k not in NOT_TAKEN},
            )  # fmt: skip
            answer = self._answer(self._started(), request.model_dump_json(), deadline)
        if answer.startswith(ENDED):
            assert model is not None, "to look a name up ends no process"
            raise _death_of(model, int(answer.removeprefix(ENDED)))
        found = decode(base64.b64decode(answer), {})
        if isinstance(found, PlannerError):
            raise found
        assert found is not None, "made by this very code"
        return found

    def _answer(self, process: subprocess.Popen[str], request: str, deadline: float | None) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{request}\n")
        process.stdin.flush()
        try:
            left = None if deadline is None else max(deadline - monotonic(), 0.0)
            if not select([process.stdout], [], [], left)[0]:
                raise PlannerError("its step was not recorded in the time that was left.")
            line = process.stdout.readline()
        except BaseException:  # what it answers later would answer another question
            self.close()
            raise
        if not line:
            raise PlannerError(
                f"the process that records steps ended with status {process.wait()}.",
                "What it said last is above.",
            )
        return line

    def _started(self) -> subprocess.Popen[str]:
        """The process; it is started on the first card that it is asked for."""
        if self._process is None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "planner.recording.worker"],
                env={**self._environment, "PYTHONPATH": path},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,  # Ctrl-C is for the asker, who ends this one
            )  # fmt: skip
        return self._process

    def _card(self, gpu: Gpu) -> str:
        """The configuration of an emulated card like `gpu` with memory for anything."""
        if gpu.name not in self._cards:
            from planner.machine.emulated import EmulatedMachine, emulated_gpu, started

            card = emulated_gpu(gpu, memory_bytes=LARGE_BYTES, notice="")
            environment = {k: v for k, v in os.environ.items() if k not in REPLAYED}
            # torch.cuda.is_available() then asks NVML, where it would else initialise CUDA.
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            made = self._stack.enter_context(started(EmulatedMachine((card,)), environment))
            self._environment = made
            self._cards[gpu.name] = made[CONFIGURATION]
        return self._cards[gpu.name]


def _death_of(model: Model, status: int) -> PlannerError:
    """What a person is told where the process ended before it could answer."""
    way_out = "What it said last is above."
    if -status == signal.SIGKILL:
        way_out = f"The kernel kills what takes too much of the host's memory. {HOST}"
    how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    message = f"the process that recorded the step of {model.title} ended {how}."
    return PlannerError(message, f"{way_out} {PROBED}")
