"""What needs Linux: only what trains. Without `fcntl`, as on Windows, the rest answers."""

from __future__ import annotations

import subprocess
import sys

from planner.core.torch_version import NEWEST_TRIED, as_of, torch_version, why_untried
from planner.estimation.estimate import estimate

WITHOUT = (
    "import sys; sys.modules.update(fcntl=None, resource=None, pwd=None); "
    "from planner.cli import main; raise SystemExit(main(['tune', 'native:swin_tiny']))"
)


def test_what_trains_says_that_it_needs_linux() -> None:
    """What answers anywhere: tests/test_public_api.py."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: a search and its probes need Linux")


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
