"""What needs Linux: only what trains. Without `fcntl`, as on Windows, the rest answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from planner.core.torch_version import NEWEST_TRIED, as_of, torch_version, why_untried
from planner.estimation.estimate import estimate

PATCHED = (
    "import sys; sys.modules.update(fcntl=None, resource=None, pwd=None); "
    "from planner.cli import main"
)
WITHOUT = f"{PATCHED}; raise SystemExit(main(sys.argv[1:]))"


def planner(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False
    )


ANYWHERE = (
    ("estimate", "native:swin_tiny", "--gpu", "RTX 3090"),
    ("models", "swin_tiny"),
    ("gpus",),
    ("doctor", str(Path(__file__).parent / "environment/machines/rocm.json")),
)


def test_these_commands_run_anywhere(tmp_path: Path) -> None:
    from tests.trainers.cases import recommendation

    found = tmp_path / "recommendation.json"
    found.write_text(recommendation().model_dump_json())
    run = (*ANYWHERE, ("emit", str(found), "--for", "timm"))
    code = f"{PATCHED}; print([main(list(arguments)) for arguments in {run!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([0] * len(run)), done.stderr


def test_what_trains_says_that_it_needs_linux() -> None:
    done = planner("tune", "native:swin_tiny")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: a search and its probes need Linux")


def test_a_page_of_runs_and_models_is_drawn_anywhere(tmp_path: Path) -> None:
    from planner.core.schema import TrainSetting
    from search.loop.records import append_records
    from tests.search.tables import make_record

    probes = tmp_path / "probes.jsonl"
    append_records(probes, [make_record(TrainSetting(batch_size=8))])
    page = tmp_path / "page.html"
    done = planner("report", "native:swin_tiny", str(probes), "--output", str(page))
    assert done.returncode == 0, done.stderr
    assert 200_000 < page.stat().st_size < 1_000_000


# Which torch an estimate is of.

MODEL = {"gpu": "rtx-3090", "batch_size": 8}


def allocated(version: str) -> int:
    with as_of(version):
        return estimate("native:swin_tiny", **MODEL).peak_allocated_bytes


def test_an_estimate_is_of_the_torch_that_is_asked_for() -> None:
    """From 2.15 on cuBLAS's workspaces are given back: 2 × 8,519,680 B are no longer kept."""
    old, new = allocated("2.13.0+cu130"), allocated("2.15.0")
    assert old > new
    assert (allocated("2.13.1"), allocated("2.15.0+cu132")) == (old, new), "kept apart"


def test_outside_it_is_of_what_is_installed() -> None:
    before = torch_version()
    with as_of("2.9.1"):
        assert torch_version() == (2, 9)
        with as_of(""):
            assert torch_version() == before
    assert torch_version() == before
    assert why_untried(".".join(map(str, NEWEST_TRIED))) is None
