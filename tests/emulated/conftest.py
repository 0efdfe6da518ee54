"""Programs that run on an emulated GPU: they print one line of JSON, and `run` gives its value."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.core.errors import PlannerError
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from planner.machine.emulated.build import built_libraries
from planner.programs.emulated import EmulatedRun

ROOT = Path(__file__).parents[2]
RTX_3090 = emulated_gpu("rtx-3090")
Run = Callable[..., Any]


@pytest.fixture(scope="session")
def libraries() -> Path:
    """Skips where torch is a build without CUDA, or nothing can be compiled."""
    try:
        return built_libraries()
    except PlannerError as error:
        pytest.skip(error.message)


def answer(environment: dict[str, str], program: str, *arguments: str, **variables: str) -> Any:
    """What `program` printed last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def emulated(
    folder: Path, program: str, *arguments: str, by: Sequence[str] = (), **options: Any
) -> tuple[EmulatedRun, str]:
    """The run of a program by `planner.emulate`, and what the program said."""
    file = folder / "train.py"
    file.write_text(program)
    with (folder / "said").open("w+") as said:
        command = [sys.executable, *by, str(file), *arguments]
        run = planner.emulate(command, stdout=said, **options)
        said.seek(0)
        return run, said.read()


@pytest.fixture
def run(libraries: Path) -> Run:
    """`run(program, machine, **variables)`: on an RTX 3090 unless another machine is given."""

    def on_machine(program: str, machine: EmulatedMachine | None = None, **variables: str) -> Any:
        with started(machine or EmulatedMachine((RTX_3090,))) as environment:
            return answer(environment, program, **variables)

    return on_machine
