"""Others on the device: a failure says what they held and took. What several ranks measured,
as one; and what a probe trains with: its precision, what the compiler is told."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import backends

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, FactoryModel, TrainSetting
from planner.core.units import GIB, MIB
from planner.training import zero
from planner.training.assembly import set_precision
from search.probe import parent
from search.probe.device import MemoryInUse
from search.probe.parent import merge_ranks, run_probe
from search.probe.protocol import OutcomeMessage, ProbeRequest, Report
from search.probe.worker import measure, meter, subject, verdict
from search.probe.worker.meter import Crowding
from tests.search.probe.stand_in import CODE, MODULES, StandIn
from tests.search.probes import AMPLE_SECONDS, request_of

CARD = DeviceInfo(kind="cuda", name="Card", total_bytes=24 * GIB, capability=(8, 6))


def test_a_model_that_fails_says_how_and_where(report: Report) -> None:
    for factory, status, phase, words in (
        ("raises", "unsupported", "build", "the checkpoint is not there"),
        ("no_module", "unsupported", "build", "torch.nn.Module"),
        ("exits", "unsupported", "build", "SystemExit"),
        ("no_such_factory", "unsupported", "build", "no_such_factory"),
        ("NoLogits", "unsupported", "contract", "eturn a task"),
        ("NotANumber", "non_finite", "forward", "nan"),
    ):
        outcome = measure.measure(request_of(factory), float("inf"), report)
        assert (outcome.status, outcome.phase) == (status, phase), factory
        assert words in outcome.message


class CrowdedMeter(meter.CpuMeter):
    def crowding(self) -> Crowding:
        return Crowding(9 * GIB, 5 * GIB)

    def flags(self) -> list[str]:
        return ["other processes took 5.00 GiB of the GPU meanwhile"]


def test_a_failure_says_who_disturbed_it(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(measure, "make_meter", lambda device: CrowdedMeter())
    for factory in ("raises", "Tiny"):
        outcome = measure.measure(request_of(factory), float("inf"), report)
        assert (outcome.status == "measured") == (factory == "Tiny")
        assert "other processes took 5.00 GiB of the GPU meanwhile" in outcome.flags
        assert (outcome.free_bytes, outcome.taken_bytes) == (9 * GIB, 5 * GIB)


class SleepingClock:
    """A clock that only sleeping moves, from now on: the worker's own goes on."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("used", "taken"),
    [
        ([2, 15], 13),  # a neighbour came, and stays
        ([2, 15, 9, 2], 0),  # what fell was the worker's own, given back after its end
    ],
)
def test_for_a_worker_that_cannot_say_it_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch, used: list[int], taken: int
) -> None:
    monkeypatch.setattr(parent, "time", SleepingClock())
    monkeypatch.setattr(parent, "describe_device", lambda device: CARD)
    left = [n * GIB for n in used]

    def in_use(device: str) -> MemoryInUse:
        now = left.pop(0) if len(left) > 1 else left[0]
        return MemoryInUse(24 * GIB, now, 24 * GIB - now)

    monkeypatch.setattr(parent, "memory_in_use", in_use)
    request = request_of("Tiny").model_copy(update={"device": "cuda:0"})
    monkeypatch.setenv(CODE, "os.abort()")
    monkeypatch.setenv(parent.THREADS, "1")  # for which the memory would be asked too
    with StandIn(modules=MODULES) as server:
        record = parent.run_probe(request, deadline_seconds=AMPLE_SECONDS, fork_server=server)
    assert record.status == "crashed"
    assert (record.free_bytes, record.taken_bytes) == (22 * GIB, taken * GIB)


def test_what_ranks_say_is_put_together() -> None:
    """Steps by the slower rank each, peaks by the fuller, flags with the ranks that have them."""
    slow = OutcomeMessage(
        status="measured", step_seconds=(1.0, 4.0), peak_reserved_bytes=10,
        device_bytes=12, flags=("both", "mine"), free_bytes=7, taken_bytes=1,
    )  # fmt: skip
    fast = slow.model_copy(
        update={"step_seconds": (2.0, 3.0), "peak_reserved_bytes": 20, "device_bytes": 22,
                "flags": ("both",), "free_bytes": 5}
    )  # fmt: skip
    found = merge_ranks([slow, fast], ["cuda:0", "cuda:1"])
    assert found.step_seconds == (2.0, 4.0)
    assert (found.peak_reserved_bytes, found.device_bytes) == (20, 22)
    assert (found.free_bytes, found.taken_bytes) == (5, 1)
    assert found.flags == ("both", "rank 0: mine")
    assert [rank.device_bytes for rank in found.ranks] == [12, 22]


def test_what_no_probe_runs_is_said_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = TrainSetting(parallelism="zero2", world_size=2)
    monkeypatch.setattr(zero, "find_spec", lambda name: "found")
    for fields, way_out in (
        ({"precision": "pure-bf16"}, "Set precision=bf16"),
        ({"compile": "default"}, "Set compile=off"),
        ({"zero_grad_to_none": False}, "Set zero_grad_to_none=true"),
    ):
        with pytest.raises(UnsupportedError, match=way_out):
            zero.refuse_unsupported(sharded.model_copy(update=fields))
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="Install deepspeed, or choose"):
        zero.refuse_unsupported(sharded)


@pytest.mark.trainers
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_two_ranks_of_deepspeed_are_measured() -> None:
    """What DeepSpeed imports (80 MB and more) is not the setting's memory."""
    setting = {"parallelism": "zero2", "precision": "bf16", "ema": True, "world_size": 2}
    record = run_probe(request_of("Tiny", **setting), deadline_seconds=AMPLE_SECONDS)
    assert record.status == "measured", record.message
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank in record.ranks:
        assert 0 < (rank.peak_allocated_bytes or 0) < 24 * MIB
        assert rank.step_seconds > 0


# (precision, what fp32 matmul is set to, whether cuDNN may use TF32)
PRECISIONS = [("fp32", "highest", False), ("tf32", "high", True), ("bf16", "highest", True)]


def request(precision: str) -> ProbeRequest:
    setting = TrainSetting.model_validate({"precision": precision})
    return ProbeRequest(model=FactoryModel(factory="a:b"), setting=setting)


@pytest.fixture(autouse=True)
def _precision_is_put_back() -> Iterator[None]:
    benchmark = backends.cudnn.benchmark
    yield
    set_precision(request("bf16").setting)
    backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize(("wanted", "below"), [("tf32", (7, 5)), ("fp8", (8, 0))])
def test_matrix_units_that_the_device_lacks_are_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, below: tuple[int, int]
) -> None:
    asked = request(wanted)
    with pytest.raises(UnsupportedError, match=f"{wanted} needs an NVIDIA GPU.*cpu supports only"):
        verdict.check_matrix_units(asked)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    on_gpu = asked.model_copy(update={"device": "cuda:0"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: below)
    with pytest.raises(UnsupportedError, match=f"{wanted} needs .*cuda:0 supports only fp32"):
        verdict.check_matrix_units(on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    verdict.check_matrix_units(on_gpu)
    verdict.check_matrix_units(request("bf16"))


@pytest.mark.parametrize(("precision", "matmul", "cudnn"), PRECISIONS)
@pytest.mark.parametrize("value", ["tf32", "ieee"])
@pytest.mark.parametrize(
    "owner", [backends, backends.cudnn, backends.cudnn.conv, backends.cuda.matmul]
)
def test_precision_holds_over_what_the_newer_interface_set(
    owner: Any, value: str, precision: str, matmul: str, cudnn: bool
) -> None:
    """Whose getters and the older ones' raise where the two disagree (torch 2.9 to 2.13)."""
    set_precision(request("bf16").setting)
    owner.fp32_precision = value
    set_precision(request(precision).setting)
    assert torch.get_float32_matmul_precision() == matmul
    assert backends.cuda.matmul.allow_tf32 == (matmul == "high")
    assert backends.cudnn.allow_tf32 == cudnn
    assert (backends.cudnn.conv.fp32_precision == "tf32") == cudnn


def test_users_precision_gives_way_to_the_settings(report: Report) -> None:
    for factory in ("sets_tf32_anew", "sets_tf32_of_old"):
        outcome = measure.measure(request_of(factory), float("inf"), report)
        assert outcome.status == "measured", outcome.message


def test_compiler_is_told_what_emitted_files_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """dynamic=None would compile anew for a last batch of another size, and then for any size."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda module, **said: told.update(said) or module)
    subject.build_training(request_of("Tiny", compile="reduce-overhead"))
    assert told == {"mode": "reduce-overhead", "dynamic": False}
