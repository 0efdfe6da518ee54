"""Machines at one study, as docs/many-gpus.md shows them: nothing is probed twice, all agree."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.options import SearchOptions
from search.loop.search import Limits, Search
from search.loop.space import Choice, make_space
from search.loop.study import ProbeStudy
from search.loop.surrogate.prior import generic_prior
from tests.search.machines.park import MODULE, Park, finish
from tests.search.tables import GPU, MODEL, SMALL, make_record

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "tune_on_machines.slurm"

PLANNER = f"""#!/bin/sh
export PYTHONPATH={ROOT}
exec {sys.executable} -m {MODULE} "$@"
"""

# As many tasks as are asked for, each with its number, as srun starts them.
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


def test_it_ends_with_what_the_others_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on with what a lost one was at."""
    one = {**SMALL, "checkpointing": ("none",)}
    space = make_space(MODEL, GPU, restrict=one, batch_sizes=(8,))
    here, there = (ProbeStudy(space, storage=str(tmp_path / "a.journal")) for _ in range(2))
    waited: list[float] = []

    def begun(position: int) -> optuna.Trial:
        there.optuna.enqueue_trial(there.params.of(space.candidates[position]))
        trial = there.optuna.ask()
        there.params.suggest(trial)
        assert there.begin(trial, 60.0, None)
        return trial

    found, lost = begun(0), begun(1)

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            record = make_record(space.candidates[0].setting, probe_id="theirs")
            there.optuna.tell(found, there.tell(found, record))
            there.optuna.tell(lost, state=TrialState.FAIL)

    monkeypatch.setattr("search.loop.search.time.sleep", sleep)
    options = SearchOptions(budget_seconds=None, tolerance=0.0)
    search = Search(
        here, generic_prior(space, GPU), lambda choice, *_: make_record(choice.candidate.setting),
        Limits(), options,
    )  # fmt: skip
    search.run()
    assert len(waited) == 1
    assert "theirs" in search.seen
    assert {r.setting for r in search.records} == {c.setting for c in space.candidates}


@pytest.mark.parametrize("storage", ["{}/a.journal", "sqlite:///{}/study.db"])
def test_what_a_tuner_measured_whose_trial_was_freed_meanwhile_is_kept(
    tmp_path: Path, storage: str
) -> None:
    """It was suspended for long, and another took it for dead."""
    one = {axis: values[:1] for axis, values in SMALL.items()}
    space = make_space(MODEL, GPU, restrict=one, batch_sizes=(8, 16))
    here, there = (ProbeStudy(space, storage=storage.format(tmp_path)) for _ in range(2))
    asked: list[TrainSetting] = []

    def prober(choice: Choice, *_: object) -> MeasurementRecord:
        asked.append(choice.candidate.setting)
        if len(asked) == 1:
            (mine,) = there.optuna.get_trials(states=(TrialState.RUNNING,))
            there.optuna.tell(mine.number, state=TrialState.FAIL)
        return make_record(choice.candidate.setting)

    options = SearchOptions(budget_seconds=None, tolerance=0.0)
    search = Search(here, generic_prior(space, GPU), prober, Limits(), options)
    search.run()
    assert len(asked) == len(set(asked)) == 2
    assert {r.setting for r in there.records()} == set(asked)
