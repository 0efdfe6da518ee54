from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planner.core.schema.loading import DataSource, LoaderRecord, LoaderSetting
from planner.training.loading.sources import find_source
from search.loader.probing import loader_server, probe_loader
from search.probe.parent.fork_server import ForkServer
from tests.search.processes import SHARED_SERVERS, nothing_more_remains

# Far beyond what any probe here takes: a deadline that is no part of the test.
AMPLE_SECONDS = 300.0
QUICK: dict[str, Any] = {
    "min_steps": 3, "median_precision": 10.0, "min_measure_seconds": 0.05,
    "max_measure_seconds": 2.0, "device": "cpu",
}  # fmt: skip
Probe = Callable[..., LoaderRecord]


@pytest.fixture(scope="session")
def server(token: str) -> Iterator[ForkServer]:
    """Ready, so that no deadline of a test pays for its imports."""
    with loader_server() as found:
        source = find_source("tests.search.loader.faulty_data:Good")
        setting = LoaderSetting(pipeline="own", workers=0, pin_memory=False)
        probe_loader(source, setting, deadline_seconds=AMPLE_SECONDS, fork_server=found, **QUICK)
        SHARED_SERVERS.append(found)
        yield found


@pytest.fixture
def probe(server: ForkServer) -> Probe:
    """A short probe: of a source, or of a Dataset of `faulty_data` by its name."""

    def run(
        data: DataSource | str, deadline_seconds: float = AMPLE_SECONDS, **how: Any
    ) -> LoaderRecord:
        source = data
        if isinstance(source, str):
            source = find_source(f"tests.search.loader.faulty_data:{source}")
        own = {"pipeline": "own"} if source.kind == "factory" else {}
        setting = LoaderSetting(
            **{"batch_size": 4, "workers": 2, "image_size": (8, 8), "pin_memory": False}
            | own
            | {name: how.pop(name) for name in list(how) if name in LoaderSetting.model_fields}
        )
        return probe_loader(
            source, setting, deadline_seconds=deadline_seconds, fork_server=server, **QUICK | how
        )

    return run


@pytest.fixture(autouse=True)
def _nothing_remains(request: pytest.FixtureRequest) -> Iterator[None]:
    if "server" not in request.fixturenames:
        yield
        return
    with nothing_more_remains(request.getfixturevalue("token")):
        yield
