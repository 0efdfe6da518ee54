"""What a shell completes: in process by click's own classes, and in the shells themselves."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.cli import COMMANDS, COMPLETION, cli, main
from planner.cli.completion import SHELLS, Fish
from planner.cli.values import VALUES
from planner.hardware import all_gpus
from planner.libraries.registry import SPECS
from planner.schema import TrainSetting
from planner.schema.distribution import PARALLELISMS
from planner.schema.setting import COMPILE_MODES, OPTIMIZER_FAMILIES, PRECISIONS
from planner.trainers.registry import TARGETS
from search.strategies.named import STRATEGIES
from tests.cli.test_help import ALL

PLANNER = Path(sys.executable).with_name("planner")
DEADLINE_SECONDS = 60.0


def complete(*typed: str) -> list[str]:
    """What the last of these words may become."""
    *before, incomplete = typed
    shell = Fish(cli, dict(cli.context_settings), "planner", COMPLETION)
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_commands_and_options_are_completed() -> None:
    assert complete("") == list(COMMANDS)
    assert complete("es") == ["estimate"]
    assert complete("bench", "") == ["attention"]
    assert complete("help", "tu") == ["tune"]
    assert complete("help", "bench", "") == ["attention"]
    assert complete("estimate", "--max") == ["--max-batch"]


def test_a_model_is_completed_by_its_library_and_then_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "notes.txt", ".hidden.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.json").touch()
    assert complete("estimate", "") == [*(f"{name}:" for name in SPECS), "configs/", "mine.yaml"]
    for library, spec in SPECS.items():
        assert complete("estimate", f"{library}:") == [f"{library}:{n}" for n in spec.published]
    assert "torchvision:swin_t" in complete("tune", "torchvision:swin_t")
    assert complete("advise", "swin_t") == complete("data", "--for", "swin_t")
    assert "swin_tiny" in complete("estimate", "swin_t")
    assert complete("estimate", "configs/") == ["configs/tiny.json"]
    assert complete("estimate", "no:") == complete("estimate", "missing/") == []


def test_lists_with_commas_are_completed_at_their_end() -> None:
    assert complete("estimate", "m", "--precision", "") == list(PRECISIONS)
    assert complete("estimate", "m", "--precision", "fp32,b") == ["fp32,bf16"]
    assert "fp32,bf16,fp32" not in complete("estimate", "m", "--precision", "fp32,bf16,")
    assert complete("tune", "--compile", "") == list(COMPILE_MODES)
    assert complete("tune", "--attention", "eager,") == ["eager,sdpa"]
    assert complete("tune", "--parallelism", "none,f") == ["none,fsdp"]
    assert "none,blocks:every-2" in complete("estimate", "m", "--checkpointing", "none,blo")
    assert complete("report", "m", "--gpu", "rtx-3090,rtx-409") == ["rtx-3090,rtx-4090"]


def test_what_is_completed_is_what_the_setting_takes() -> None:
    for optimizer in complete("estimate", "m", "--optimizer", ""):
        assert TrainSetting(optimizer=optimizer).optimizer == optimizer
    for checkpointing in complete("estimate", "m", "--checkpointing", ""):
        assert TrainSetting(checkpointing=checkpointing).checkpointing == checkpointing
    assert set(OPTIMIZER_FAMILIES) < set(complete("estimate", "m", "--optimizer", ""))
    assert complete("estimate", "m", "--parallelism", "") == list(PARALLELISMS)


def test_names_of_lists_are_completed() -> None:
    names = [gpu.name for gpu in all_gpus()]
    assert complete("estimate", "m", "--gpu", "") == ["all", *names]
    assert complete("report", "m", "--gpu", "") == ["all", *names]
    assert complete("report", "m", "--gpu", "h100-pcie,a") == [
        f"h100-pcie,{name}" for name in names if name.startswith("a")
    ]
    assert complete("advise", "m", "--gpu", "") == complete("gpus", "") == names
    assert complete("emit", "run", "--for", "") == list(TARGETS)
    assert complete("tune", "--strategy", "") == list(STRATEGIES)
    assert complete("data", "--strategy", "g") == ["grid"]
    assert complete("models", "--library", "ti") == ["timm"]
    assert complete("estimate", "m", "--link", "nvlink-a") == ["nvlink-a100"]
    assert complete("estimate", "m", "--link", "nvlink-a100,8xib-hd") == ["nvlink-a100,8xib-hdr"]
    assert complete("advise", "m", "--allow", "recipe,") == ["recipe,adapters"]
    assert {"auto", "cpu", "cuda"} <= set(complete("tune", "--device", ""))
    assert complete("completion", "z") == ["zsh"]


def test_fields_are_completed_and_then_their_values() -> None:
    fields = complete("estimate", "m", "--set", "")
    assert {"embed_dim=", "lora_rank=", "memory_format="} <= set(fields)
    assert complete("estimate", "m", "--set", "memory_f") == ["memory_format="]
    assert complete("estimate", "m", "--set", "memory_format=ch") == ["memory_format=channels_last"]
    assert complete("estimate", "m", "--set=ema=t") == ["--set=ema=true"]
    assert complete("tune", "--set", "ema=true,") == ["ema=true,false"]
    assert complete("estimate", "m", "--set", "optimizer=adamw-8") == ["optimizer=adamw-8bit"]
    assert complete("estimate", "m", "--set", "embed_dim=") == []
    assert complete("estimate", "m", "--set", "nothing=") == []
    of_emit = complete("emit", "run", "--for", "timm", "--set", "")
    assert of_emit == [f"{field}=" for field in TrainSetting.model_fields]


def test_folders_of_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("tuned", "other", ".hidden"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tuned" / "recommendation.json").touch()
    assert complete("emit", "") == complete("explain", "log", "--plan", "") == ["other/", "tuned"]
    assert complete("emit", "tuned/") == ["tuned/recommendation.json"]
    (tmp_path / "tuned" / "probes.jsonl").touch()
    assert complete("report", "tu") == ["tuned"]
    assert complete("report", "tuned/p") == ["tuned/probes.jsonl"]
    assert complete("profile", "tuned/p") == []
    assert complete("report", "tuned", "native:swin_tin") == complete("profile", "native:swin_tin")
    assert complete("emit", f"{tmp_path}/t") == [f"{tmp_path}/tuned"]


def test_every_value_that_is_known_is_one_of_a_command() -> None:
    parameters = {p.name: p for found in ALL.values() for p in found.command.params}
    assert set(VALUES) <= set(parameters)
    for name in VALUES:
        assert not getattr(parameters[name], "is_flag", False), name


def test_completing_imports_neither_torch_nor_optuna() -> None:
    code = (
        "import sys; from planner.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    for words, current in (("planner tune", "native:swin_"), ("planner emit x --for", "ti")):
        asked = {COMPLETION: "fish_complete", "COMP_WORDS": words, "COMP_CWORD": current}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert current in done.stdout
        assert not set(done.stderr.split()) & {"torch", "optuna", "timm", "transformers"}


def test_the_script_is_that_of_the_shell_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main(["completion"]) == 0
    shown = capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == shown
    monkeypatch.setenv("SHELL", "/bin/dash")
    assert main(["completion"]) == 2
    assert main(["completion", "zhs"]) == 2
    assert "Did you mean 'zsh'?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_says_how_to_install_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    head = capsys.readouterr().out.splitlines()[:4]
    assert any(f"planner completion {shell} > " in line for line in head)


def _script(shell: str, folder: Path) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([PLANNER, "completion", shell], capture_output=True, check=True)
    script = folder / f"planner.{shell}"
    script.write_bytes(done.stdout)
    return script


def _on_path() -> dict[str, str]:
    return {**os.environ, "PATH": f"{PLANNER.parent}:{os.environ['PATH']}", "TERM": "dumb"}


# What is typed before <Tab>, and what that adds; a space where a word is whole.
TYPED = [
    ("planner estim", "ate "),
    ("planner estimate nat", "ive:"),
    ("planner estimate native:swin_tiny_", "384 "),
    ("planner estimate m --set ema=t", "rue "),
    ("planner estimate m --gpu=h200-s", "xm-141gb "),
    ("planner estimate m --precision fp32,b", "f16 "),
    ("planner emit tu", "ned "),
    ("planner explain train", ".log "),
]


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=pytest.mark.combinations)])
def test_a_shell_completes_what_is_typed(shell: str, tmp_path: Path) -> None:
    """In a terminal: each line is typed, then <Tab>, and then made into one that prints it."""
    script = _script(shell, tmp_path)
    _make_files(tmp_path)
    begin, setup = {
        "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
        "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -d dump\n"),
    }[shell]
    process, terminal = _started(begin, tmp_path)
    try:
        os.write(terminal, f"{setup}source {script}; echo '<'rea''dy'>'\n".encode())
        assert _printed(terminal) == "ready"
        for typed, added in TYPED:
            # zsh takes a space back that nothing follows
            line = typed + (added.rstrip() if shell == "zsh" else added)
            to_start, to_end = "\x01", "\x05"  # <Ctrl-A>, <Ctrl-E>
            os.write(terminal, f"{typed}\t{to_start}echo '<{to_end}>'\n".encode())
            assert _printed(terminal) == line
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def _started(begin: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A shell on a terminal of its own, and our end of that."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        begin, stdin=its, stdout=its, stderr=its, cwd=folder, env=_on_path(),
        start_new_session=True,
    )  # fmt: skip
    os.close(its)
    return process, ours


def _printed(terminal: int) -> str:
    """What a line of its own has between < and >."""
    seen = ""
    ends = time.monotonic() + DEADLINE_SECONDS
    while (found := re.search(r"\n<([^\r\n]*)>\r?\n", seen)) is None:
        assert select.select([terminal], [], [], max(ends - time.monotonic(), 0))[0], seen
        seen += os.read(terminal, 65536).decode()
    return found.group(1)


def _make_files(folder: Path) -> None:
    (folder / "tuned").mkdir()
    (folder / "tuned" / "probes.jsonl").touch()
    (folder / "train.log").touch()


@pytest.mark.combinations
def test_fish_completes_what_is_typed(tmp_path: Path) -> None:
    script = _script("fish", tmp_path)
    _make_files(tmp_path)
    for typed, added in TYPED:
        code = f"source {script}; complete -C '{typed}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", code], cwd=tmp_path, env=_on_path(), text=True,
            capture_output=True, timeout=DEADLINE_SECONDS, check=True,
        )  # fmt: skip
        found = [shown.partition("\t")[0] for shown in done.stdout.splitlines()]
        assert (typed + added).split()[-1] in found
