"""A fixture for pytest: `pytest_plugins = ["planner.programs.fixture"]` in a conftest.py.

def test_a_step_fits_a_4090(emulate):
    run = emulate(train_two_steps, gpu="RTX 4090")
    assert run.fits, run
"""

from collections.abc import Callable

import pytest

from planner.core.errors import PlannerError
from planner.machine.emulated.build import built_libraries
from planner.programs.emulated import EmulatedRun
from planner.programs.running import emulate as run_emulated


@pytest.fixture(scope="session")
def emulate() -> Callable[..., EmulatedRun]:
    """`planner.emulate`. Skips where torch is a build without CUDA, or no C compiler is there."""
    try:
        built_libraries()
    except PlannerError as error:
        pytest.skip(error.message)
    return run_emulated
