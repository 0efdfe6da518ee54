"""Python's own way of calling functions, which lifetimes on shapes rest on.

A storage dies with its last reference, so it matters who holds an argument during a call: CPython
moves it into the called frame, and the caller keeps none. `torch.compile` puts an evaluator of its
own in the interpreter (PEP 523), and then the caller keeps its arguments until the call returns
(CPython's `CALL` makes a frame in place only where no such evaluator is set). It is gone again
after each compiled call, but stays where a thread ended within one (seen with torch 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from sys import getrefcount


@contextmanager
def plain_calls() -> Iterator[None]:
    """Calls as CPython makes them by itself, whatever evaluates frames outside of this block."""
    if "torch" not in sys.modules or not _callers_keep_arguments():
        yield
        return
    import ctypes

    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api._PyInterpreterState_GetEvalFrameFunc.restype = ctypes.c_void_p
    api._PyInterpreterState_GetEvalFrameFunc.argtypes = [ctypes.c_void_p]
    api._PyInterpreterState_SetEvalFrameFunc.restype = None
    api._PyInterpreterState_SetEvalFrameFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    interpreter = api.PyInterpreterState_Get()
    evaluator = api._PyInterpreterState_GetEvalFrameFunc(interpreter)
    own = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p)
    api._PyInterpreterState_SetEvalFrameFunc(interpreter, own)
    try:
        yield
    finally:
        api._PyInterpreterState_SetEvalFrameFunc(interpreter, evaluator)


def _callers_keep_arguments() -> bool:
    """Whether an argument has more references than the callee's name and getrefcount's own."""
    return _count_references(object()) > 2


def _count_references(argument: object) -> int:
    return getrefcount(argument)
