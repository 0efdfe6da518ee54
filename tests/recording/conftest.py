"""One warm process for all tests of a session."""

import pytest

from planner.core.errors import PlannerError
from planner.machine.emulated.build import built_libraries
from planner.recording import recordings
from planner.recording.recordings import RecordingServer


@pytest.fixture(scope="session")
def recorder() -> RecordingServer:
    """Skips where torch is a build without CUDA, or nothing can be compiled."""
    try:
        built_libraries()
    except PlannerError as error:
        pytest.skip(error.message)
    return recordings.recorder
