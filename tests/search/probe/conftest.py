from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from search.probe.protocol import Report


@pytest.fixture
def report() -> Iterator[Report]:
    """What a worker tells its parent by; nobody listens."""
    reading, writing = os.pipe()
    yield Report(writing, "p")
    os.close(reading)
    os.close(writing)
