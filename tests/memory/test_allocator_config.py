"""PYTORCH_ALLOC_CONF, read as torch reads it."""

from collections.abc import Callable

import pytest

from planner import SwinConfig, TrainSetting, estimate, find_gpu
from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import DeviceInfo
from planner.memory.allocator_config import (
    AllocatorConfig,
    environment_allocator,
    options_text,
    parse_allocator_config,
)

MIB = 1024**2


def test_an_allocator_config_is_read_as_torch_reads_it() -> None:
    text = "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.6"
    assert parse_allocator_config(text) == AllocatorConfig(
        expandable_segments=True, max_split_bytes=128 * MIB
    )
    assert parse_allocator_config("") == AllocatorConfig()
    assert parse_allocator_config("backend:native,pinned_use_background_threads:True,") == (
        AllocatorConfig()
    )
    # From torch 2.15 on, for streams that are given a class.
    text = "expandable_segments_reserve_by_class:[a:0.5,b:8G]"
    assert parse_allocator_config(text) == AllocatorConfig()


def test_the_environment_is_read_in_torchs_order() -> None:
    """CUDAAllocatorConfig::instance asks for the older name first and stops there."""
    assert environment_allocator({}) is None
    said = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environment_allocator(said) == AllocatorConfig(expandable_segments=True)
    said["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    assert environment_allocator(said) == AllocatorConfig()


def test_a_fault_in_the_environment_names_the_variable() -> None:
    with pytest.raises(UsageError, match="PYTORCH_ALLOC_CONF=colour:blue"):
        environment_allocator({"PYTORCH_ALLOC_CONF": "colour:blue"})
    with pytest.raises(UnsupportedError, match="PYTORCH_ALLOC_CONF=backend:cudaMallocAsync"):
        environment_allocator({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expandable_segment:True", "expandable_segments"),
        ("expandable_segments:true", "'true'"),
        ("max_split_size_mb:19", "20 or more"),
        ("max_split_size_mb", "key:value"),
        pytest.param("max_split_size_mb:" + "9" * 5000, "under 2.44", id="long"),
        ("roundup_power2_divisions:[64:8,>:1]", "which is not modelled"),
        ("large_segment_size_mb:32", "which is not modelled"),
        ("per_process_memory_fraction:0.5", "--memory SIZE names a part of a device"),
        ("backend:cudaMallocSync", "cudaMallocAsync"),
        ("backend:cudaMallocAsync", "to the driver"),
        ("expandable_segments_reserve:0.5", "may end a segment early"),
    ],
)
def test_a_fault_in_an_allocator_config_is_named(text: str, words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        parse_allocator_config(text)


def test_all_faults_of_a_config_come_in_one_message() -> None:
    with pytest.raises(UsageError) as caught:
        parse_allocator_config("max_split_size_mb:1,expandable_segments:yes,colour:blue")
    assert all(word in str(caught.value) for word in ("max_split", "'yes'", "'colour'"))


def accepts(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except (ValueError, RuntimeError, UsageError):
        return False
    return True


def test_what_is_accepted_is_what_torch_accepts() -> None:
    """The parser of these keys is in torch's CPU library too."""
    torch = pytest.importorskip("torch")
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        pytest.skip("this torch does not expose its parser")
    for text in (
        "expandable_segments:True", "expandable_segments:true", "max_split_size_mb:20",
        "max_split_size_mb:19",
    ):  # fmt: skip
        accepted = accepts(setter, text)
        setter("")
        assert accepts(parse_allocator_config, text) == accepted, text


def test_options_are_written_as_they_are_read() -> None:
    for text in (
        "expandable_segments:True", "expandable_segments:True,max_split_size_mb:128",
    ):  # fmt: skip
        config = parse_allocator_config(text)
        assert parse_allocator_config(options_text(config)) == config
    assert options_text(AllocatorConfig()) == ""


# What the caching allocator is told, wherever that is said, in the estimate, the tuner and the
# comparison with records.

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
told = parse_allocator_config


def test_the_environments_options_are_an_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = estimate(MODEL, SETTING, gpu=RTX_3090)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    found = estimate(MODEL, SETTING, gpu=RTX_3090)
    assert found.peak_reserved_bytes < plain.peak_reserved_bytes
    assert any(f"PYTORCH_ALLOC_CONF={EXPANDABLE}" in text for text in found.assumed)
    # What is given stands in the place of the environment's.
    assert estimate(MODEL, SETTING, gpu=RTX_3090, allocator=AllocatorConfig()).peak_reserved_bytes \
        == plain.peak_reserved_bytes  # fmt: skip
