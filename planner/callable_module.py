"""Modules that can be called: `planner.estimate` is a module, and the function people want of it.

Whoever imports a submodule first makes Python bind its name on the package; so that
`planner.estimate(...)` means the function whatever was imported before, the module passes the call
on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(name: str, function: Callable[..., Any]) -> None:
    """From here on, calling the module called `name` calls `function`."""

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    CallableModule.__call__.__doc__ = function.__doc__
    sys.modules[name].__class__ = CallableModule
