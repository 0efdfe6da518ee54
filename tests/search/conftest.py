import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pynvml
import pytest

from planner.core.units import GIB
from planner.machine import nvml
from planner.machine.torch_build import TorchBuild
from search.probe import device
from search.probe.device import MemoryInUse
from search.probe.protocol import Report
from search.tuning import tune as tune_file
from tests.search.typed import pretend_gpu


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, driver_library: Path) -> None:
    """The stand-in for the driver's library is the one that is asked."""
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(driver_library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(nvml, "_is_ready", lambda: True)


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the driver's library, compiled: it answers as FAKE_NVML says."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("driver") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture(autouse=True)
def _no_torch_is_asked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What GPUs and libraries torch has is asked of a process that imports it, which takes seconds:
    here it has no GPU, unless a test invents a whole machine. What is told here is not remembered:
    a search of another test would be refused as one of other software."""
    monkeypatch.setattr(device, "_releases", cache(device._releases.__wrapped__))
    if "machine" not in request.fixturenames:
        told = TorchBuild("2.13.0+cu130", cuda="13.0", available=True)
        monkeypatch.setattr(device, "_ask_torch", lambda index: told)
        monkeypatch.setattr(device.torch_build, "ask_torch", lambda environ, tried: told)


@pytest.fixture
def free_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tune` finds an invented GPU of 16 GiB, all of it free."""
    pretend_gpu(monkeypatch.setattr)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, free_gpu: None) -> None:
    """Others hold 2 GiB of it."""
    held = MemoryInUse(16 * GIB, 2 * GIB, 14 * GIB)
    monkeypatch.setattr(tune_file, "least_free", lambda wanted: held)


@pytest.fixture
def report() -> Iterator[Report]:
    """What a worker tells its parent by; nobody listens."""
    reading, writing = os.pipe()
    yield Report(writing)
    os.close(reading)
    os.close(writing)
