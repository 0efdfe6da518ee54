"""Each small program of `programs.py` runs on a card of each capability that torch has kernels
for, and what is not emulated says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from tests.emulated.conftest import ROOT
from tests.emulated.programs import NEEDS, PROGRAMS

pytestmark = pytest.mark.emulated
OTHERS = ("t4", "a100-sxm-80gb", "rtx-3090", "rtx-4090", "b200", "rtx-5090")


@pytest.mark.parametrize(
    "card", ["h100-sxm-80gb", *(pytest.param(card, marks=pytest.mark.release) for card in OTHERS)]
)
def test_every_program_runs_on_it(libraries: Path, card: str) -> None:
    """But for what cards of its capability do not have."""
    gpu = emulated_gpu(card)
    with started(EmulatedMachine((gpu,))) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.emulated.programs"],
            env={**environment, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(found) == set(PROGRAMS)
    failed = {name for name, row in found.items() if "failed" in row}
    expected = {name for name in PROGRAMS if NEEDS.get(name, (0, 0)) > gpu.capability}
    assert failed == expected, {name: found[name] for name in failed ^ expected}
    assert "is not emulated" not in done.stderr


NOT_EMULATED = """
import torch
rows = torch.arange(9, device="cuda")
a = torch.sparse_csr_tensor(rows, torch.zeros(8, dtype=torch.long, device="cuda"),
                            torch.ones(8, device="cuda"), (8, 8))
(a @ a).sum()
"""


def test_what_is_not_emulated_is_named_as_the_emulation_s_fault(libraries: Path) -> None:
    """Of a product of sparse matrices the size depends on values."""
    with started(EmulatedMachine((emulated_gpu("rtx-3090"),))) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", NOT_EMULATED],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("planner: ")]
    assert len(said) == 1
    assert "cusparseSpGEMM_createDescr is not emulated" in said[0]
    assert "the emulation's fault" in said[0]
