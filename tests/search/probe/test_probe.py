"""Probes in processes of their own: real ones, and stand-ins for workers that end otherwise."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from planner.core.schema import MeasurementRecord
from planner.core.units import MIB
from search.probe import protocol
from search.probe.device import versions
from search.probe.parent import TAIL_BYTES, ProbeServer, run_probe
from search.probe.protocol import ProbeRequest, ProgressMessage
from tests.search.probe.stand_in import CODE, MODULES, StandIn
from tests.search.probes import AMPLE_SECONDS, request_of

PHASES = [
    "start", "import", "device", "build", "forward", "backward", "optimizer", "zero_grad",
    "measure", "check", "end",
]  # fmt: skip


VARIABLE = "PLANNER_TEST_PROCESSES"
# Longer than the kernel takes to end a killed process on a busy machine.
_PATIENCE_SECONDS = 60.0


def carrying(token: str) -> set[int]:
    """The pids of all living processes that carry `token`; zombies of ours count as living."""
    found = {child.pid for child in psutil.Process().children(recursive=True)
             if child.status() == psutil.STATUS_ZOMBIE}  # fmt: skip
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(VARIABLE) == token:
                found.add(process.pid)
    return found


@pytest.fixture(scope="module")
def token() -> Iterator[str]:
    """Every process started here carries it, whatever it then becomes."""
    token = os.environ[VARIABLE] = uuid.uuid4().hex
    yield token
    os.environ.pop(VARIABLE)


@pytest.fixture(scope="module")
def fork_server(token: str) -> Iterator[ProbeServer]:
    """One for all real probes: what a worker does must not reach the next."""
    with ProbeServer() as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_remains(token: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """But the server that tests share, and what others have left running, such as Inductor's
    pool."""
    server = [request.getfixturevalue("fork_server")] * ("fork_server" in request.fixturenames)
    before = carrying(token) | {each.pid for each in server}
    yield
    patience = time.monotonic() + _PATIENCE_SECONDS
    while (left := carrying(token) - before) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


def ran(request: ProbeRequest, server: ProbeServer, **how: Any) -> MeasurementRecord:
    return run_probe(request, **{"deadline_seconds": AMPLE_SECONDS, "fork_server": server, **how})


def test_a_step_is_measured_and_its_phases_are_told(fork_server: ProbeServer) -> None:
    """A weight of 64 MiB, its gradient and Adam's two states are alive together: 256 MiB, and the
    for-loop's temporaries of one weight each at most twice."""
    request = request_of("OneLargeWeight", optimizer="adamw-forloop", accumulate=2)
    events: list[ProgressMessage] = []
    record = ran(request, fork_server, on_event=events.append)
    assert record.status == "measured", record.message
    assert record.probe_id == request.probe_id
    assert (record.model, record.setting) == (request.model, request.setting)
    assert record.images_per_second == pytest.approx(4 * 2 / median(record.step_seconds))
    assert 256 * MIB <= record.peak_allocated_bytes <= (256 + 128 + 16) * MIB
    assert record.compile_seconds is None
    assert (record.device.kind, record.versions) == ("cpu", versions())
    assert MeasurementRecord.model_validate_json(record.model_dump_json()) == record
    assert list(dict.fromkeys(event.phase for event in events)) == PHASES


def test_memory_that_a_cap_denies_is_named_with_its_phase(fork_server: ProbeServer) -> None:
    record = ran(request_of("out_of_memory_in_backward", cap_bytes=160 * MIB), fork_server)
    assert (record.status, record.phase) == ("out_of_memory", "backward")
    assert "can't allocate memory" in record.message
    assert (record.device.memory_cap_bytes, record.step_seconds) == (160 * MIB, ())


def test_a_hang_ends_at_the_deadline_with_all_its_children(fork_server: ProbeServer) -> None:
    """Wherever a busy machine lets it come to; some of its children ignore SIGTERM."""
    record = ran(request_of("leave_children_and_hang"), fork_server, deadline_seconds=3.0)
    assert record.status == "timed_out"
    assert "3 s" in record.message


def test_a_worker_that_is_killed_says_where_it_was(fork_server: ProbeServer) -> None:
    record = ran(request_of("kill_itself"), fork_server)
    assert (record.status, record.phase) == ("crashed", "forward")
    assert "SIGKILL" in record.message


def test_two_ranks_are_measured_as_one(fork_server: ProbeServer) -> None:
    """Time is the slower rank's, memory the fuller one's; rates are of one device and of all."""
    request = request_of("rank_1_holds_more", world_size=2, parallelism="ddp")
    record = ran(request, fork_server)
    assert record.status == "measured", record.message
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert (record.world.world_size, record.world.backend, record.world.nodes) == (2, "gloo", 1)
    slowest = max(rank.step_seconds for rank in record.ranks)
    assert median(record.step_seconds) >= slowest * (1 - 1e-6)
    peaks = [rank.peak_allocated_bytes or 0 for rank in record.ranks]
    assert record.peak_allocated_bytes == max(peaks) == peaks[1]
    assert peaks[1] - peaks[0] > 48 * MIB, "rank 1 holds 64 MiB more"
    assert record.world_images_per_second == 2 * record.images_per_second > 0


@pytest.mark.compiler
def test_a_step_is_compiled_and_the_compiler_is_not_held_to_the_cap(
    fork_server: ProbeServer,
) -> None:
    request = request_of("Tiny", cap_bytes=64 * MIB, compile="default")
    record = ran(request, fork_server)
    assert record.status == "measured", record.message
    assert record.compile_seconds is not None
    told = ("fell back to eager", "recompiled", "graph breaks")
    assert not any(flag.startswith(told) or flag.endswith(told) for flag in record.flags)


# Stand-ins for workers (`stand_in.py`), which import no torch.


def stand_in(code: str, setting: dict[str, Any] | None = None, **how: Any) -> MeasurementRecord:
    request = request_of("Tiny", **(setting or {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CODE, code)
        with StandIn(modules=MODULES) as server:
            return run_probe(request, deadline_seconds=AMPLE_SECONDS, fork_server=server, **how)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("sys.exit(3)", "crashed", "exit status 3"),
        ("", "crashed", "exit status 0"),
        ("for fd in (1, 2): os.write(fd, b'x' * (1 << 19))\nos.abort()", "crashed", "SIGABRT"),
        ("import faulthandler; faulthandler.enable(); os.kill(os.getpid(), 11)",
         "crashed", "Segmentation fault"),
        ("os.write(channel, b'{}' * 10)", "crashed", "exit status 0"),
        ("os.kill(os.getppid(), 9); os.read(os.pipe()[0], 1)", "crashed", "ended from outside"),
        ("sys.stderr.write('terminate called: std::bad_alloc'); sys.stderr.flush(); os.abort()",
         "out_of_memory", "bad_alloc"),
    ],
)  # fmt: skip
def test_what_ends_without_an_answer_says_how(code: str, status: str, words: str) -> None:
    record = stand_in(code)
    assert record.status == status
    assert words in record.message
    assert len(record.message) < TAIL_BYTES


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("rank == 1 and os.abort()", "rank 1 of 2: SIGABRT"),
        ("say(type='outcome', status='crashed', lost_others=rank == 0, message='own')",
         "rank 1 of 2: own"),
    ],
)  # fmt: skip
def test_the_rank_whose_own_fault_it_was_is_named(code: str, words: str) -> None:
    world = {"world_size": 2, "parallelism": "ddp"}
    record = stand_in(f"{code}\nimport time; time.sleep(600)", world)
    assert record.status == "crashed"
    assert words in record.message


def test_a_kill_by_the_kernel_is_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "count_kernel_kills", lambda: 8)
    for before, status in ((7, "out_of_memory"), (8, "crashed"), (None, "out_of_memory")):
        assert protocol.judge_death(signal.SIGKILL, "", before)[0] == status


def test_an_answer_is_heard_before_its_worker_has_ended_with_all_that_it_started() -> None:
    """What a tuner that is killed meanwhile would otherwise lose. Garbage before it is passed
    over, whatever writes it."""
    heard: list[MeasurementRecord] = []
    code = "os.write(channel, b'\\xff garbage')\nleave()\nanswer()\nimport time; time.sleep(600)"
    whole = stand_in(code, on_result=heard.append)
    (answer,) = heard
    assert answer.status == whole.status == "measured"
    assert answer.step_seconds == whole.step_seconds == (1.0,)


FORWARD = "leave()\nsay(type='progress', phase='forward')\nimport time; time.sleep(600)"


def test_an_interrupt_ends_the_worker() -> None:
    """Ctrl-C arrives while listening; the fixture looks for what remains."""

    def interrupt(event: ProgressMessage) -> None:
        if event.phase == "forward":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stand_in(FORWARD, on_event=interrupt)


PARENT = """
from search.probe.parent import run_probe
from tests.search.probes import request_of
from tests.search.probe.stand_in import MODULES, StandIn
run_probe(request_of("Tiny"), deadline_seconds=300, fork_server=StandIn(modules=MODULES),
          on_event=lambda event: print(event.phase, flush=True))
"""


@pytest.mark.parametrize("phase", [b"start", b"forward"])
def test_a_killed_parent_leaves_no_orphan(phase: bytes) -> None:
    """SIGKILL to the tuner while its server imports, and in mid-probe: server, supervisor, worker
    and its children go too."""
    environment = {**os.environ, CODE: FORWARD}
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    with parent.stdout:
        assert phase + b"\n" in parent.stdout
    parent.kill()
    parent.wait()


def test_a_fork_server_that_is_gone_is_started_anew_and_a_late_one_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server is known to live once a worker's end is told, which comes after its start; an answer
    may come before that, and then the server is ended with the worker."""
    monkeypatch.setenv(CODE, "")
    with StandIn(modules=MODULES) as server:
        server._process.kill()
        server._process.wait()
        for _ in range(2):
            found = run_probe(request_of("Tiny"), deadline_seconds=300, fork_server=server)
            assert "exit status 0" in found.message
        os.kill(server.pid, signal.SIGSTOP)
        late = run_probe(request_of("Tiny"), deadline_seconds=0.5, fork_server=server)
        assert (late.status, late.phase) == ("timed_out", "start")


def test_a_server_that_has_touched_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts again without what touched it. A stand-in for torch says whether a fork is bad."""
    monkeypatch.setenv(CODE, "say(type='outcome', status='measured', message=str(sys.modules.keys()"
                       " & {'tests.search.probe.touches_cuda'}), step_seconds=[1.0])")  # fmt: skip
    with StandIn(modules=(*MODULES, "tests.search.probe.touches_cuda")) as server:
        found = run_probe(request_of("Tiny"), deadline_seconds=300, fork_server=server)
    assert (found.status, found.message) == ("measured", "set()")
