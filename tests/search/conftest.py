from __future__ import annotations

from collections.abc import Iterator

import pytest

from search.probe.nursery import Nursery
from search.probe.runner import run_probe
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.search.processes import marked


@pytest.fixture(scope="session")
def token() -> Iterator[str]:
    with marked() as found:
        yield found


@pytest.fixture(scope="session")
def nursery(token: str) -> Iterator[Nursery]:
    """One for all tests, ready: what a worker does must not reach the next."""
    with Nursery() as found:
        run_probe(request_of("tiny"), deadline_seconds=AMPLE_SECONDS, nursery=found)
        yield found
