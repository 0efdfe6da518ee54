"""The commands of README and docs/commands.md run, and the output shown is what they print.

A `sh` block holds commands, one a line; a `console` block holds `$ command` lines, each followed by
its true output, or the beginning of it where the last line is "…". The two set-up commands are run
by `.ci/run`, in a new virtual environment.
Estimates move with torch's versions: the figures shown are those of the newest that was tried.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest
from click.testing import CliRunner

from planner.cli import cli
from planner.core.torch_version import NEWEST_TRIED, as_of
from tests.trainers.running.harness import make_pictures

MACHINE = Path(__file__).parent / "environment/machines/rocm.json"
ESTIMATES = ("estimate", "advise")
ROOT = Path(__file__).parents[1]
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
}  # fmt: skip
# What is timed several times takes its time once, or less of it.
SHORTER = {"--workers 0,1 --prefetch 2": "--workers 0"}

SMALLER_IN_PYTHON = {
    "planner.SwinConfig()": (
        "planner.SwinConfig(image_size=32, embed_dim=16, depths=(2, 2), num_heads=(1, 2), "
        "window_size=4)"
    ),
    "trials=4": 'trials=1, batch_size=[2], restrict={"precision": ["fp32"], "compile": ["off"]}',
}


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


def is_printed(shown: str, printed: str) -> bool:
    if shown.endswith("\n…"):
        return printed.startswith(shown.removesuffix("…"))
    return printed.rstrip() == shown


@pytest.mark.trainers
def test_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has torch already; what they start for themselves are processes."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # as where the repository is the directory
    make_pictures(tmp_path / "pictures")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for command, shown in commands():
        typed, _, kept = shortened(SMALLER.get(command, command)).partition(" > ")
        program, *arguments = shlex.split(typed)
        if program != "planner":  # a shell's own line: tests/cli has completion
            continue
        ended = CliRunner().invoke(cli, arguments)
        assert ended.exit_code == 0, f"{command}\n{ended.stderr}"
        if kept and not kept.startswith("~"):  # what a shell would do
            (tmp_path / kept).write_text(ended.stdout)
        if shown is not None and command.split()[1] not in ESTIMATES:
            assert is_printed(shown, ended.stdout), f"{command}\n{ended.stdout}"


@pytest.mark.trainers
def test_the_python_of_the_commands_runs(tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGES[1], re.MULTILINE | re.DOTALL)
    for shown, taken in SMALLER_IN_PYTHON.items():
        assert shown in source
        source = source.replace(shown, taken)
    ended = subprocess.run(
        [sys.executable, "-c", f"if __name__ == '__main__':\n{indent(source, '    ')}"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rstrip().splitlines()[-1].startswith("Predicted, not measured: ")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("command", "shown"), [c for c in commands() if c[1] and c[0].split()[1] in ESTIMATES]
)
def test_estimates_are_those_of_the_newest_torch(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with as_of(".".join(map(str, NEWEST_TRIED))):
        printed = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert printed.exit_code == 0, printed.output
    assert is_printed(shown, printed.stdout), printed.stdout


def test_set_up_commands_are_there() -> None:
    lines = [line for _, block in BLOCK.findall(README) for line in block.splitlines()]
    setups = [line for line in lines if "pip install" in line]
    assert len(setups) == 3
    assert setups[0].startswith("python -m venv .venv && . .venv/bin/activate && pip install . && ")
    assert setups[1].endswith(" && pip install --no-deps .")
    # The very line that .ci/run takes.
    assert re.match(r"^pip install .* && pytest$", setups[2])


def test_what_needs_no_torch_runs_with_the_packages_that_readme_installs(tmp_path: Path) -> None:
    """All others of the project's dependencies cannot be imported."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    (line,) = re.findall(r"^pip install (.*) && pip install --no-deps \.$", README, re.MULTILINE)
    missing = wanted - set(line.split())
    assert missing == {"torch", "optuna", "numpy", "sqlalchemy", "plotly"}
    program = f"""
import sys
for name in {missing}:
    sys.modules[name] = None
from planner.cli import main
for line in (
    "estimate native:swin_tiny --batch-size 64 --gpu RTX4090",
    "advise native:swin_tiny --batch-size 256 --gpu RTX4090",
    "explain log.txt", "emit --help", "doctor {MACHINE}",
):
    try:
        main(line.split())
    except SystemExit:
        pass
"""
    (tmp_path / "log.txt").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 0
    assert "In the log: max_memory_allocated " in ended.stdout
    assert "processors 192" in ended.stdout


def test_extras_exist() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", README):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
