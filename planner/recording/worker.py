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
from typing import Any, NoReturn
from unittest import mock

from pydantic import BaseModel

from planner.core.errors import PlannerError
from planner.core.schema import Model, TrainSetting
from planner.ledger.cache import encode
from planner.recording.client import CONFIGURATION

ENDED = "ended "  # an answer: with which status the fork did, before it could give another
# What building a model imports, apart from its own library: found out once, not in every fork.
IMPORTED_LATE = {"transformers": ("transformers.modeling_utils",)}  # and torchao behind it
IMPORTS = (
    "torch._dynamo", "torch._inductor.output_code", "torch._inductor.runtime.triton_heuristics",
    "planner.recording.step",
)  # fmt: skip


class Request(BaseModel):
    """To call `function`, a MODULE:NAME, with `arguments` and what is there of the next two, after
    the library is imported; the answer is the content of a cache file. `card` is the emulated
    machine's configuration; `folder`, `paths` and `environment` are the asker's."""

    function: str
    arguments: dict[str, Any]
    model: Model | None
    setting: TrainSetting | None
    card: str
    folder: str
    paths: list[str]
    environment: dict[str, str]


def main() -> None:
    """Answers until its input ends. What a model prints is for standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    wanted, known = [*IMPORTS], set[str]()
    for line in sys.stdin:
        request = Request.model_validate_json(line)
        library = str(request.arguments.get("library", getattr(request.model, "library", "")))
        wanted += [library, *IMPORTED_LATE.get(library, ())]
        missing = [name for name in wanted if name not in {*known, "", "native", "microsoft"}]
        if missing:
            _import(missing)
            known.update(missing)
            gc.collect()
            gc.freeze()  # what was imported is no garbage, and no fork need look through it
        if request.setting is not None and request.setting.compiles:
            _in_fork(request)  # while a compiler measures kernels it holds more than later
        print(_in_fork(request), file=answers, flush=True)


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


def _in_fork(request: Request) -> str:
    """The answer of a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer_and_leave(request, writer)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    return text.strip() or f"{ENDED}{os.waitstatus_to_exitcode(status)}"


def _answer_and_leave(request: Request, writer: int) -> NoReturn:
    try:
        os.environ |= request.environment | {CONFIGURATION: request.card}
        os.chdir(request.folder)
        sys.path[:0] = [path for path in request.paths if path not in sys.path]
        text = base64.b64encode(encode({}, _answer(request))).decode()
        with os.fdopen(writer, "w") as out:
            out.write(f"{text}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(request: Request) -> Any:
    from planner.recording.step import error_of

    module, _, name = request.function.partition(":")
    known = {"model": request.model, "setting": request.setting}
    given = request.arguments | {name: one for name, one in known.items() if one is not None}
    try:
        return getattr(importlib.import_module(module), name)(**given)
    except PlannerError as error:
        return error
    except (Exception, SystemExit) as raised:
        if request.model is None:
            raise
        return error_of(request.model, raised)


if __name__ == "__main__":
    main()
