from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.storages._rdb.storage import _VersionManager

from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.search.processes import SHARED_SERVERS, marked


@pytest.fixture(autouse=True, scope="session")
def _migrations_are_read_once() -> Iterator[None]:
    """Optuna reads all scripts of its database's history three times for each new study."""
    read = _VersionManager._create_alembic_script
    scripts: list[Any] = []

    def read_once(manager: Any) -> Any:
        if not scripts:
            scripts.append(read(manager))
        return scripts[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_VersionManager, "_create_alembic_script", read_once)
        yield


@pytest.fixture(scope="session")
def token() -> Iterator[str]:
    with marked() as found:
        yield found


@pytest.fixture(scope="session")
def fork_server(token: str) -> Iterator[ForkServer]:
    """One for all tests, ready: what a worker does must not reach the next."""
    with ForkServer() as found:
        run_probe(request_of("tiny"), deadline_seconds=AMPLE_SECONDS, fork_server=found)
        SHARED_SERVERS.append(found)
        yield found


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the driver's library, compiled: it answers as FAKE_NVML says."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("driver") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library
