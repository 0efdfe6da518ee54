"""The search: short real probes on the target machine, and what they recommend.

    best = search.tune("native:swin_tiny", output="tuned")
    loader = search.find_loader("pictures")
    search.write_report("tuned", "report.html")

Names are imported when they are first used, as in `planner`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search.loader import find_loader
    from search.runs import report_estimate, write_report
    from search.tuning.tune import tune

_HOMES = {
    "find_loader": "search.loader",
    "report_estimate": "search.runs",
    "tune": "search.tuning.tune",
    "write_report": "search.runs",
}
_PROBING = ("find_loader", "tune")

__all__ = ["find_loader", "report_estimate", "tune", "write_report"]


def check_platform() -> None:
    """Raises UnsupportedError where probes cannot run: they need Linux, and above all its locks."""
    try:
        import fcntl  # noqa: F401
    except ModuleNotFoundError:
        from planner.core.errors import UnsupportedError

        raise UnsupportedError(
            "a search and its probes need Linux, and this Python has no fcntl.",
            "Run it on the machine that is to train; 'planner estimate' answers anywhere.",
        ) from None


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'search' has no attribute {name!r}")
    if name in _PROBING:
        check_platform()
    return getattr(importlib.import_module(_HOMES[name]), name)
