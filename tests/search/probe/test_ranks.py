"""Probes over several real ranks (gloo, on the CPU): what they measure, and how they end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from planner.errors import UnsupportedError
from planner.parallel.data_parallel import refuse_unsupported
from planner.schema import MeasurementRecord, SwinConfig, TrainSetting
from planner.units import MIB
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.ranks import put_together, shared_flags
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.parent.supervisor import descendants
from search.probe.protocol import OutcomeMessage
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.search.processes import remaining

# Enough to come to training on a busy machine, and what a hanging rank's test takes.
SHORT_SECONDS = 25.0


def probe(
    fork_server: ForkServer, factory: str = "tiny", *, cap_bytes: int | None = None,
    deadline_seconds: float = AMPLE_SECONDS, **setting: object,
) -> MeasurementRecord:  # fmt: skip
    fields = {"world_size": 2, "parallelism": "ddp", **setting}
    return run_probe(
        request_of(factory, cap_bytes, **fields),
        deadline_seconds=deadline_seconds,
        fork_server=fork_server,
    )


@pytest.fixture(autouse=True)
def _nothing_remains(token: str, fork_server: ForkServer) -> Iterator[None]:
    yield
    assert not remaining(token)


@pytest.fixture(scope="module")
def world(fork_server: ForkServer) -> MeasurementRecord:
    return probe(fork_server, "rank_1_holds_more")


def test_two_ranks_are_measured_as_one(world: MeasurementRecord) -> None:
    assert world.status == "measured", world.message
    assert [rank.rank for rank in world.ranks] == [0, 1]
    assert world.world is not None
    assert (world.world.world_size, world.world.backend, world.world.nodes) == (2, "gloo", 1)
    assert world.world.threads is not None
    assert world.world.threads >= 1


def test_time_is_the_slowest_ranks(world: MeasurementRecord) -> None:
    slowest = max(rank.step_seconds for rank in world.ranks)
    assert sorted(world.step_seconds)[len(world.step_seconds) // 2] >= slowest * (1 - 1e-6)


def test_memory_is_the_fullest_ranks(world: MeasurementRecord) -> None:
    peaks = [rank.peak_allocated_bytes or 0 for rank in world.ranks]
    assert world.peak_allocated_bytes == max(peaks) == peaks[1]
    assert peaks[1] - peaks[0] > 48 * MIB, "rank 1 holds 64 MiB more"


def test_rates_are_of_one_device_and_of_all(world: MeasurementRecord) -> None:
    assert world.images_per_second is not None
    assert world.world_images_per_second == 2 * world.images_per_second


SPREAD = [
    {"parallelism": "fsdp", "accumulate": 2, "clip_grad": True},
    {"parallelism": "hsdp", "world_size": 4, "fsdp_shard_size": 2},
    {"ddp_bucket_view": True, "ddp_find_unused": True, "accumulate": 2, "gradient_sync": "every"},
]
MORE_SPREAD = [
    {"parallelism": "fsdp", "fsdp_param_dtype": "bf16", "fsdp_reduce_dtype": "fp32", "ema": True},
    {"parallelism": "fsdp", "precision": "fp16", "fsdp_reshard": False},
    {"parallelism": "fsdp", "precision": "pure-bf16", "optimizer": "adamw-fused"},
    {"ddp_compression": "fp16", "ddp_bucket_mb": 1, "ddp_broadcast_buffers": False},
    {"ddp_static_graph": True, "accumulate": 2, "gradient_sync": "every"},
    {"precision": "fp16", "accumulate": 2, "zero_grad_to_none": False, "ddp_bucket_view": True},
    {"world_size": 3, "precision": "bf16"},
    {"world_size": 1},
    {"world_size": 1, "parallelism": "fsdp"},
]


@pytest.mark.parametrize(
    "setting", [*SPREAD, *(pytest.param(s, marks=pytest.mark.combinations) for s in MORE_SPREAD)]
)
def test_every_way_to_spread_is_run(fork_server: ForkServer, setting: dict[str, object]) -> None:
    record = probe(fork_server, **setting)
    assert record.status == "measured", record.message
    assert len(record.ranks) == setting.get("world_size", 2)


def test_a_swin_of_ours_under_fsdp(fork_server: ForkServer) -> None:
    """Each block is a unit, and the rest the root's."""
    model = SwinConfig(
        library="native", name="tiny", image_size=(64, 64), patch_size=4, window_size=2,
        embed_dim=24, depths=(2, 2), num_heads=(2, 4), num_classes=10,
    )  # fmt: skip
    request = request_of("tiny", world_size=2, parallelism="fsdp").model_copy(
        update={"model": model}
    )
    record = run_probe(request, deadline_seconds=AMPLE_SECONDS, fork_server=fork_server)
    assert record.status == "measured", record.message


def test_a_slow_rank_is_named(fork_server: ForkServer) -> None:
    record = probe(fork_server, "rank_1_is_slow")
    assert record.status == "measured", record.message
    (flag,) = [flag for flag in record.flags if "straggler" in flag]
    assert flag.startswith("rank 1 (cpu)")
    fast, slow = (rank.step_seconds for rank in record.ranks)
    assert abs(slow / fast - 1) < 0.5, "both wait for it: their steps do not show it"


@pytest.mark.parametrize(
    ("factory", "status", "words"),
    [
        ("rank_1_out_of_memory", "out_of_memory", "can't allocate memory"),
        ("rank_1_is_killed", "crashed", "SIGKILL"),
        ("rank_1_exits", "crashed", "exit status 0 and no answer"),
        ("rank_1_raises", "crashed", "the fault of rank 1"),
    ],
)
def test_a_probe_ends_by_the_rank_that_failed(
    fork_server: ForkServer, factory: str, status: str, words: str
) -> None:
    """Never by the others, who lose their connections by it."""
    record = probe(fork_server, factory, cap_bytes=400 * MIB, world_size=3)
    assert record.status == status
    assert record.message.startswith("rank 1 of 3: ")
    assert words in record.message
    assert not record.ranks


@pytest.mark.workers
def test_ranks_that_lost_each_other_for_no_known_cause(fork_server: ForkServer) -> None:
    """Nobody says more: the first that said so is believed, after a while."""
    record = probe(fork_server, "rank_1_loses_the_others")
    assert record.status == "crashed"
    assert "Connection closed by peer" in record.message


@pytest.mark.workers
def test_a_rank_that_hangs_ends_with_all_at_the_deadline(fork_server: ForkServer) -> None:
    started = time.monotonic()
    record = probe(fork_server, "rank_1_hangs", deadline_seconds=SHORT_SECONDS)
    assert record.status == "timed_out"
    assert record.phase == "forward"
    assert "rank 1 in forward; rank 0 in backward" in record.message
    assert time.monotonic() - started < SHORT_SECONDS + AMPLE_SECONDS


def rank_pids(fork_server: ForkServer) -> list[int]:
    """The workers: what the supervisors, which the server forks, have forked."""
    return [pid for pid in descendants(fork_server.pid) if _parent(pid) != fork_server.pid]


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return -1


def kill_one_at_random(fork_server: ForkServer, seed: int) -> None:
    """Of three ranks, at a random moment of a probe that would take much longer."""
    draw = random.Random(seed)
    killed: list[int] = []

    def kill(event: ProbeEvent) -> None:
        if event.phase != "import" or killed:
            return
        killed.append(0)
        threading.Timer(draw.uniform(0, 4), strike).start()

    def strike() -> None:
        while len(pids := rank_pids(fork_server)) < 3:
            time.sleep(0.01)
        os.kill(draw.choice(pids), signal.SIGKILL)

    request = request_of("tiny", world_size=3, parallelism=draw.choice(("ddp", "fsdp")))
    long = request.model_copy(update={"min_measure_seconds": 600.0, "max_measure_seconds": 900.0})
    record = run_probe(long, deadline_seconds=200, fork_server=fork_server, on_event=kill)
    assert record.status == "crashed", record
    assert "SIGKILL" in record.message
    assert record.probe_seconds < 200


@pytest.mark.parametrize("seed", range(1))
def test_one_of_three_ranks_is_killed(fork_server: ForkServer, token: str, seed: int) -> None:
    kill_one_at_random(fork_server, seed)
    assert not remaining(token)


@pytest.mark.repeated
@pytest.mark.parametrize("seed", range(1, 30))
def test_one_of_three_ranks_is_killed_again(fork_server: ForkServer, token: str, seed: int) -> None:
    kill_one_at_random(fork_server, seed)
    assert not remaining(token)


def test_a_lost_supervisor_ends_all_ranks(fork_server: ForkServer) -> None:
    def kill(event: ProbeEvent) -> None:
        if event.phase == "backward":
            supervisors = [p for p in descendants(fork_server.pid) if _parent(p) == fork_server.pid]
            os.kill(supervisors[0], signal.SIGKILL)

    record = run_probe(
        request_of("rank_1_hangs", world_size=2, parallelism="ddp"),
        deadline_seconds=AMPLE_SECONDS, fork_server=fork_server, on_event=kill,
    )  # fmt: skip
    assert record.status == "crashed"
    assert "supervisor" in record.message


def test_interrupt_ends_all_ranks(fork_server: ForkServer) -> None:
    def interrupt(event: ProbeEvent) -> None:
        if event.phase == "backward":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_probe(
            request_of("rank_1_hangs", world_size=2, parallelism="ddp"),
            deadline_seconds=AMPLE_SECONDS, fork_server=fork_server, on_event=interrupt,
        )  # fmt: skip


PARENT = """
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from tests.search.probes import request_of
with ForkServer() as fork_server:
    run_probe(request_of("rank_1_hangs", world_size=2, parallelism="ddp"), deadline_seconds=300,
              fork_server=fork_server, on_event=lambda event: print(event.phase, flush=True))
"""


@pytest.mark.workers
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_parent_that_is_ended_leaves_no_rank(number: signal.Signals) -> None:
    """The fixture looks for what remains."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    for line in parent.stdout:
        if line.strip() == b"backward":
            break
    parent.send_signal(number)
    assert parent.wait(AMPLE_SECONDS) != 0


def test_gradients_in_bf16_over_gloo_are_refused() -> None:
    setting = TrainSetting(parallelism="ddp", world_size=2, ddp_compression="bf16")
    with pytest.raises(UnsupportedError, match="Set ddp_compression=fp16"):
        refuse_unsupported(setting, "cpu")


def test_fsdp1_is_unsupported_with_a_way_out(fork_server: ForkServer) -> None:
    record = probe(fork_server, parallelism="fsdp", fsdp_version=1)
    assert record.status == "unsupported"
    assert "Set fsdp_version=2" in record.message


def test_what_ranks_say_is_put_together() -> None:
    """Steps by the slower rank each, peaks by the fuller, flags with the ranks that have them."""
    slow = OutcomeMessage(
        probe_id="x", status="measured", step_seconds=(1.0, 4.0), peak_reserved_bytes=10,
        device_bytes=12, forward_seconds=0.5, flags=("both", "mine"), free_bytes=7, taken_bytes=1,
    )  # fmt: skip
    fast = slow.model_copy(
        update={"step_seconds": (2.0, 3.0), "peak_reserved_bytes": 20, "device_bytes": 22,
                "forward_seconds": 0.25, "flags": ("both",), "free_bytes": 5}
    )  # fmt: skip
    found = put_together([slow, fast], ["cuda:0", "cuda:1"])
    assert found.step_seconds == (2.0, 4.0)
    assert (found.peak_reserved_bytes, found.device_bytes) == (20, 22)
    assert (found.free_bytes, found.taken_bytes) == (5, 1)
    assert found.flags[:2] == ("both", "rank 0: mine")
    assert found.flags[2].startswith("rank 0 (cuda:0) is a straggler")
    assert "2.00 ×" in found.flags[2]
    assert [rank.device_bytes for rank in found.ranks] == [12, 22]


def test_flags_of_all_are_said_once() -> None:
    assert shared_flags([("a", "b"), ("a",), ("a", "b")]) == ("a", "rank 0, 2: b")
