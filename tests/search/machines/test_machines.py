"""Machines at one study, as docs/many-gpus.md shows them: nothing is probed twice, all agree."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from optuna.trial import TrialState

from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.options import SearchOptions
from search.loop.records import read_records
from search.loop.search import Limits, Search
from search.loop.space import Pick, make_space
from search.loop.study import ProbeStudy
from search.loop.surrogate.prior import generic_prior
from tests.search.tables import GPU, MODEL, SMALL, make_record
from tests.search.test_study import begun

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "tune_on_machines.slurm"

# Over an invented device, with torch's own allocator: else each probes its winner once more.
PLANNER = f"""#!/bin/sh
shift
export PYTHONPATH={ROOT}
exec {sys.executable} -m tests.search.typed "$@" --precision fp32,bf16 --checkpointing none \\
    --compile off --attention sdpa --optimizer adamw --batch-size 8,16,32,64 --tolerance 0% \\
    --budget none --allocator expandable_segments:False
"""
NUM_SETTINGS = 8
# As many tasks as are asked for, each with its number, as srun starts them.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=0 ] && shift
for ((task = 0; task < 2; task++)); do
    SLURM_PROCID=$task "$@" &
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
echo "$PRETEND_HOST $*"
"""


def run(folder: Path, command: list[str], **programs: str) -> str:
    """What a command prints in `folder`, beside these programs."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    known = {**os.environ, "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=known, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown_line() -> str:
    """The one block of the section."""
    page = (ROOT / "docs/many-gpus.md").read_text()
    section = page[page.index("## How do I search on many machines?") :]
    (line,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return str(line)


def test_the_script_of_slurm(tmp_path: Path) -> None:
    """Each setting was probed once; both tasks have all probes, and recommend the same."""
    text = SCRIPT.read_text()
    asked = dict(re.findall(r"^#SBATCH --(\S+)=(\S+)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-task"]) == ("2", "8", "1")
    run(tmp_path, ["bash", str(SCRIPT), "native:swin_tiny"], planner=PLANNER, srun=SRUN)
    folders = [tmp_path / "tuned" / task for task in ("0", "1")]
    files = [read_records(folder / "probes.jsonl") for folder in folders]
    for file in files:
        settings = [r.setting for r in file.records]
        assert len(settings) == len(set(settings)) == NUM_SETTINGS
        assert file.fault == ""
        assert {r.probe_id for r in file.records} == {r.probe_id for r in files[0].records}
    first, second = (json.loads((f / "recommendation.json").read_text()) for f in folders)
    for field in ("evidence", "runners_up", "num_probes"):
        assert first[field] == second[field]


def test_the_line_of_ssh_starts_a_tuner_on_each_gpu_of_one_study(tmp_path: Path) -> None:
    said = run(tmp_path, ["bash", "-c", shown_line()], planner=TELLS, ssh=SSH)
    started = said.splitlines()
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
    found, lost = (begun(there, position) for position in (0, 1))

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            record = make_record(space.candidates[0].setting, probe_id="theirs")
            there.optuna_study.tell(found, there.tell(found, record))
            there.optuna_study.tell(lost, state=TrialState.FAIL)

    monkeypatch.setattr("search.loop.search.time.sleep", sleep)
    options = SearchOptions(budget_seconds=None, tolerance=0.0)
    search = Search(
        here, generic_prior(space, GPU), lambda pick, *_: make_record(pick.candidate.setting),
        Limits(), options,
    )  # fmt: skip
    search.run()
    assert len(waited) == 1
    assert "theirs" in {record.probe_id for record in search.records}
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

    def prober(pick: Pick, *_: object) -> MeasurementRecord:
        asked.append(pick.candidate.setting)
        if len(asked) == 1:
            (mine,) = there.optuna_study.get_trials(states=(TrialState.RUNNING,))
            there.optuna_study.tell(mine.number, state=TrialState.FAIL)
        return make_record(pick.candidate.setting)

    options = SearchOptions(budget_seconds=None, tolerance=0.0)
    Search(here, generic_prior(space, GPU), prober, Limits(), options).run()
    assert len(asked) == len(set(asked)) == 2
    assert {r.setting for r in there.records()} == set(asked)
