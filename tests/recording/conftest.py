"""One warm process for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.core.errors import PlannerError
from planner.machine.emulated.building import built_libraries
from planner.recording.client import Recorder


@pytest.fixture(scope="session")
def recorder() -> Iterator[Recorder]:
    """Skips where torch is a build without CUDA, or nothing can be compiled."""
    try:
        built_libraries()
    except PlannerError as error:
        pytest.skip(error.message)
    with Recorder() as warm:
        yield warm
