"""What a fork server imports so that its workers take turns on the device: they start, build and
compile beside each other, and each warms up, is timed and read alone.

The file whose lock is the turn is named by the environment variable `PLANNER_TURNS`.
"""

from __future__ import annotations

import fcntl
import gc
import os
from pathlib import Path
from typing import Any

import torch

from search.probe.protocol import OutcomeMessage
from search.probe.worker.measure import Run
from tests.truth.record import TURNS

# The methods of a run that the turn is around: what compiles does so outside of it.
WARM_UP, SETTLE, OUTCOME = Run._warm_up, Run._settle, Run.outcome


def await_turn(run: Run) -> None:
    run.turn = Path(os.environ[TURNS]).open("w")  # noqa: SIM115
    fcntl.flock(run.turn, fcntl.LOCK_EX)


def _warm_up(run: Run, *rest: Any) -> list[float]:
    if not run.request.setting.compiles:
        await_turn(run)
    return WARM_UP(run, *rest)


def _settle(run: Run, *rest: Any) -> None:
    if not hasattr(run, "turn"):
        await_turn(run)
    SETTLE(run, *rest)


def _outcome(run: Run) -> OutcomeMessage:
    """The memory is given back before the next is let in."""
    found = OUTCOME(run)
    gc.collect()
    torch.cuda.empty_cache()
    run.turn.close()
    return found


Run._warm_up, Run._settle, Run.outcome = _warm_up, _settle, _outcome
