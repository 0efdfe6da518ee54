"""The emulated libraries in the cache: built once, by whoever comes first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.machine.emulated import building
from planner.machine.emulated.building import built_libraries

BUILD = "from planner.machine.emulated.building import built_libraries; print(built_libraries())"


@pytest.mark.emulated
def test_two_processes_build_the_same_at_once(tmp_path: Path, libraries: Path) -> None:
    environment = {**os.environ, "PLANNER_CACHE_DIR": str(tmp_path)}
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    command = [sys.executable, "-c", BUILD]
    both = [
        subprocess.Popen(command, env=environment, stdout=pipe, text=True, cwd=root)
        for _ in range(2)
    ]
    first, second = (process.communicate()[0].strip() for process in both)
    assert first == second
    assert [path.name for path in (tmp_path / "emulated").iterdir()] == [libraries.name]


@pytest.mark.emulated
def test_without_a_compiler_it_says_which_package_brings_one(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(PlannerError, match="apt-get install gcc libc6-dev"):
        built_libraries()
