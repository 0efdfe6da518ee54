"""Steps on emulated GPUs, recorded: what torch's own CUDA code allocates where no GPU is.

    python -m tests.truth.record_emulated               all runs below, by the installed torch
    python -m tests.truth.record_emulated rtx-3090 …    those of these cards only

Each run is `python -m tests.truth.record` on an emulated machine, into
`tests/truth/emulated/CARD-MATRIX-torch-VERSION.jsonl`; one that was interrupted goes on. It needs
torch's CUDA build and a C compiler. `python -m tests.truth.emulated_steps` shows what came of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from planner.core.torch_version import torch_version
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started

TRUTH = Path(__file__).with_name("emulated")


@dataclass(frozen=True)
class Run:
    """A matrix on machines of `num_gpus` cards, with what the environment says besides."""

    card: str
    matrix: str
    num_gpus: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        version = ".".join(map(str, torch_version()))
        options = "".join(f"-{value.split(':')[0]}" for value in self.environment.values())
        return TRUTH / f"{self.card}-{self.matrix}{options}-torch-{version}.jsonl"


# From 40 multiprocessors (T4) to 132 (H100): the scratch of reductions depends on them.
RUNS = (
    Run("rtx-3090", "steps"),
    Run("a100-sxm-80gb", "steps"),
    Run("a100-sxm-80gb", "few"),
    Run("h100-sxm-80gb", "few"),
    Run("rtx-4090", "few"),
    Run("t4", "few"),
    Run(
        "a100-sxm-80gb", "few", environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ),
    Run("a100-sxm-80gb", "several", num_gpus=2),
    Run("a100-sxm-80gb", "compiled"),
)


def record(run: Run) -> None:
    machine = EmulatedMachine((emulated_gpu(run.card),) * run.num_gpus)
    command = [sys.executable, "-m", "tests.truth.record", str(TRUTH / f"{run.matrix}.yaml")]
    command += ["--device", "cuda:0", "--record", str(run.path)]
    with started(machine) as environment:
        subprocess.run(command, env={**environment, **run.environment}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="cards or matrices")
    only = parser.parse_args().only
    for run in RUNS:
        if not only or {run.card, run.matrix} & set(only):
            record(run)


if __name__ == "__main__":
    main()
