"""A warm process on an emulated GPU: a request a line on its input, an answer a line on its output.

It has imported torch and the libraries, and never touches CUDA: each request is answered by a fork
of its own, in which CUDA begins with an empty device, on the card that the request names.
"""

from __future__ import annotations

import base64
import gc
import importlib
import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import NoReturn
from unittest import mock

from pydantic import BaseModel, TypeAdapter

from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, TrainSetting
from planner.ledger.cache import Kept, encode

CONFIGURATION = "PLANNER_EMULATED_GPU"  # what the emulated driver reads as CUDA begins
# What building a model imports, apart from its own library: found out once, not in every fork.
IMPORTED_LATE = {"transformers": ("transformers.modeling_utils",)}  # and torchao behind it
IMPORTS = (
    "torch._dynamo", "torch._inductor.output_code", "torch._inductor.runtime.triton_heuristics",
    "planner.recording.step",
)  # fmt: skip


class Request(BaseModel):
    """A step to record: `card` is the emulated machine's configuration, `workspaces` the sizes of
    cuBLAS's workspaces there; `folder`, `paths` and `environment` are the asker's."""

    model: Model
    setting: TrainSetting
    card: str
    workspaces: frozenset[int] = frozenset()
    is_peaks_only: bool = False
    folder: str = "."
    paths: list[str] = []
    environment: dict[str, str] = {}


class Name(BaseModel):
    """What a library says of a name: `planner.libraries.named`."""

    library: str
    name: str


class Answer(BaseModel):
    """The content of a cache file (a ledger, what is known of a name, or the error it ended with),
    and torch's own peaks of a step that nothing watched: bytes allocated and reserved, retries."""

    kept: str = ""
    peaks: tuple[int, int, int] | None = None


_ASKED: TypeAdapter[Name | Request] = TypeAdapter(Name | Request)


def main() -> None:
    """Answers until its input ends. What a model prints is for standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    wanted, known = [*IMPORTS], set[str]()
    for line in sys.stdin:
        request = _ASKED.validate_json(line)
        about = request if isinstance(request, Name) else request.model
        library = str(getattr(about, "library", ""))
        wanted += [library, *IMPORTED_LATE.get(library, ())]
        missing = [name for name in wanted if name not in {*known, "", "native", "microsoft"}]
        if missing:
            _import(missing)
            known.update(missing)
            gc.collect()
            gc.freeze()  # what was imported is no garbage, and no fork need look through it
        if (
            isinstance(request, Request) and request.setting.compiles
        ):  # while a compiler measures kernels it holds more than later
            _in_fork(line)
        print(_in_fork(line), file=answers, flush=True)


def _import(names: list[str]) -> None:
    """Some libraries ask for a device as they are imported, which would initialise CUDA here: none
    is to be seen by them."""
    import torch

    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao's registrations
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        for name in names:
            with suppress(Exception):  # what is missing is for the request that needs it to say
                importlib.import_module(name)
    from torch._dynamo import device_interface
    from torch.utils._triton import has_triton

    has_triton.cache_clear()
    device_interface._device_initialized = False
    assert not torch.cuda.is_initialized(), "a fork begins CUDA anew"


def _in_fork(line: str) -> str:
    """The answer of a process of its own; where it died, what is left to say."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer_and_leave(line, writer)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    if text.endswith("\n"):
        return text.strip()
    from planner.recording.faults import death_of  # needs torch, which the asker has not

    request = _ASKED.validate_json(line)
    assert isinstance(request, Request), "to look a name up ends no process"
    return _refused(death_of(request.model, os.waitstatus_to_exitcode(status))).model_dump_json()


def _answer_and_leave(line: str, writer: int) -> NoReturn:
    try:
        request = _ASKED.validate_json(line)
        if isinstance(request, Name):
            text = _answer_name(request).model_dump_json()
        else:
            os.environ |= request.environment | {CONFIGURATION: request.card}
            os.chdir(request.folder)
            sys.path[:0] = [path for path in request.paths if path not in sys.path]
            text = _answer(request).model_dump_json()
        with os.fdopen(writer, "w") as out:
            out.write(f"{text}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer_name(asked: Name) -> Answer:
    from planner.libraries.named import look_up_here

    try:
        return Answer(kept=_packed(look_up_here(asked.library, asked.name)))
    except PlannerError as error:
        return _refused(error)


def _answer(request: Request) -> Answer:
    from planner.recording import step
    from planner.recording.faults import error_of

    setting = ResolvedSetting(request.setting)
    try:
        if request.is_peaks_only:
            return Answer(peaks=tuple(step.record_peaks(request.model, setting)))
        ledger, peaks = step.record_ledger(request.model, setting, request.workspaces)
        return Answer(kept=_packed(ledger), peaks=tuple(peaks))
    except PlannerError as error:
        return _refused(error)
    except (Exception, SystemExit) as raised:
        return _refused(error_of(request.model, raised))


def _refused(error: PlannerError) -> Answer:
    return Answer(kept=_packed(error))


def _packed(kept: Kept) -> str:
    return base64.b64encode(encode({}, kept)).decode()


if __name__ == "__main__":
    main()
