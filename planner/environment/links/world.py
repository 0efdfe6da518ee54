"""A world of this machine's devices that times its collectives: one process for each rank.

The ranks end with this process, and all together: when one dies, or the deadline has passed, all
are killed, and the error names the rank and what it was at. No torch is imported here.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from planner.environment.links.plan import LinkPlan
from planner.environment.links.rank import Plan, as_argument
from planner.errors import PlannerError
from planner.schema.link import LinkCurve, LinkPoint

# What NCCL and gloo are told, beside NCCL_*: a curve is of the same network only with these.
_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
_LAST_WORDS = 400  # characters


@dataclass
class _Rank:
    """A rank's process, what it said last and how it was found to end."""

    number: int
    process: subprocess.Popen[bytes]
    errors: Path
    at: str = "the import of torch"
    done: bool = False


@dataclass
class _Heard:
    """What the ranks answered."""

    points: list[LinkPoint] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def measure_link(plan: LinkPlan) -> LinkCurve:
    """The link between `plan.world_size` devices of this machine. Raises PlannerError where a rank
    fails, and when the deadline has passed."""
    heard = _Heard()
    with tempfile.TemporaryDirectory(prefix="planner-links-") as folder:
        answers: queue.Queue[tuple[int, bytes]] = queue.Queue()
        with _ranks(plan, Path(folder)) as ranks:
            for rank in ranks:
                _listen(rank, answers)
            _gather(plan, ranks, answers, heard)
    heard.points.sort(key=lambda point: (point.collective, point.num_bytes))
    return LinkCurve(
        device=plan.device,
        backend=plan.backend,
        world_size=plan.world_size,
        points=tuple(heard.points),
        versions=heard.versions,
        variables={n: os.environ[n] for n in sorted(os.environ) if n.startswith(_VARIABLES)},
        topology=plan.topology,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def _ranks(plan: LinkPlan, folder: Path) -> Iterator[list[_Rank]]:
    """The processes of a world, none of which is left when this ends."""
    ranks: list[_Rank] = []
    try:
        for number in range(plan.world_size):
            ranks.append(_start(plan, number, folder))
        yield ranks
    finally:
        for rank in ranks:
            _kill(rank.process)
        for rank in ranks:
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stdout):
                if pipe is not None:
                    pipe.close()


def _start(plan: LinkPlan, number: int, folder: Path) -> _Rank:
    work = Plan(
        backend=plan.backend,
        world_size=plan.world_size,
        rank=number,
        store=str(folder / "store"),
        sizes=plan.sizes,
        collectives=plan.collectives,
        budget_seconds=plan.budget_seconds,
        deadline_seconds=plan.deadline_seconds,
    )
    errors = folder / f"rank-{number}.txt"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "planner.environment.links.rank", as_argument(work)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            env=_environment(plan), start_new_session=True,
        )  # fmt: skip
    return _Rank(number, process, errors)


def _environment(plan: LinkPlan) -> dict[str, str]:
    """One thread for each rank, as torchrun sets it; ranks of one machine meet on its loopback,
    which needs no name to be resolved."""
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if plan.backend == "gloo" and Path("/sys/class/net/lo").exists():
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**defaults, **os.environ, "PYTHONPATH": path}


def _listen(rank: _Rank, answers: queue.Queue[tuple[int, bytes]]) -> None:
    """Puts each line of a rank into the queue, and an empty one when it has closed its end."""
    pipe: IO[bytes] | None = rank.process.stdout
    assert pipe is not None

    def listen() -> None:
        try:
            for line in pipe:
                answers.put((rank.number, line))
        except ValueError:  # closed while it was read: everything has been said
            return
        answers.put((rank.number, b""))

    threading.Thread(target=listen, daemon=True).start()


def _gather(
    plan: LinkPlan,
    ranks: Sequence[_Rank],
    answers: queue.Queue[tuple[int, bytes]],
    heard: _Heard,
) -> None:
    """Hears the ranks until all are done. Raises PlannerError when one ends before."""
    end = time.monotonic() + plan.deadline_seconds
    while not all(rank.done for rank in ranks):
        try:
            number, line = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise _late(plan, ranks) from None
        rank = ranks[number]
        if line:
            _hear(rank, line, heard)
        elif not rank.done:
            raise _ended(rank, ranks)


def _hear(rank: _Rank, line: bytes, heard: _Heard) -> None:
    answer: dict[str, Any] = json.loads(line)
    rank.at = answer.get("at", rank.at)
    if "point" in answer:
        heard.points.append(LinkPoint(**answer["point"]))
    if "done" in answer:
        rank.done = True
        heard.versions.update(answer["done"])


def _late(plan: LinkPlan, ranks: Sequence[_Rank]) -> PlannerError:
    waiting = [rank for rank in ranks if not rank.done]
    told = "; ".join(f"rank {rank.number} was at {rank.at}" for rank in waiting)
    return PlannerError(
        f"the link was not measured within {plan.deadline_seconds:.0f} s: {told}. All "
        f"{len(ranks)} ranks were ended.",
        "Try fewer GPUs; with NCCL, set NCCL_DEBUG=INFO to see what it waits for.",
    )


def _ended(rank: _Rank, ranks: Sequence[_Rank]) -> PlannerError:
    """Why a rank ended before its time. `rank` is the first that was noticed; one that was killed
    may be noticed after a peer that lost it."""
    with suppress(subprocess.TimeoutExpired):
        rank.process.wait(timeout=5)  # its output is closed a moment before it is gone
    killed = [other for other in ranks if (other.process.poll() or 0) < 0]
    first = killed[0] if killed else rank
    status = first.process.poll()
    if status is not None and status < 0:
        how = f"was ended by {_signal_name(-status)}"
    elif status is None:
        how = "closed its output"
    else:
        how = f"ended with status {status}"
    words = _last_words(first)
    return PlannerError(
        f"rank {first.number} of {len(ranks)} {how} at {first.at}"
        f"{f': {words}' if words else ''}. The others were ended.",
        "Run it again; with NCCL, set NCCL_DEBUG=INFO to see more.",
    )


def _last_words(rank: _Rank) -> str:
    """The last line that it wrote to standard error."""
    lines = rank.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[:_LAST_WORDS].rstrip(".") if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """A rank and whatever it started: it leads a session of its own. One that was found dead has
    given its number back."""
    if process.returncode is not None:
        return
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):
        pass
