"""What a shell completes: in process by click's own classes, and in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import click
import pytest
from click.shell_completion import FishComplete

from planner.cli import COMMANDS, COMPLETION, cli
from planner.core.schema import TrainSetting
from planner.core.schema.validation import declared_options
from planner.libraries.registry import SPECS
from planner.machine.hardware import all_gpus
from planner.trainers.registry import TARGETS
from tests.cli.contexts import command_context

PLANNER = Path(sys.executable).with_name("planner")


def complete(*typed: str) -> list[str]:
    """What the last of these words may become."""
    *before, incomplete = typed
    shell = FishComplete(cli, dict(cli.context_settings), "planner", COMPLETION)
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_commands_and_options_are_completed() -> None:
    assert complete("") == list(COMMANDS)
    assert complete("es") == ["estimate"]
    assert complete("estimate", "--max") == ["--max-batch"]


@pytest.mark.parametrize("field", declared_options(TrainSetting))
def test_a_field_with_an_option_has_all_of_it(field: str) -> None:
    """Of `estimate`, `report`, `advise` and `tune`, of which it says the default and the values."""
    said, kind = declared_options(TrainSetting)[field], TrainSetting.model_fields[field]
    flag = said.flag_of(field)
    for name in ("estimate", "report", "advise", "tune"):
        option = next(p for p in command_context(name).command.params if flag in p.opts)
        assert isinstance(option, click.Option)
        assert "(default: " in (option.help or "") or name == "tune"
    values = said.values or get_args(kind.annotation)
    assert complete("estimate", "m", flag, "") == list(values)


def test_values_are_completed_by_what_they_are_of() -> None:
    models = [f"{library}:{name}" for library, spec in SPECS.items() for name in spec.published]
    gpus = [gpu.name for gpu in all_gpus()]
    assert complete("estimate", "") == models
    assert complete("estimate", "configs/t") == ["configs/t"]  # the shell's to complete
    assert complete("estimate", "m", "--gpu", "") == complete("gpus", "") == gpus
    assert complete("report", "m", "--gpu", "rtx-3090,rtx-409") == ["rtx-3090,rtx-4090"]
    assert complete("estimate", "m", "--precision", "fp32,b") == ["fp32,bf16"]
    assert "nvlink-a100" in complete("advise", "m", "--link", "")
    assert complete("advise", "m", "--keep", "batch") == ["batch_size"]
    assert complete("emit", "run", "--for", "") == list(TARGETS)
    assert complete("estimate", "m", "--set", "ema=t") == ["ema=true"]


def test_completing_imports_neither_torch_nor_optuna() -> None:
    code = (
        "import sys; from planner.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    asked = {COMPLETION: "fish_complete", "COMP_WORDS": "planner tune", "COMP_CWORD": "native:s"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert "native:swin_tiny" in done.stdout
    assert not set(done.stderr.split()) & {"torch", "optuna", "timm", "transformers"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    script = tmp_path / "planner.bash"
    asked = {**os.environ, COMPLETION: "bash_source"}
    script.write_bytes(subprocess.run([PLANNER], env=asked, capture_output=True).stdout)
    code = (
        f"source {script}; COMP_WORDBREAKS=${{COMP_WORDBREAKS//:/}}; "
        "COMP_WORDS=(planner estimate native:swin_tiny_); COMP_CWORD=2; "
        f'_planner_completion {PLANNER}; echo "$COMPREPLY"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "native:swin_tiny_384\n"
