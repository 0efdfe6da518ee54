"""What docs/distributed.md shows of many machines, run as it stands: each machine is a process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.search.machines.park import MODULE, NUM_SETTINGS, OPTIONS, PATIENCE_SECONDS, Park

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "tune_on_machines.slurm"

PLANNER = f"""#!/bin/sh
export PYTHONPATH={ROOT}
exec {sys.executable} -m {MODULE} "$@"
"""

# As many tasks as the script's head asks for, each with its number, as srun starts them.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=0 ] && shift
for ((task = 0; task < SLURM_NTASKS; task++)); do
    export SLURM_PROCID=$task PRETEND_HOST=node$((task / SLURM_NTASKS_PER_NODE))
    "$@" &
done
wait
"""

SSH = """#!/bin/sh
export PRETEND_HOST="$1"
shift
exec sh -c "cd / && $*"
"""


@pytest.fixture
def park(tmp_path: Path) -> Iterator[Park]:
    (tmp_path / "bin").mkdir()
    for name, text in {"planner": PLANNER, "srun": SRUN, "ssh": SSH}.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    found = Park(tmp_path)
    yield found
    found.close()


def shown() -> list[str]:
    """The blocks of the section, in order: the script, the line."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    section = page[page.index("## Many machines") :]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


def run(park: Park, command: list[str], **variables: str) -> None:
    environment = park.environment(OPTIONS) | variables
    environment["PATH"] = f"{park.folder / 'bin'}:{environment['PATH']}"
    tuners = subprocess.Popen(
        command, cwd=park.folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    park.running.append(tuners)
    out, _ = tuners.communicate(timeout=PATIENCE_SECONDS)
    assert tuners.returncode == 0, out


def check(park: Park, *tuners: str) -> None:
    assert set(park.times_begun().values()) == {1}
    assert park.check_agreement(*(f"tuned/{name}" for name in tuners)).num_probes == NUM_SETTINGS


@pytest.mark.parametrize(
    ("tasks", "on_each"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.release)]
)
def test_the_script_of_slurm(park: Park, tasks: int, on_each: int) -> None:
    text = SCRIPT.read_text()
    assert shown()[0] == text, "docs/distributed.md shows the script as it is"
    asked = dict(re.findall(r"^#SBATCH --(\S+)=(\S+)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-task"]) == ("2", "8", "1")
    # Two machines; sixteen tuners are more than a busy machine bears.
    slurm = {"SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(on_each)}
    run(park, ["bash", str(SCRIPT), "native:swin_tiny"], **slurm)
    check(park, *map(str, range(tasks)))
    assert {host for host, _ in park.begun()} <= {"node0", "node1"}


@pytest.mark.release
def test_the_line_of_ssh(park: Park) -> None:
    run(park, ["bash", "-c", shown()[1]])
    check(park, "node1-0", "node1-1", "node2-0", "node2-1")
