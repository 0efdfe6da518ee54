"""What the caching allocator is told, wherever that is said, in the estimate, the tuner and the
comparison with records."""

from __future__ import annotations

import pytest

from planner import SwinConfig, TrainSetting, estimate, find_gpu
from planner.core.schema import DeviceInfo, MeasurementRecord
from planner.core.torch_version import as_of
from planner.core.units import GIB
from planner.machine.hardware.overheads import overheads_for
from planner.memory.allocator_config import AllocatorConfig, parse_allocator_config
from search.loop.memory_budget import find_budget
from search.loop.options import SearchOptions
from search.loop.strategies.strategy import Choice
from search.probe.device import MemoryInUse
from search.tuning import tune as tune_file
from search.tuning.tune import tune
from tests.search.tables import make_record
from tests.truth.compare import estimate_of

MODEL = SwinConfig(
    name="small", image_size=(64, 64), embed_dim=48, depths=(2, 2), num_heads=(2, 4),
    window_size=(4, 4),
)  # fmt: skip
SETTING = TrainSetting(batch_size=256)
RTX_3090 = find_gpu("rtx-3090")
DEVICE = DeviceInfo(
    kind="cuda", name="NVIDIA GeForce RTX 3090", total_bytes=RTX_3090.memory_bytes,
    capability=(8, 6),
)  # fmt: skip
EXPANDABLE = "expandable_segments:True"


def told(text: str) -> AllocatorConfig:
    return parse_allocator_config(text)


def test_a_memory_fraction_is_a_limit_of_the_verdict() -> None:
    free = estimate(MODEL, SETTING, gpu=RTX_3090)
    assert free.fits
    share = free.peak_reserved_bytes / RTX_3090.memory_bytes
    enough = told(f"per_process_memory_fraction:{share * 1.01}")
    too_little = told(f"per_process_memory_fraction:{share * 0.5}")
    assert estimate(MODEL, SETTING, gpu=RTX_3090, allocator=enough).fits
    refused = estimate(MODEL, SETTING, gpu=RTX_3090, allocator=too_little)
    assert refused.fits is False
    # It binds what the allocator reserves; the context is not the allocator's.
    context = overheads_for(RTX_3090).context_bytes
    assert refused.budget_bytes == int(share * 0.5 * RTX_3090.memory_bytes) + context
    assert any("per_process_memory_fraction" in text for text in refused.assumed)


def test_options_that_can_do_nothing_say_so() -> None:
    fraction = estimate(MODEL, SETTING, allocator=told("per_process_memory_fraction:0.1"))
    assert fraction.fits is None
    assert any("no device was named" in text for text in fraction.assumed)
    threshold = told("garbage_collection_threshold:0.1")
    collected = estimate(MODEL, SETTING, gpu=RTX_3090, allocator=threshold)
    assert (
        collected.peak_reserved_bytes == estimate(MODEL, SETTING, gpu=RTX_3090).peak_reserved_bytes
    )
    assert any("changes nothing" in text for text in collected.assumed)


def test_garbage_is_collected_under_a_memory_fraction() -> None:
    plain = estimate(MODEL, SETTING, gpu=RTX_3090)
    share = plain.peak_reserved_bytes / RTX_3090.memory_bytes
    both = told(f"per_process_memory_fraction:{share * 1.2},garbage_collection_threshold:0.5")
    collected = estimate(MODEL, SETTING, gpu=RTX_3090, allocator=both)
    assert plain.peak_allocated_bytes <= collected.peak_reserved_bytes < plain.peak_reserved_bytes


def test_the_environments_options_are_an_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = estimate(MODEL, SETTING, gpu=RTX_3090)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    found = estimate(MODEL, SETTING, gpu=RTX_3090)
    assert found.peak_reserved_bytes < plain.peak_reserved_bytes
    assert any(f"PYTORCH_ALLOC_CONF={EXPANDABLE}" in text for text in found.assumed)
    # What is given stands in the place of the environment's.
    assert estimate(MODEL, SETTING, gpu=RTX_3090, allocator=AllocatorConfig()).peak_reserved_bytes \
        == plain.peak_reserved_bytes  # fmt: skip


def test_the_room_to_search_in_is_the_fractions() -> None:
    in_use = MemoryInUse(24 * GIB, 0, 24 * GIB)
    options = SearchOptions(headroom=0.0)
    held = find_budget(DEVICE, in_use, options, told("per_process_memory_fraction:0.5"))
    context = overheads_for(RTX_3090).context_bytes
    assert held.budget_bytes == DEVICE.total_bytes // 2 + context
    assert any("per_process_memory_fraction" in note for note in held.notes)
    assert find_budget(DEVICE, in_use, options).budget_bytes == 24 * GIB


@pytest.mark.parametrize(
    ("options", "batch_size"), [(None, 256), ("expandable_segments:True", 384)]
)
@as_of("2.14")  # which keeps two workspaces
def test_the_environments_options_decide_the_first_probe(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, options: str | None, batch_size: int
) -> None:
    """With 1.5 GiB for all, a batch of 384 does not fit where segments are fixed."""
    versions = {"torch": "test"} | ({"allocator_config": options} if options else {})
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options or "")  # else probes have their own
    monkeypatch.setattr(tune_file, "choose_device", lambda wanted: "cuda:0")
    monkeypatch.setattr(tune_file, "describe_device", lambda wanted: DEVICE)
    monkeypatch.setattr(tune_file, "versions", lambda: versions)
    monkeypatch.setattr(tune_file, "least_free", lambda wanted: None)
    asked: list[int] = []

    def probe(choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        asked.append(choice.candidate.setting.batch_size)
        return make_record(choice.candidate.setting, device=DEVICE, model=MODEL)

    restrict = {
        "precision": ("bf16",), "checkpointing": ("none",), "compile": ("off",),
        "attention": ("sdpa",), "optimizer": ("adamw",),
    }  # fmt: skip
    found = tune(
        MODEL, memory_bytes=3 * GIB // 2, headroom=0.0, restrict=restrict, trials=1,
        output=str(tmp_path), prober=probe, baseline=False,
    )  # fmt: skip
    assert asked == [batch_size]
    assert any("allocator's options" in note for note in found.notes) == bool(options)


def test_a_record_is_compared_with_the_options_it_ran_with() -> None:
    def record(versions: dict[str, str]) -> MeasurementRecord:
        return MeasurementRecord(
            model=MODEL, setting=SETTING, device=DEVICE, versions=versions,
            date="2026-11-21T00:00:00+00:00", status="measured",
        )  # fmt: skip

    plain = estimate_of(record({"torch": "2.11.0"}))
    expandable = estimate_of(record({"torch": "2.11.0", "allocator_config": EXPANDABLE}))
    assert expandable.peak_reserved_bytes < plain.peak_reserved_bytes
