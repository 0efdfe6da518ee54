"""Small steps in a trace, held to torch's own CUDA code, request by request."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from planner.ledger.ledger import Allocated, Freed, Scratch  # noqa: E402
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started  # noqa: E402
from planner.machine.hardware.catalogue import find_gpu  # noqa: E402
from planner.machine.hardware.overheads import processors_of  # noqa: E402
from planner.memory.scratch import scratch_bytes  # noqa: E402
from planner.trace.cuda_rules import as_on_cuda  # noqa: E402
from planner.trace.recorder import Recorder  # noqa: E402
from tests.emulated.conftest import ROOT  # noqa: E402
from tests.emulated.requests import STEPS, Request, normalised, run  # noqa: E402

pytestmark = pytest.mark.emulated
CARD = "a100-sxm-80gb"


@pytest.fixture(scope="module")
def on_card(libraries: Path) -> dict[str, list[Request]]:
    with started(EmulatedMachine((emulated_gpu(CARD),))) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.emulated.requests"],
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [Request(*values) for values in each] for name, each in found.items()}


def in_trace(name: str) -> list[Request]:
    device, found = processors_of(find_gpu(CARD)), list[Request]()
    held, numbers = dict[int, tuple[int, int]](), itertools.count()
    with FakeTensorMode(), Recorder("in_place") as recorder, as_on_cuda():
        start: list[int] = []
        run(name, "cpu", lambda: start.append(len(recorder.events)))
        events = list(recorder.events)
    for event in events[start[0] :]:
        if isinstance(event, Allocated | Scratch):
            size = event.num_bytes
            if isinstance(event, Scratch):
                size = scratch_bytes(device, event.law, event.sizes)
            if size:
                held[event.storage] = size, next(numbers)
                found.append(Request("alloc", *held[event.storage]))
        elif isinstance(event, Freed) and event.storage in held:
            found.append(Request("free", *held.pop(event.storage)))
    return found


@pytest.mark.parametrize("name", STEPS)
def test_a_trace_asks_for_what_torch_asks_for(on_card: dict[str, list[Request]], name: str) -> None:
    assert normalised(in_trace(name)) == normalised(on_card[name])
