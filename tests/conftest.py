"""The three tiers of the suite, and what no test may depend on.

The default run holds each law once, in three minutes. `.ci/run` adds what needs another program,
marked by it (`pytest --markers`); `pytest -m release` is for before a release.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from planner.ledger.ledger import WORKSPACE_VARIABLE
from planner.machine.hardware.overheads import LT_VARIABLE
from planner.memory.allocator_config import VARIABLES
from planner.step.tensor import plain_calls
from tests.steps import TINY_FIELDS
from tests.undurable import write_without_waiting

# Each leaves a test out of the default run, for `.ci/run`.
CI = ("compiler", "trainers", "emulated", "browser", "servers", "truth")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing of the user's decides a test: rates that a tuner measures first are kept among
    pytest's own files, and the allocator has its defaults.

    torch computes on one thread, in what tests start too. The models are so small that a second
    thread only spins: the twin steps of trainers took 8 times the CPU seconds.

    Hypothesis draws the same examples each time, and no property is held to the 200 ms that it
    gives an example: a busy machine takes longer.
    """
    settings.register_profile("planner", settings.default, deadline=None, derandomize=True)
    settings.load_profile("planner")
    set_hypothesis_home_dir(config.rootpath / ".pytest_cache" / "hypothesis")
    for name in (*VARIABLES, WORKSPACE_VARIABLE, LT_VARIABLE):  # an estimate reads them
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
    os.environ["XDG_CACHE_HOME"] = str(config.rootpath / ".pytest_cache" / "rates")
    write_without_waiting()


# Before pytest's own hook, which deselects by mark.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks.intersection(CI) and "release" not in marks:
            item.add_marker(pytest.mark.ci)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would a search in a test."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_stays() -> None:
    """Every recording collects garbage first. It need not look through all modules and tests
    again: over the collected suite that was a third of what the steps of native took."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_set_for_the_next() -> None:
    """Importing monai sets the size of cuBLAS's workspaces, and what measures a step sets threads,
    for all that this process does later: with two, sums depend on how busy the machine is."""
    os.environ.pop(WORKSPACE_VARIABLE, None)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _python_evaluates_frames() -> Iterator[None]:
    """A compiled call of an earlier test may have left its evaluator in the interpreter, and then
    callers hold their arguments: other lifetimes than those that recordings and shapes agree on."""
    with plain_calls():
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A small Swin's file, to be typed."""
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY_FIELDS))
    return str(file)
