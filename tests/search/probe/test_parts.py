"""The parts of a probe that run no worker: intervals, the channel, stopping, the device."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.probe import device
from search.probe.evidence import median_interval
from search.probe.protocol import (
    AnswerReader,
    OutcomeMessage,
    PhaseMessage,
    encode,
)

seconds = st.floats(min_value=1e-4, max_value=1e3)


@given(st.lists(seconds, min_size=1, max_size=60))
def test_interval_encloses_the_median(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert min(samples) <= interval.low <= interval.median <= interval.high <= max(samples)
    assert interval.certain == (len(samples) >= 6)  # 2 · (1/2)^6 = 3.1% and 2 · (1/2)^5 = 6.3%


@pytest.mark.parametrize("n", [6, 9, 12, 20, 50, 100])
def test_interval_has_the_ranks_of_the_sign_test(n: int) -> None:
    """The largest k with P(Binomial(n, 1/2) < k) <= 2.5%, computed here with exact integers."""
    below = [sum(math.comb(n, i) for i in range(k)) for k in range(n)]
    rank = max(k for k in range(n) if below[k] * 1000 <= 25 * 2**n)
    interval = median_interval([float(i) for i in range(1, n + 1)])
    assert (interval.low, interval.high) == (rank, n + 1 - rank)


def phase(name: str = "forward", probe_id: str = "p") -> PhaseMessage:
    return PhaseMessage(probe_id=probe_id, phase=name)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.booleans())
def test_answers_survive_any_cutting(cuts: list[int], noisy: bool) -> None:
    messages = [phase("build"), OutcomeMessage(probe_id="p", status="measured")]
    noise = b"noise without an end" if noisy else b""
    data = b"".join(noise + encode(message) for message in messages)
    reader = AnswerReader("p")
    heard = []
    for cut in cuts:
        heard += reader.feed(data[:cut])
        data = data[cut:]
    heard += reader.feed(data)
    reader.close()
    assert heard == messages
    assert reader.num_garbage == (2 if noisy else 0)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\n",
        b"{}\n",
        b'{"format": 2, "probe_id": "p", "type": "phase", "phase": "build"}\n',
        b'{"format": 1, "probe_id": "p", "type": "phase"}\n',
        b'{"format": 1, "probe_id": "p", "type": "outcome", "status": "fine"}\n',
        encode(phase(probe_id="another")).lstrip(),
        encode(phase())[1:-2] + b"\n",
    ],
)
def test_garbage_is_counted_and_left(line: bytes) -> None:
    reader = AnswerReader("p")
    assert reader.feed(line) == []
    assert reader.num_garbage == 1
    assert reader.feed(encode(phase())) == [phase()]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", "rocm6.4"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
    ],
)
def test_torch_build_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, build: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: type("Spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")}),
    )
    assert device.torch_build.__wrapped__() == build


def test_an_order_to_end_is_heard_by_a_worker_that_is_not_yet_itself() -> None:
    """The supervisor ignores SIGTERM, and so does its child until it says otherwise."""
    code = """
import os, sys, time
from planner.machine import supervisor
become = supervisor._become_worker
supervisor._become_worker = lambda *given: (time.sleep(0.5), become(*given))
lifeline, order = os.pipe()
os.write(order, b"T")
supervisor.supervise(lambda: time.sleep(60), lifeline, sys.stdout.fileno())
"""
    said = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, timeout=50)
    assert said.stdout.endswith(b"ended 15 0\n"), said


def test_supervisor_imports_little() -> None:
    """It is started for every probe: no more than a bare interpreter and ctypes."""
    code = "import sys; import planner.machine.supervisor; print(len(sys.modules))"
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True)
    assert int(answer.stdout) < 80
