"""The name of the module that is running."""

from __future__ import annotations

import sys

from torch import nn

# Its frames hold the module they run in `self` for as long as they last.
_CALL = nn.Module._wrapped_call_impl.__code__


class ModulePaths:
    """Knows the modules of a model by name (`layers.2.blocks.0.attn`) and finds the running one.

    Hooks would tell as much, but they change how a module is called, and so how long its inputs
    live. Reading `self` of a caller's frame changes nothing.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(module): name for name, module in root.named_modules()}

    def current(self) -> str:
        """The innermost running module's name; "" in the root, in backward and in the optimizer."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                name: str = self._names.get(id(frame.f_locals["self"]), "")
                return name
            frame = frame.f_back  # type: ignore[assignment]
        return ""
