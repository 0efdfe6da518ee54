"""What a person imports: quick, typed, and the same whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import planner

HEAVY = (
    "torch",
    "optuna",
    "numpy",
    "timm",
    "transformers",
    "torchvision",
    "matplotlib",
    "sqlalchemy",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "before", ["", "import planner.estimation", "from planner.estimation import Estimate"]
)
def test_estimate_is_a_function_whatever_was_imported_before(before: str) -> None:
    printed = run(
        f"{before}\nimport planner\n"
        "print(planner.estimate('native:swin_tiny', batch_size=2).num_parameters)"
    )
    assert printed == "28288354"  # Swin-T with 1000 classes, as in timm


@pytest.mark.parametrize("before", ["", "import planner.trainers.emission", "import search"])
def test_emit_is_a_function_whatever_was_imported_before(before: str) -> None:
    assert run(f"{before}\nimport planner\nprint(callable(planner.emit))") == "True"


def test_importing_planner_imports_next_to_nothing() -> None:
    printed = run("import planner, sys; print('pydantic' in sys.modules, planner.__version__)")
    assert printed == f"False {planner.__version__}"


def test_every_public_name_is_there() -> None:
    run("import planner\nfor name in planner.__all__: getattr(planner, name)")


@pytest.mark.parametrize(
    "arguments",
    [
        ["estimate", "native:swin_base", "--batch-size", "64", "--json"],
        ["estimate", "timm:swinv2_tiny_window8_256", "--gpu", "rtx3090"],
        ["estimate", "native:swin_tiny", "--memory", "8GiB", "--max-batch"],
        ["gpus"],
        ["models"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_answering_before_launch_imports_nothing_heavy(arguments: list[str]) -> None:
    printed = run(
        "import sys\nfrom planner.cli import main\n"
        f"sys.argv = ['planner', *{arguments!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert printed.splitlines()[-1] == "[]"
