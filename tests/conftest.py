"""Which cases of the large matrices the default run takes, and which the long one.

The default run takes every second case of the three largest; `pytest -m long` takes the others and
everything marked long. PLANNER_LONG_SHARE=N takes every N-th of those, but all of the search's: so
`.ci/run` stays within its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from planner.hardware.overheads import LT_VARIABLE, WORKSPACE_VARIABLE
from planner.memory.allocator_config import VARIABLES
from planner.step.frames import plain_calls

HALVED = ("test_timm_shapes.py", "test_torchvision_shapes.py", "test_transformers_shapes.py")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing of the user's decides a test: rates that a tuner measures first are kept among
    pytest's own files, and the allocator has its defaults."""
    for name in (
        *VARIABLES,
        WORKSPACE_VARIABLE,
        LT_VARIABLE,
    ):  # an estimate reads them where none are given
        os.environ.pop(name, None)
    os.environ["XDG_CACHE_HOME"] = str(config.rootpath / ".pytest_cache" / "rates")


# Before pytest's own hook, which deselects by mark.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = 0
    for item in items:
        if item.path.name in HALVED and item.get_closest_marker("long") is None:
            seen += 1
            if seen % 2 == 0:
                item.add_marker(pytest.mark.long)
    share = int(os.environ.get("PLANNER_LONG_SHARE", "1"))
    long = [
        item
        for item in items
        if item.get_closest_marker("long") is not None and "search" not in item.path.parts
    ]
    left_out = {id(item) for index, item in enumerate(long) if index % share}
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.fixture(autouse=True)
def _python_evaluates_frames() -> Iterator[None]:
    """A compiled call of an earlier test may have left its evaluator in the interpreter, and then
    callers hold their arguments: other lifetimes than those that traces and shapes agree on."""
    with plain_calls():
        yield
