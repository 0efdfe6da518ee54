"""Each small program of `programs.py` runs on a card of each capability that torch has kernels
for, and what is not emulated says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from planner.machine.emulated.build import architectures
from planner.machine.torch_build import has_code_for
from tests.emulated import table
from tests.emulated.conftest import ROOT
from tests.emulated.programs import NEEDS, PROGRAMS

pytestmark = pytest.mark.emulated
FIRST = "h100-sxm-80gb"
OTHERS = [pytest.param(c, marks=pytest.mark.release) for c in table.CARDS if c != FIRST]


@pytest.mark.parametrize("card", [FIRST, *OTHERS])
def test_every_program_runs_on_it(libraries: Path, card: str) -> None:
    """But for what cards of its capability do not have; and alone it takes what it took after the
    others."""
    found, said = table.run_on(card)
    assert set(found) == set(PROGRAMS)
    failed = {name for name, row in found.items() if "failed" in row}
    capability = emulated_gpu(card).capability
    expected = {name for name in PROGRAMS if NEEDS.get(name, (0, 0)) > capability}
    assert failed == expected, {name: found[name] for name in failed ^ expected}
    assert "is not emulated" not in said
    alone = "backward_alone", "sdpa_fp16", "conv_half", "lstm", "nested_encoder"
    assert table.run_on(card, *alone)[0] == {name: found[name] for name in alone}


def test_the_papers_show_the_kept_table() -> None:
    paper = (ROOT / "tests/truth/TABLES.md").read_text()
    assert table.as_text(json.loads(table.RECORD_CONFIG.read_text())) in paper


def test_a_card_without_kernels_has_those_of_another_and_says_so_once(libraries: Path) -> None:
    """torch's builds for CUDA 13 have none for Volta."""
    gpu = emulated_gpu("v100-sxm-16gb")
    lacks = not has_code_for((7, 0), architectures())
    assert gpu.capability == ((7, 5) if lacks else (7, 0))
    assert gpu.name.endswith(" as 7.5") is lacks
    assert (gpu.num_sms, gpu.threads_per_sm) == (80, 2048)  # NVIDIA Tesla V100 whitepaper, table 1
    program = "import torch; torch.ones(8, device='cuda'); print(torch.cuda.get_arch_list())"
    with started(EmulatedMachine((gpu,))) as environment:
        done = [
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program],
                env=environment, capture_output=True, text=True, check=True,
            )
            for _ in range(2)
        ]  # fmt: skip
    assert done[0].stdout.strip() == str(list(architectures()))
    assert ("no kernels for compute capability 7.0" in done[0].stderr) is lacks
    assert ("--force-reinstall" in done[0].stderr) is lacks
    assert "no kernels" not in done[1].stderr


SPARSE = """
import torch
rows = torch.arange(9, device="cuda")
a = torch.sparse_csr_tensor(rows, torch.zeros(8, dtype=torch.long, device="cuda"),
                            torch.ones(8, device="cuda"), (8, 8))
(a @ a).sum()
"""
SHARED_SEGMENT = """
import os, torch
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
torch.ones(8, device="cuda").untyped_storage()._share_cuda_()
"""


@pytest.mark.parametrize(
    ("program", "function"),
    [(SPARSE, "cusparseSpGEMM_createDescr"), (SHARED_SEGMENT, "cuMemExportToShareableHandle")],
)
def test_what_is_not_emulated_is_named_as_the_emulation_s_fault(
    libraries: Path, program: str, function: str
) -> None:
    """Of a product of sparse matrices the size depends on values; the segments that another
    process may map are those of cudaMalloc."""
    with started(EmulatedMachine((emulated_gpu("rtx-3090"),))) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("planner: ")]
    assert len(said) == 1
    assert f"{function} is not emulated" in said[0]
    assert "the emulation's fault" in said[0]
