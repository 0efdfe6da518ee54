"""The commands of README and docs run, and the output shown is what they print (tests/outputs.py).

README's two set-up commands are run by `.ci/run`, in a new virtual environment.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from planner.core.errors import PlannerError
from planner.machine.emulated.build import built_libraries
from tests.outputs import PAGES, ROOT, Shown, commands, cut_as, printed_by, run

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
SMALLER_IN_PYTHON = {
    "planner.SwinConfig()": (
        "planner.SwinConfig(image_size=32, embed_dim=16, depths=(2, 2), num_heads=(1, 2), "
        "window_size=4)"
    ),
    "trials=4": 'trials=1, batch_size=[2], restrict={"precision": ["fp32"], "compile": ["off"]}',
}


def is_emulated(page: Path) -> bool:
    return any(one.command.startswith("planner emulate ") for one in commands(page))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=page.name,
            marks=pytest.mark.emulated if is_emulated(page) else pytest.mark.trainers,
        )
        for page in PAGES
        if commands(page)
    ],
)  # fmt: skip
def test_the_commands_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    if is_emulated(page):
        try:
            built_libraries()
        except PlannerError as error:
            pytest.skip(error.message)
    for one, printed in run(page, tmp_path):
        if one.output is not None:
            assert one.output == cut_as(one.output, printed), one.command


QUICK = [one for page in PAGES for one in commands(page) if one.output and one.is_quick]


@pytest.mark.parametrize("one", QUICK, ids=[one.command[8:60] for one in QUICK])
def test_estimates_are_those_of_the_newest_torch(
    one: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert one.output == cut_as(one.output or "", printed_by(one))


@pytest.mark.trainers
def test_the_python_of_the_commands_runs(tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", COMMANDS, re.MULTILINE | re.DOTALL)
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


def test_set_up_commands_are_there() -> None:
    """The very lines that .ci/run takes."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    patterns = re.findall(r"grep -m 1 '(\S.*?)' README\.md", script)
    assert len(patterns) == 2
    for pattern in patterns:
        assert len(re.findall(pattern, README, re.MULTILINE)) == 1, pattern


def test_what_needs_no_torch_has_the_packages_that_are_named() -> None:
    """All others of the project's dependencies: tests/test_public_api.py runs it without them."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    (line,) = re.findall(r"^pip install (.*) && pip install --no-deps \.$", COMMANDS, re.MULTILINE)
    assert wanted - set(line.split()) == {"torch", "optuna", "numpy", "sqlalchemy", "plotly"}


def test_extras_exist() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", README + COMMANDS):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
