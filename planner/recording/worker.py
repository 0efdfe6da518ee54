"""Answers a request to record in a fork of a warm process: CUDA begins there with an empty device,
on the emulated card that the request names."""

from __future__ import annotations

import base64
import importlib
import os
import sys
import traceback
from typing import Any, NoReturn

from pydantic import BaseModel

from planner.core.errors import PlannerError
from planner.core.schema import Model, TrainSetting
from planner.ledger.cache import encode
from planner.recording.client import CONFIGURATION

_PIECE = 1 << 16  # bytes that a socket takes at once


class Request(BaseModel):
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


def answer(channel: int, given: str) -> NoReturn:
    """Says what the function of a `Request` returns, as the content of a cache file, in pieces."""
    try:
        request = Request.model_validate_json(given)
        os.environ |= request.environment | {CONFIGURATION: request.card}
        os.chdir(request.folder)
        sys.path[:0] = [path for path in request.paths if path not in sys.path]
        found = base64.b64encode(encode({}, _answer(request)))
        for start in range(0, len(found), _PIECE):
            os.write(channel, found[start : start + _PIECE])
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
