"""The step of a probe under DeepSpeed, on two real ranks: its bytes, its weights, its shares.

Each rank has the same images, so the mean of their gradients is each one's own, and the weights are
those of one rank without DeepSpeed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner import TrainSetting
from planner.step.zero import insert_zero_events
from planner.step.zero.insert_events import weights_of
from planner.step.zero.layout import Layout
from tests.step.zero import gloo_ranks
from tests.step.zero.gloo_ranks import BASE, WORLD_SIZE
from tests.step.zero.test_zero import as_ledger, ends

SECONDS = 300.0  # for two ranks that import DeepSpeed, on a busy machine
# SGD, so that a gradient of another size goes another way; unclipped where it is divided.
CASES: list[dict[str, Any]] = [
    {"parallelism": "zero1", "accumulate": 2},
    {"parallelism": "zero2", "clip_grad": True},
    {"parallelism": "zero3", "accumulate": 2},
]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each rank found, a case each. Both have ended."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    command = [sys.executable, "-m", gloo_ranks.__name__, str(folder)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    logs = [folder / f"{rank}.log" for rank in range(WORLD_SIZE)]
    started = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                started.append(
                    subprocess.Popen(
                        [*command, str(rank)], stdout=file, stderr=file, cwd=ROOT, env=environment
                    )
                )
        codes = [process.wait(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * WORLD_SIZE, "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


pytestmark = [
    pytest.mark.trainers,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
EVERY_RANK = pytest.mark.parametrize("rank", range(WORLD_SIZE))
EVERY_CASE = pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))


@EVERY_RANK
@EVERY_CASE
def test_it_trains_as_one_rank_without_deepspeed(ranks: Any, rank: int, case: int) -> None:
    assert ranks[rank][case]["far"] < 1e-4  # of the way that the weights went


@EVERY_RANK
@EVERY_CASE
def test_a_rank_holds_its_share(ranks: Any, rank: int, case: int) -> None:
    """SGD's momentum: an element for each that the rank updates. Of weights all but in stage 3."""
    found = ranks[rank][case]
    layout = Layout((found["held_alone"],), WORLD_SIZE)
    assert found["held"] == layout.share
    is_cut = CASES[case]["parallelism"] == "zero3"
    assert found["own"] == (layout.share if is_cut else found["held_alone"])


@EVERY_RANK
@EVERY_CASE
def test_a_rank_takes_what_the_ledger_says(ranks: Any, rank: int, case: int) -> None:
    """At the end of each phase of the steady step, and at most in it. What gloo's threads let go
    may be late, by a bucket, and never early."""
    found = ranks[rank][case]
    setting = TrainSetting(**{**BASE.model_dump(), **CASES[case]})
    plain = as_ledger(found["plain"])
    assert weights_of(plain)[0]
    mine = ends(insert_zero_events(plain, setting, rank).ledger)
    its = ends(as_ledger(found["deepspeed"]))
    assert [row[:2] for row in mine] == [row[:2] for row in its]
    late = setting.zero_reduce_bucket * 4
    for (phase, step, *expected), (_, _, *measured) in zip(mine, its, strict=True):
        if step == 1:
            for bytes_expected, bytes_measured in zip(expected, measured, strict=True):
                assert 0 <= bytes_measured - bytes_expected <= late, (phase, mine, its)
