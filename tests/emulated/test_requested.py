"""A trace asks for the same bytes in the same order as torch's own CUDA code."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from tests.emulated.conftest import ROOT
from tests.emulated.requested import MODULES, in_trace

pytestmark = pytest.mark.emulated
CARD = "a100-sxm-80gb"


def test_a_step_asks_for_what_torch_asks_for(libraries: Path) -> None:
    pairs = list(itertools.product([m.__name__ for m in MODULES], ["bf16", "fp32"]))
    with started(EmulatedMachine((emulated_gpu(CARD),))) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.emulated.requested"],
            input=json.dumps(pairs), env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(zip(pairs, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert {pair: in_trace(*pair, CARD) for pair in pairs} == found
