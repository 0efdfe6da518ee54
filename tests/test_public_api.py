"""What a person imports: quick, typed, and the same whatever was imported before."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import planner
import search
from planner.cli import COMMANDS
from planner.core.schema import TrainSetting
from planner.trainers.registry import TARGETS
from search.loop.records import append_records
from tests.search.tables import make_record
from tests.trainers.cases import recommendation, tiny

HEAVY = ("torch", "optuna", "numpy", "timm", "transformers", "torchvision", "sqlalchemy")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_names_are_functions_whatever_was_imported_before() -> None:
    printed = run(
        "import search, planner.estimation.estimate, planner.trainers.emission\n"
        "import planner\nfor name in planner.__all__: getattr(planner, name)\n"
        "print(planner.estimate('native:swin_tiny', batch_size=2).num_parameters)\n"
        "print(callable(planner.emit))"
    )
    assert printed == "28288354\nTrue"  # Swin-T with 1000 classes, as in timm


LINUX = ("fcntl", "resource", "pwd")
BEFORE_LAUNCH = (
    "--help",  # nor any command
    "gpus",
    "models",
    f"doctor {Path(__file__).parent / 'environment/machines/rocm.json'}",
    "estimate native:swin_base --batch-size 64 --json",
    "estimate timm:swinv2_tiny_window8_256 --gpu rtx3090",
    "advise native:swin_tiny --batch-size 256 --gpu RTX4090",
    *(f"emit recommendation.json --for {target} --set precision=fp16" for target in TARGETS),
    "report native:swin_tiny --output page.html",
    "explain log.txt",
)
WITH_OPTUNA = "report native:swin_tiny probes.jsonl --output page.html"


def test_answering_before_launch_imports_nothing_heavy_and_runs_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what only Linux has, as on Windows. One process asks all: what one command imported
    would be there after the last."""
    monkeypatch.chdir(tmp_path)
    Path("log.txt").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    Path("recommendation.json").write_text(recommendation(tiny(num_classes=1000)).model_dump_json())
    append_records(tmp_path / "probes.jsonl", [make_record(TrainSetting(batch_size=8))])
    commands = [f"planner.cli.{where.partition(':')[0]}" for where, *_ in COMMANDS.values()]
    printed = run(
        "import sys\nfrom planner.cli import main\n"
        f"for line in {(*BEFORE_LAUNCH, WITH_OPTUNA)!r}:\n"
        f"    sys.modules.update(dict.fromkeys({LINUX!r}))\n"
        "    status = main(line.split())\n"
        f"    heavy = {HEAVY!r} if line != '--help' else {(*HEAVY, 'pydantic', *commands)!r}\n"
        "    print('imported', line, status, [name for name in heavy if name in sys.modules])"
    )
    assert set(COMMANDS) <= set(printed.partition("imported")[0].split())
    *said, last = [line for line in printed.splitlines() if line.startswith("imported ")]
    assert said == [f"imported {line} 0 []" for line in BEFORE_LAUNCH]
    assert last.startswith(f"imported {WITH_OPTUNA} 0 ")
    assert "<title>1 estimate and 1 run side by side</title>" in Path("page.html").read_text()
    assert 200_000 < Path("page.html").stat().st_size < 1_000_000


WITHOUT = (
    "import sys; sys.modules.update(fcntl=None, resource=None, pwd=None); "
    "from planner.cli import main; raise SystemExit(main(['tune', 'native:swin_tiny']))"
)


def test_what_trains_says_that_it_needs_linux() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: a search and its probes need Linux")


@pytest.mark.parametrize(
    ("name", "face"),
    [
        ("result", lambda empty: planner.emit(empty, "timm")),
        ("source", lambda empty: planner.explain(empty)),
        ("plan", lambda empty: planner.explain("training.log", plan=empty)),
        ("plan", lambda empty: planner.watch(empty)),
        ("data", lambda empty: search.find_loader(empty)),
        ("output", lambda empty: search.tune("native:swin_tiny", output=empty)),
        ("target", lambda empty: search.write_report(empty, "page.html")),
        ("output", lambda empty: search.write_report("native:swin_tiny", empty)),
    ],
)
def test_an_empty_path_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, face: Callable[[str], object]
) -> None:
    """It would mean the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    Path("training.log").write_text("torch.OutOfMemoryError: CUDA out of memory.")
    with pytest.raises(planner.UsageError, match=f"^{name} is a path, and '' is not"):
        face("")
    assert [path.name for path in tmp_path.iterdir()] == ["training.log"]
