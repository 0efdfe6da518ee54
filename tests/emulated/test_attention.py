"""Attention in a trace, held to torch's own CUDA code: which kernel runs, and what it takes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from planner.ledger.ledger import Allocated, Freed, Scratch  # noqa: E402
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started  # noqa: E402
from planner.machine.hardware.catalogue import find_gpu  # noqa: E402
from planner.machine.hardware.overheads import processors_of  # noqa: E402
from planner.memory.scratch import Processors, scratch_bytes  # noqa: E402
from planner.trace.attention import choose_kernel  # noqa: E402
from planner.trace.cuda_rules import as_on_cuda  # noqa: E402
from planner.trace.recorder import Recorder  # noqa: E402
from tests.emulated.attention import (  # noqa: E402
    Case,
    Outcome,
    arguments,
    as_json,
    attend,
    grid,
    kernel_of,
)
from tests.emulated.conftest import ROOT  # noqa: E402

pytestmark = pytest.mark.emulated


def in_trace(case: Case, device: Processors) -> Outcome:
    with FakeTensorMode(), Recorder() as recorder, as_on_cuda():
        made, mask = arguments(case, "cpu")
        gradient = torch.zeros_like(attend(case, made, mask))
        start = len(recorder.events)
        result = attend(case, made, mask)
        kernel, middle = kernel_of(result), len(recorder.events)
        if result.grad_fn is not None:
            result.backward(gradient)
        events = list(recorder.events)
    live, saved, forward, sizes = [0], 0, 0, dict[int, int]()
    for index, event in enumerate(events):
        if isinstance(event, Allocated | Scratch):
            size = event.num_bytes
            if isinstance(event, Scratch):
                size = scratch_bytes(device, event.law, event.sizes)
            sizes[event.storage] = size if index >= start else 0
            live.append(live[-1] + sizes[event.storage])
        elif isinstance(event, Freed):
            live.append(live[-1] - sizes[event.storage])
        if index == start - 1:
            live = [0]
        if index == middle - 1:
            saved, forward = live[-1], max(live)
            live = live[-1:]
    return Outcome(kernel, saved, forward, max(live))


def on_card(card: str, cases: list[Case]) -> list[Outcome]:
    with started(EmulatedMachine((emulated_gpu(card),))) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.emulated.attention"],
            input=as_json(cases), env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [Outcome(*values) for values in json.loads(done.stdout.splitlines()[-1])]


def some(count: int) -> list[Case]:
    return random.Random(0).sample(list(grid()), count)


def differences(cases: list[Case], card: str) -> list[tuple[Case, Outcome, Outcome]]:
    device = processors_of(find_gpu(card))
    found = zip(cases, on_card(card, cases), strict=True)
    pairs = [(case, on, in_trace(case, device)) for case, on in found]
    return [(case, on, trace) for case, on, trace in pairs if on != trace]


def test_a_trace_attends_as_torch_does(libraries: Path) -> None:
    cases = some(120)
    dropped = [replace(case, dropout=0.1) for case in cases[:30]]
    assert differences([*cases, *dropped], "a100-sxm-80gb") == []


def test_the_choice_follows_the_capability(libraries: Path) -> None:
    card = "t4"
    capability = processors_of(find_gpu(card)).capability
    cases = [case for case in some(800) if case.grad and case.batch]
    for case, found in zip(cases, on_card(card, cases), strict=True):
        (query, key, value), mask = arguments(case, "cpu")
        chosen = choose_kernel(query, key, value, mask, case.causal, case.gqa, capability)
        assert found.kernel == {"math": ""}.get(chosen, chosen.title()), case
