"""Real workers that go wrong, each in its own way: what the record says, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from planner.core.schema import MeasurementRecord
from planner.core.units import MIB
from search.probe.parent.attendance import TAIL_BYTES
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent, run_probe
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.search.processes import nothing_more_remains

# Deadlines of what hangs: the first is enough to come there from a fork server where the machine
# is quiet, the last where it is busy.
DEADLINES_SECONDS = (2.0, 8.0, 27.0)


def probe(
    fork_server: ForkServer | None, factory: str, *, deadline_seconds: float = AMPLE_SECONDS,
    on_event: Any = None, **setting: object,
) -> MeasurementRecord:  # fmt: skip
    return run_probe(
        request_of(factory, **setting), deadline_seconds=deadline_seconds,
        fork_server=fork_server, on_event=on_event,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_remains(token: str, fork_server: ForkServer) -> Iterator[None]:
    with nothing_more_remains(token):
        yield


@pytest.mark.parametrize(
    ("factory", "phase"),
    [
        ("out_of_memory_in_forward", "forward"),
        ("out_of_memory_in_backward", "backward"),
        ("out_of_memory_in_late_forward", "forward"),
        ("out_of_memory_in_optimizer", "optimizer"),
    ],
)
def test_out_of_memory_names_its_phase(fork_server: ForkServer, factory: str, phase: str) -> None:
    record = probe(fork_server, factory, cap_bytes=160 * MIB)
    assert (record.status, record.phase) == ("out_of_memory", phase)
    assert "can't allocate memory" in record.message


@pytest.mark.parametrize(
    ("factory", "status", "phase", "words"),
    [
        # With the stack of the fault.
        ("segmentation_fault", "crashed", "backward", ("SIGSEGV", "factories.py")),
        ("abort", "crashed", "forward", ("SIGABRT",)),
        ("kill_itself", "crashed", "forward", ("SIGKILL",)),  # no lack of memory
        ("exit_quietly", "crashed", "forward", ("exit status 0 and no answer",)),
        ("flood_and_abort", "crashed", "forward", ("SIGABRT",)),
        ("write_on_every_channel_and_exit", "crashed", "forward", ("unreadable",)),
        ("raises", "unsupported", "build", ("the checkpoint is not there",)),
        ("no_module", "unsupported", "build", ("torch.nn.Module",)),
        ("exits", "unsupported", "build", ("SystemExit",)),
        ("no_such_factory", "unsupported", "build", ("no_such_factory",)),
        ("no_logits", "unsupported", "contract", ("eturn a task",)),
        pytest.param(
            "compile_fails",
            "unsupported",
            "compile",
            ("this pass does not know the graph",),
            marks=pytest.mark.compiler,
        ),
    ],
)
def test_what_ends_without_an_answer_says_how_and_where(
    fork_server: ForkServer, factory: str, status: str, phase: str, words: tuple[str, ...]
) -> None:
    compile_mode = "default" if phase == "compile" else "off"
    record = probe(fork_server, factory, compile=compile_mode)
    assert (record.status, record.phase) == (status, phase)
    assert all(word in record.message for word in words), record.message
    assert len(record.message) < TAIL_BYTES


def test_kill_by_the_kernel_is_lack_of_memory(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([7, 8])
    monkeypatch.setattr("search.probe.failure.count_kernel_kills", lambda: next(counts))
    assert probe(fork_server, "kill_itself").status == "out_of_memory"


def test_a_hang_after_the_answer_keeps_it_and_it_is_heard_before(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a tuner that is killed meanwhile would otherwise lose."""
    monkeypatch.setattr("search.probe.parent.attendance.EXIT_SECONDS", 1.0)
    heard: list[MeasurementRecord] = []
    request = request_of("hang_at_the_end")
    whole = run_probe(
        request, deadline_seconds=AMPLE_SECONDS, fork_server=fork_server, on_result=heard.append
    )
    (answer,) = heard
    assert answer.status == "measured"
    assert (answer.step_seconds, whole.status) == (whole.step_seconds, "measured")
    assert answer.probe_seconds < whole.probe_seconds - 0.5


def test_flood_of_output(fork_server: ForkServer) -> None:
    assert probe(fork_server, "flood").status == "measured"


def test_garbage_on_the_result_channel(fork_server: ForkServer) -> None:
    record = probe(fork_server, "write_on_every_channel")
    assert record.status == "measured"
    assert any("unreadable" in flag for flag in record.flags)


def test_children_left_behind_are_ended(fork_server: ForkServer) -> None:
    record = probe(fork_server, "leave_children")
    assert record.status == "measured"
    assert any("left 3 processes behind" in flag for flag in record.flags)


def test_compile_workers_are_ended_without_a_word(fork_server: ForkServer) -> None:
    """They are the compiler's, and end with every compiled probe on a GPU."""
    record = probe(fork_server, "leave_compile_workers")
    assert record.status == "measured"
    assert not any("left" in flag for flag in record.flags)


def test_loss_that_is_no_number(fork_server: ForkServer) -> None:
    for factory, precision in (("nan_at_once", "fp32"), ("nan_while_timed", "fp16")):
        assert probe(fork_server, factory, precision=precision).status == "non_finite"


def test_factory_that_prints(fork_server: ForkServer) -> None:
    """Even what looks like an answer does not reach the channel."""
    record = probe(fork_server, "prints")
    assert record.status == "measured"
    assert not any("unreadable" in flag for flag in record.flags)


HANGING = {
    "hang_in_build": "build",
    "hang_in_forward": "forward",
    "hang_while_timed": "measure",
    "hang_and_ignore_sigterm": "forward",
    "leave_children_and_hang": "forward",
}


def probe_what_hangs(fork_server: ForkServer, factory: str, phase: str) -> MeasurementRecord:
    """With the first deadline that is late enough to come to `phase`, which the record names."""
    compile_mode = "default" if factory.startswith("compile") else "off"
    for seconds in DEADLINES_SECONDS:
        record = probe(fork_server, factory, deadline_seconds=seconds, compile=compile_mode)
        assert record.status == "timed_out"
        assert f"{seconds:g} s" in record.message
        if record.phase == phase:
            break
    return record


@pytest.fixture(scope="module")
def hung(fork_server: ForkServer) -> dict[str, MeasurementRecord]:
    """All at once: they do nothing but wait for the deadline."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(HANGING)) as pool:
        patch.setattr("search.probe.parent.attendance.EXIT_SECONDS", 1.0)
        found = pool.map(lambda item: probe_what_hangs(fork_server, *item), HANGING.items())
        return dict(zip(HANGING, found, strict=True))


@pytest.mark.parametrize(("factory", "phase"), HANGING.items())
def test_hang_ends_at_the_deadline(
    hung: dict[str, MeasurementRecord], factory: str, phase: str
) -> None:
    assert hung[factory].phase == phase


@pytest.mark.compiler
def test_a_compiler_that_hangs_ends_at_the_deadline(fork_server: ForkServer) -> None:
    assert probe_what_hangs(fork_server, "compile_hangs", "compile").phase == "compile"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import time; time.sleep(600)", "timed_out", "in start"),
        ("raise SystemExit(3)", "crashed", "exit status 3"),
        ("import os; os.write(int(__import__('sys').argv[2]), b'{}' * 10)", "crashed", "1 unread"),
        ("import os; os.write(int(__import__('sys').argv[2]), b'x' * (1 << 22))", "crashed", "unr"),
        ("import sys; sys.stderr.write('terminate called: std::bad_alloc'); import os; os.abort()",
         "out_of_memory", "bad_alloc"),
    ],
)  # fmt: skip
def test_worker_of_another_kind(code: str, status: str, words: str) -> None:
    record = run_probe(
        request_of("tiny"),
        deadline_seconds=0.5 if status == "timed_out" else AMPLE_SECONDS,
        worker_command=[sys.executable, "-S", "-c", code],
    )
    assert record.status == status
    assert words in record.message


def test_worker_that_cannot_be_started() -> None:
    record = run_probe(
        request_of("tiny"), deadline_seconds=AMPLE_SECONDS, worker_command=["/no/such/program"]
    )
    assert record.status == "crashed"
    assert "could not be started" in record.message


def test_supervisor_killed_from_outside(fork_server: ForkServer) -> None:
    """The worker goes with it, and the record says whose fault it was."""

    def kill_guard(event: ProbeEvent) -> None:
        if event.phase == "forward":
            for guard in psutil.Process(fork_server.pid).children():
                guard.kill()

    record = probe(fork_server, "hang_in_forward", on_event=kill_guard)
    assert record.status == "crashed"
    assert "supervisor" in record.message


def test_interrupt_ends_the_worker(fork_server: ForkServer) -> None:
    """Ctrl-C arrives while listening; the fixture looks for what remains."""

    def interrupt(event: ProbeEvent) -> None:
        if event.phase == "forward":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(fork_server, "leave_children_and_hang", on_event=interrupt)


# What stands for a worker where it is a process of its own: it leaves children as a factory may,
# says that it trains, and hangs. It imports no torch.
LEAVING = """
import json, os, subprocess, sys, time
order = json.loads(os.read(int(sys.argv[1]), 1 << 16))
sleeper = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork(); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", sleeper], start_new_session=True)
if os.fork():
    said = {"probe_id": order["request"]["probe_id"], "type": "phase", "phase": "forward"}
    os.write(int(sys.argv[2]), json.dumps(said).encode() + b"\\n")
time.sleep(600)
"""
PARENT = f"""
import sys
from contextlib import nullcontext
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from tests.search.probes import request_of
served = sys.argv[1] == "fork_server"
with ForkServer() if served else nullcontext() as fork_server:
    run_probe(request_of("leave_children_and_hang"), deadline_seconds=300, fork_server=fork_server,
              worker_command=None if served else [sys.executable, "-S", "-c", {LEAVING!r}],
              on_event=lambda event: print(event.phase, flush=True))
"""


@pytest.mark.parametrize("start", ["process", "fork_server"])
def test_killed_parent_leaves_no_orphan(start: str) -> None:
    """SIGKILL to the tuner in mid-probe: supervisor, server, worker and its children go too."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, start], stdout=subprocess.PIPE)
    assert b"forward\n" in parent.stdout
    parent.kill()
    parent.wait()


def test_fork_server_that_is_gone_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the worker is a process of its own, whose command is here a quicker one."""
    command = (sys.executable, "-S", "-c", "raise SystemExit(3)")
    monkeypatch.setattr("search.probe.worker.worker.command_of", lambda module: command)
    with ForkServer() as gone:
        os.kill(gone.pid, signal.SIGKILL)
        record = probe(gone, "tiny")
    assert (record.status, record.message) == ("crashed", "exit status 3"), record.message


def test_deadline_holds_while_the_fork_server_starts(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that is then started by itself is late at once; here it never answers."""
    command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    monkeypatch.setattr("search.probe.worker.worker.command_of", lambda module: command)
    with ForkServer() as slow:
        os.kill(slow.pid, signal.SIGSTOP)
        record = probe(slow, "tiny", deadline_seconds=1.0)
        os.kill(slow.pid, signal.SIGKILL)
    assert record.status == "timed_out"
