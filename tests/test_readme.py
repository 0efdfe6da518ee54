"""The commands of README and docs/commands.md run, and the output shown is what they print.

A `sh` block holds commands, one a line; a `console` block holds `$ command` lines, each followed by
its true output. The two set-up commands are run by `.ci/run`, in a new virtual environment.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANNER = str(Path(sys.executable).with_name("planner"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = (README, (ROOT / "docs/commands.md").read_text(encoding="utf-8"))
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# On the CPU a probe of a whole Swin-T takes minutes: the same command, on a smaller model.
SMALLER = {
    "planner tune native:swin_tiny --trials 8 --output run": (
        "planner tune native:swin_tiny --trials 1 --output run --device cpu --batch-size 2 "
        "--set image_size=32 --set embed_dim=16 --set depths=2,2 --set num_heads=1,2 "
        "--set window_size=4 --precision fp32 --compile off"
    ),
    # All rows are compared in tests/test_published.py.
    "planner validate --published tests/truth/public.jsonl": (
        "planner validate --published some.jsonl"
    ),
}  # fmt: skip
# What is timed several times takes its time once, or less of it.
SHORTER = {"--measure 1s": "--measure 0.1s", "--workers 0,1 --prefetch 2": "--workers 0"}


def shortened(command: str) -> str:
    for shown, taken in SHORTER.items():
        command = command.replace(shown, taken)
    return command


def commands() -> Iterator[tuple[str, str | None]]:
    """(command, its shown output or None), page by page, without the set-up commands."""
    for kind, block in (found for page in PAGES for found in BLOCK.findall(page)):
        if kind == "sh":
            for line in block.splitlines():
                if line and "pip install" not in line:
                    yield line, None
            continue
        for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = shown.partition("\n")
            yield command, output.rstrip()


@pytest.mark.workers
def test_commands_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # as where the repository is the directory
    rows = (ROOT / "tests/truth/public.jsonl").read_text(encoding="utf-8").splitlines(True)
    (tmp_path / "some.jsonl").write_text("".join(rows[::8]), encoding="utf-8")
    for command, shown in commands():
        arguments = shlex.split(shortened(SMALLER.get(command, command)))
        assert arguments[0] == "planner", command
        ended = subprocess.run(
            [PLANNER, *arguments[1:]],
            capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}\n{ended.stderr}"
        if shown is not None:
            assert ended.stdout.rstrip() == shown, command


def test_set_up_commands_are_there() -> None:
    lines = [line for _, block in BLOCK.findall(README) for line in block.splitlines()]
    setups = [line for line in lines if "pip install" in line]
    assert len(setups) == 2
    assert setups[0].startswith("python -m venv .venv && . .venv/bin/activate && pip install . && ")
    # The very line that .ci/run takes.
    assert re.match(r"^pip install .* && pytest$", setups[1])


def test_extras_exist() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", README):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
