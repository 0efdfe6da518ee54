"""docs/your-own-model.md: its file is written as it stands, and its commands run in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planner.training.tasks.contract import is_task

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/your-own-model.md").read_text(encoding="utf-8")
(SOURCE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(TYPED,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# On a CPU, and no more of it than shows that it runs.
SHORTER = {
    "--budget 10m": "--trials 1 --device cpu --batch-size 2 --precision fp32 --compile off",
    "--steps 20": "--steps 1 --device cpu",
}


def test_its_task_is_one() -> None:
    names: dict[str, type] = {}
    exec(SOURCE, names)
    assert is_task(names["Tagging"]())
    assert "`tagging.py`" in PAGE


@pytest.mark.workers
def test_its_commands_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "tagging.py").write_text(SOURCE)
    for line in TYPED.splitlines():
        for shown, taken in SHORTER.items():
            line = line.replace(shown, taken)
        name, *arguments = shlex.split(line)
        module = ["-m", "planner"] if name == "planner" else []
        ended = subprocess.run(
            [sys.executable, *module, *arguments],
            capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
                "OMP_NUM_THREADS": "1", "PLANNER_CACHE_DIR": str(tmp_path / "cache"),
            },
        )  # fmt: skip
        assert ended.returncode == 0, f"{line}\n{ended.stderr}"
    assert "sequences/s" in ended.stdout, "the last line trains the task"
