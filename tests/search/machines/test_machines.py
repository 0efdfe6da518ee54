"""Machines at one study, as docs/many-gpus.md shows them: nothing is probed twice, all agree."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from search.loop.limits import Limits
from search.loop.session import Session
from search.loop.space import make_space
from search.loop.strategies.in_order import ListStrategy
from search.loop.study.optuna_study import make_study
from tests.search.machines.park import MODULE, Park, finish
from tests.search.tables import GPU, MODEL, SMALL, make_record

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "tune_on_machines.slurm"

PLANNER = f"""#!/bin/sh
export PYTHONPATH={ROOT}
exec {sys.executable} -m {MODULE} "$@"
"""

# As many tasks as are asked for, each with its number, as srun starts them; their clocks are a day
# apart.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=0 ] && shift
for ((task = 0; task < SLURM_NTASKS; task++)); do
    export SLURM_PROCID=$task PRETEND_HOST=node$((task / SLURM_NTASKS_PER_NODE))
    PRETEND_CLOCK=$((task * 86400)) "$@" &
done
wait
"""
SSH = """#!/bin/sh
export PRETEND_HOST="$1"
shift
exec sh -c "cd / && $*"
"""
# What `planner` is told of the line of ssh, where it is not run.
TELLS = """#!/bin/sh
echo "$PRETEND_HOST $*" >> "$PRETEND_BEGUN"
"""


@pytest.fixture
def park(tmp_path: Path) -> Iterator[Park]:
    (tmp_path / "bin").mkdir()
    found = Park(tmp_path)
    yield found
    found.close()


def run(park: Park, command: list[str], programs: dict[str, str], **variables: str) -> None:
    for name, text in programs.items():
        path = park.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    finish(park.start(command, PATH=f"{park.folder / 'bin'}:/usr/bin:/bin", **variables))


def shown_line() -> str:
    """The one block of the section."""
    page = (ROOT / "docs/many-gpus.md").read_text()
    section = page[page.index("## How do I search on many machines?") :]
    (line,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return str(line)


def test_the_script_of_slurm(park: Park) -> None:
    text = SCRIPT.read_text()
    asked = dict(re.findall(r"^#SBATCH --(\S+)=(\S+)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-task"]) == ("2", "8", "1")
    slurm = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    command = ["bash", str(SCRIPT), "native:swin_tiny"]
    run(park, command, {"planner": PLANNER, "srun": SRUN}, **slurm)
    park.check_agreement("tuned/0", "tuned/1")
    assert {host for host, _ in park.begun()} <= {"node0", "node1"}


def test_the_line_of_ssh_starts_a_tuner_on_each_gpu_of_one_study(park: Park) -> None:
    run(park, ["bash", "-c", shown_line()], {"planner": TELLS, "ssh": SSH})
    started = park.begun_file.read_text().splitlines()
    assert len(started) == len(set(started)) == 4
    assert {line.split()[0] for line in started} == {"node1", "node2"}
    (storage,) = {re.search(r"--storage (\S+)", line)[1] for line in started}
    assert storage.endswith(".journal")


@pytest.mark.parametrize("is_lost", [True, False])
def test_it_ends_with_what_the_others_find(tmp_path: Path, is_lost: bool) -> None:
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8,))
    here, there = (make_study(str(tmp_path / "a.journal"), tmp_path, space, None) for _ in range(2))
    there.holder = json.dumps(["elsewhere", "", 1, "1"])
    lease = there.lease(space.candidates[0], 60)
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if is_lost:
            there.release(lease, "its lease is over")
        else:
            there.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))

    session = Session(
        space, here, lambda choice, *_: make_record(choice.candidate.setting), Limits(),
        lambda choice: 60.0, None, sleep=sleep,
    )  # fmt: skip
    session.run(ListStrategy(space.candidates))
    assert len(waited) == 1
    assert len(session.records) == len(space)
    assert (lease.probe_id in session.seen) != is_lost
