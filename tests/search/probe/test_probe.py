"""Real training in real workers, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.core.schema import MeasurementRecord, SwinConfig, TrainSetting
from planner.core.units import MIB
from planner.trainers.emission import emit
from search.probe.device import versions
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import ProbeRequest
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.trainers.cases import recommendation
from tests.trainers.test_pytorch import run_script

MORE = partial(pytest.param, marks=pytest.mark.release)
# Two stages, a shifted window and a merging: every kind of layer there is.
MODEL = SwinConfig(
    image_size=(32, 32), patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(1, 2),
    window_size=4, num_classes=10,
)  # fmt: skip


def swin_request(model: SwinConfig = MODEL, **fields: object) -> ProbeRequest:
    setting = {"batch_size": 4, "precision": "fp32"}
    own = {name: fields.pop(name) for name in list(fields) if name in TrainSetting.model_fields}
    return ProbeRequest.model_validate(
        {"model": model, "setting": {**setting, **own}, "max_steps": 8, **fields}
    )


def ran(fork_server: ForkServer, request: ProbeRequest, on_event: Any = None) -> MeasurementRecord:
    return run_probe(
        request, deadline_seconds=AMPLE_SECONDS, fork_server=fork_server, on_event=on_event
    )


def measured(fork_server: ForkServer, request: ProbeRequest) -> MeasurementRecord:
    record = ran(fork_server, request)
    assert record.status == "measured", record.message
    return record


@pytest.mark.parametrize(
    "setting",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "accumulate": 2},
        {"precision": "fp16"},
        MORE({"precision": "pure-bf16", "memory_format": "channels_last", "optimizer": "sgd"}),
        MORE({"checkpointing": "blocks:every-2"}),
        {"checkpointing": "selective", "accumulate": 2},
        {"checkpointing": "stages", "loss": "soft-target", "ema": True, "clip_grad": True},
        {"optimizer_in_backward": True, "precision": "bf16", "ema": True},
        {"precision": "bf16", "lora_rank": 2, "lora_targets": "all"},
        MORE({"frozen_stages": 1, "checkpointing": "blocks"}),
    ],
)
def test_training_is_measured(fork_server: ForkServer, setting: dict[str, object]) -> None:
    request = swin_request(**setting)
    record = measured(fork_server, request)
    assert record.probe_id == request.probe_id
    assert (record.model, record.setting) == (request.model, request.setting)
    assert 3 <= len(record.step_seconds) <= 8
    images = record.setting.batch_size * record.setting.accumulate
    assert record.images_per_second == pytest.approx(images / median(record.step_seconds))
    assert record.peak_allocated_bytes > 0
    assert record.compile_seconds is None
    assert record.device.kind == "cpu"
    assert record.versions == versions()
    assert MeasurementRecord.model_validate_json(record.model_dump_json()) == record


@pytest.mark.compiler
def test_an_8bit_optimizer_is_measured(fork_server: ForkServer) -> None:
    """A kernel for each shape of weights is compiled in the first step, though the model is not."""
    one_block = MODEL.model_copy(update={"embed_dim": 64, "depths": (1,), "num_heads": (2,)})
    record = measured(fork_server, swin_request(one_block, optimizer="adamw-8bit"))
    assert record.compile_seconds > 0


@pytest.mark.trainers
def test_a_part_of_a_model_is_probed_and_then_trained(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """From the probe to the script that it leads to, which trains."""
    record = measured(fork_server, swin_request(precision="bf16", lora_rank=2, lora_targets="all"))
    found = recommendation(record.model, record.setting).model_copy(
        update={"device": record.device, "evidence": record}
    )
    script = emit(found, "pytorch").text
    ended = run_script(script, tmp_path, "--synthetic", "--steps", "2")
    assert ended.returncode == 0, ended.stderr
    assert "step 2/2" in ended.stdout


def test_events_tell_the_phases_in_order(fork_server: ForkServer) -> None:
    events: list[ProbeEvent] = []
    ran(fork_server, swin_request(), events.append)
    phases = list(dict.fromkeys(event.phase for event in events))
    assert phases == [
        "start", "import", "device", "build", "forward", "backward", "optimizer", "zero_grad",
        "measure", "check", "end",
    ]  # fmt: skip
    times = [event.elapsed_seconds for event in events]
    assert times == sorted(times)


def test_cpu_peak_is_what_the_step_holds(fork_server: ForkServer) -> None:
    """A weight of 64 MiB, its gradient and Adam's two states are alive together: 256 MiB, and the
    for-loop's temporaries of one weight each at most twice."""
    record = measured(
        fork_server, request_of("out_of_memory_in_optimizer", optimizer="adamw-forloop")
    )
    assert 256 * MIB <= record.peak_allocated_bytes <= (256 + 128 + 16) * MIB


def test_memory_cap_is_real_and_named(fork_server: ForkServer) -> None:
    """A batch that fits alone, under a cap of half of what it takes."""
    free = measured(fork_server, swin_request(batch_size=64, max_steps=3))
    cap = free.peak_allocated_bytes // 2
    capped = ran(fork_server, swin_request(batch_size=64, memory_cap_bytes=cap))
    assert capped.status == "out_of_memory"
    assert capped.device.memory_cap_bytes == cap
    assert capped.step_seconds == ()


@pytest.mark.release
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_cap_is_kept_or_named(fork_server: ForkServer, precision: str) -> None:
    """From too little for anything to ample: never a crash, never more than the cap, and the line
    is where a run without a cap has its peak (±15%: the heap's fragments differ from run to run).
    """
    free = measured(fork_server, swin_request(batch_size=64, precision=precision))
    for share in (0.02, 0.1, 0.3, 0.6, 0.8, 0.85, 0.95, 1.0, 1.05, 1.15, 1.4):
        cap = int(free.peak_allocated_bytes * share)
        record = ran(
            fork_server, swin_request(batch_size=64, precision=precision, memory_cap_bytes=cap)
        )
        assert record.status in ("measured", "out_of_memory"), (share, record.message)
        if record.status == "measured":
            assert record.peak_allocated_bytes <= cap
            assert share > 0.85
        else:
            assert share < 1.15


@pytest.mark.compiler
def test_cap_binds_a_compiled_step_too(fork_server: ForkServer) -> None:
    record = ran(
        fork_server,
        request_of("out_of_memory_in_optimizer", cap_bytes=200 * MIB, compile="default"),
    )
    assert record.status == "out_of_memory"


@pytest.mark.compiler
def test_compiler_is_not_held_to_the_cap(fork_server: ForkServer) -> None:
    """A cap under which no C++ compiler could run."""
    record = ran(fork_server, request_of("tiny", cap_bytes=64 * MIB, compile="default"))
    assert record.status == "measured"


@pytest.mark.compiler
def test_fallback_to_eager_is_told(fork_server: ForkServer) -> None:
    record = measured(fork_server, request_of("recompiles_over_the_limit", compile="default"))
    assert any("fell back to eager" in flag for flag in record.flags)


@pytest.mark.parametrize(
    "fields",
    [{"precision": "tf32"}, {"validation_batch_size": 8}],
)
def test_what_a_probe_cannot_stand_for_is_unsupported(
    fork_server: ForkServer, fields: dict[str, object]
) -> None:
    record = ran(fork_server, swin_request(**fields))
    assert record.status == "unsupported"
    assert record.message


def test_device_that_is_not_there_is_the_callers_fault() -> None:
    with pytest.raises(UsageError, match="cuda:7"):
        run_probe(swin_request(device="cuda:7"), deadline_seconds=1)


def test_parent_imports_no_torch() -> None:
    code = (
        "import sys, search.probe.parent.runner, search.probe.device as d;"
        "d.describe_device('cpu');"
        "d.versions(); d.memory_in_use('cpu'); print([m for m in sys.modules if m == 'torch'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert answer.stdout.strip() == b"[]"
