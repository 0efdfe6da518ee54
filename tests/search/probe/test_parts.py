"""The parts of a probe that run no worker: intervals, the channel, stopping, the device."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.schema import FactoryModel, TrainSetting
from search.probe import device
from search.probe.interval import median_interval
from search.probe.parent import supervisor
from search.probe.protocol import (
    MAX_MESSAGE_BYTES,
    AnswerReader,
    OutcomeMessage,
    PhaseMessage,
    ProbeRequest,
    encode,
)
from search.probe.stopping import StopRule

seconds = st.floats(min_value=1e-4, max_value=1e3)


@given(st.lists(seconds, min_size=1, max_size=60))
def test_interval_encloses_the_median(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert min(samples) <= interval.low <= interval.median <= interval.high <= max(samples)
    assert interval.certain == (len(samples) >= 6)  # 2 · (1/2)^6 = 3.1% and 2 · (1/2)^5 = 6.3%


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (9, 2), (12, 3), (20, 6), (50, 18), (100, 40)])
def test_interval_has_the_ranks_of_the_sign_test(n: int, rank: int) -> None:
    """The largest k with P(Binomial(n, 1/2) < k) <= 2.5%, computed here with exact integers."""
    below = [sum(math.comb(n, i) for i in range(k)) for k in range(n)]
    expected = max(k for k in range(n) if below[k] * 1000 <= 25 * 2**n)
    assert expected == rank
    interval = median_interval([float(i) for i in range(1, n + 1)])
    assert (interval.low, interval.high) == (rank, n + 1 - rank)


def test_no_median_of_nothing() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


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


def test_truncated_message_is_garbage() -> None:
    reader = AnswerReader("p")
    assert reader.feed(encode(phase())[:-1]) == []
    reader.close()
    assert reader.num_garbage == 1


def test_line_without_end_costs_no_memory() -> None:
    reader = AnswerReader("p")
    for _ in range(40):
        assert reader.feed(b"x" * (MAX_MESSAGE_BYTES // 10)) == []
        assert len(reader._line) <= MAX_MESSAGE_BYTES
    assert reader.feed(encode(phase())) == [phase()]
    assert reader.num_garbage == 1


def rule(deadline: float = math.inf, started: float = math.inf, **fields: object) -> StopRule:
    """Its clock stands: a start in the future is never late."""
    request = ProbeRequest.model_validate(
        {
            "model": FactoryModel(factory="a:b"),
            "setting": TrainSetting(batch_size=8, accumulate=2),
            **fields,
        }
    )
    return StopRule(request, started, deadline)


def test_timing_ends_when_the_median_is_known() -> None:
    assert not rule().is_enough([0.1] * 5)
    assert rule().is_enough([0.1] * 6)
    assert not rule().is_enough([0.1, 0.1, 0.1, 0.2, 0.2, 0.2])
    assert rule(max_steps=6).is_enough([0.1, 0.1, 0.1, 0.2, 0.2, 0.2])


def test_timing_ends_in_time() -> None:
    late = rule(started=-math.inf, min_steps=3)
    assert not late.is_enough([])
    assert not late.is_enough([0.1, 0.2])
    assert late.is_enough([0.1, 0.2, 0.1])
    assert rule(deadline=-math.inf).is_enough([0.1, 0.2, 0.1])
    assert "too few" in late.flags([0.1, 0.2, 0.1])[0]
    assert "±50.0% only" in late.flags([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.1])[0]


def test_hopeless_timing_ends_at_the_third_sample() -> None:
    """16 images a step: at best 160 images/s of 0.1 s, however the median may lie."""
    hopeless = rule(give_up_images_per_second=161.0)
    assert not hopeless.is_enough([0.1, 0.2])
    assert hopeless.is_enough([0.1, 0.2, 0.3])
    assert "160" in hopeless.flags([0.1, 0.2, 0.3])[0]
    assert not rule(give_up_images_per_second=159.0).is_enough([0.1, 0.2, 0.3])


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_cpu_is_described(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_no_gpu", lambda index=0: "none here")
    described = device.describe_device(wanted)
    assert described.kind == "cpu"
    assert described.total_bytes > 0
    memory = device.memory_in_use("cpu")
    assert memory is not None
    assert memory.used_bytes + memory.free_bytes == memory.total_bytes


def test_device_names() -> None:
    assert device.choose_device("cuda") == "cuda:0"
    with pytest.raises(UsageError, match="tpu"):
        device.choose_device("tpu")


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


def test_versions_name_the_allocators_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert "allocator_config" not in device.versions()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert device.versions()["allocator_config"] == "expandable_segments:True"


def test_versions_name_what_chooses_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    monkeypatch.delenv(name, raising=False)
    assert name not in device.versions()
    monkeypatch.setenv(name, "1")
    assert device.versions()[name] == "1"


def test_versions_say_how_cudnn_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "torch_build", lambda: "12.8")
    assert dict(device._versions.__wrapped__(device._PACKAGES))["cudnn_benchmark"] == "True"
    monkeypatch.setattr(device, "torch_build", lambda: "cpu")
    assert "cudnn_benchmark" not in dict(device._versions.__wrapped__(device._PACKAGES))


def test_supervisor_looks_less_often_for_what_does_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in an uninterruptible call to a driver: a look walks through all of /proc."""
    waits: list[float] = []

    def reap(raise_when_childless: bool = False) -> dict[int, int]:
        if len(waits) == 20:
            raise ChildProcessError
        return {}

    monkeypatch.setattr(supervisor, "descendants", lambda ancestor: [])
    monkeypatch.setattr(supervisor, "reap", reap)
    monkeypatch.setattr(supervisor.time, "sleep", waits.append)
    supervisor.end_descendants()
    assert waits[:3] == [0.002, 0.004, 0.008]
    assert max(waits) == waits[-1] == 0.05


def test_an_order_to_end_is_heard_by_a_worker_that_is_not_yet_itself() -> None:
    """The supervisor ignores SIGTERM, and so does its child until it says otherwise."""
    code = """
import os, sys, time
from search.probe.parent import supervisor
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
    code = "import sys; import search.probe.parent.supervisor; print(len(sys.modules))"
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True)
    assert int(answer.stdout) < 80
