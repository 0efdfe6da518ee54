"""docs/your-own-model.md: its task is one, and steps of the kinds that it names are estimated as it
says. Its commands run as those of every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from planner import TrainSetting, estimate
from planner.core.schema import FactoryModel
from planner.training.tasks.contract import is_task
from tests.own_steps import WIDTH, Contrasted

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/your-own-model.md").read_text(encoding="utf-8")
(SOURCE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_its_task_is_one() -> None:
    names: dict[str, type] = {}
    exec(SOURCE, names)
    assert is_task(names["Tagging"]())
    assert "`tagging.py`" in PAGE


LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of the one layer that each step trains, in fp32


def step_of(name: str) -> tuple[FactoryModel, TrainSetting]:
    return FactoryModel(factory=f"tests.own_steps:{name}"), TrainSetting(batch_size=8)


@pytest.mark.parametrize(("name", "moments"), [("Contrasted", 2), ("Hooked", 2), ("Momentum", 1)])
def test_only_what_is_trained_has_optimizer_state(name: str, moments: int) -> None:
    """A teacher, a queue, frozen parts and hooks are recorded; AdamW keeps two moments."""
    found = estimate(*step_of(name))
    assert found.breakdown["parameters"] == 2 * LAYER
    assert found.breakdown["optimizer_state"] == moments * LAYER


def test_its_queue_takes_any_number_of_keys() -> None:
    """Wraps around at the end, so that the step is the same at every batch."""
    (line,) = re.findall(r"`(queue\[.*?)`", PAGE)
    queue, keys = torch.zeros(1, 10), torch.tensor([[1.0], [2.0], [3.0]])
    exec(line, {"torch": torch, "queue": queue, "K": 10, "pointer": 8, "n": 3, "keys": keys})
    assert queue.tolist() == [[3, 0, 0, 0, 0, 0, 0, 0, 1, 2]]


@pytest.mark.compiler
def test_its_queue_is_compiled() -> None:
    """Its pointer is read before the queue: read after it, backward fails (torch 2.14)."""
    task = Contrasted()
    module = torch.compile(task.module())
    for _ in range(2):
        task.loss(module, task.batch(8, torch.device("cpu"))).backward()
