"""The search: short real training probes on the target device, and what they recommend.

    best = search.tune("native:swin_tiny", output="tuned")

Imported when it is first used, like everything in `planner`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search.tuning import tune

__all__ = ["tune"]


def check_platform() -> None:
    """Raises UnsupportedError where probes cannot run: they need Linux, and above all its locks."""
    try:
        import fcntl  # noqa: F401
    except ModuleNotFoundError:
        from planner.errors import UnsupportedError

        raise UnsupportedError(
            "a search and its probes need Linux, and this Python has no fcntl.",
            "Run it on the machine that is to train; 'planner estimate' answers anywhere.",
        ) from None


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'search' has no attribute {name!r}")
    check_platform()
    return importlib.import_module("search.tuning").tune
