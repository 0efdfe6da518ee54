"""The catalogue's laws, and names as people, drivers and other tools write them.

A rate is checked from first principles: FP32 is SMs x lanes x 2 x boost clock, and a tensor rate is
a whole multiple of it that the architecture fixes. A sparse figure taken for a dense one, or a
GeForce rate with fp16 accumulation, is off by a factor of two and fails.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.errors import UsageError
from planner.core.schema.setting import Collective
from planner.core.units import GIB, MIB
from planner.machine.hardware import DetectedGpu, all_gpus, find_gpu, recognise_gpu
from planner.machine.hardware.fabric import (
    ASSUMED_NETWORK,
    Fabric,
    Link,
    all_links,
    bus_factor,
    find_fabric,
    find_link,
    read_catalogue,
    usual_link,
)
from planner.machine.hardware.gpu import Gpu, visible_gpus
from planner.machine.hardware.overheads import overheads_for

# FP32 lanes of one SM (or FP32 matrix lanes of one AMD compute unit), per architecture.
LANES = {"Volta": 64, "Turing": 64, "CDNA2": 128, "CDNA3": 128}
P100, GA100 = (6, 0), (8, 0)  # of 64 lanes too
CAPABILITIES = {
    "Pascal": (P100, (6, 1)), "Volta": ((7, 0),), "Turing": ((7, 5),), "Ampere": (GA100, (8, 6)),
    "Ada": ((8, 9),), "Hopper": ((9, 0),), "Blackwell": ((10, 0), (12, 0)),
}  # fmt: skip
# Dense FP16 rate with fp32 accumulation over the FP32 rate, from the architecture whitepapers.
# GeForce cards of Turing on have half the rate of the professional cards of the same chip; L40, L20
# and A10G are specified at GeForce's ratio; a Hopper's tensor clock is lower than its FP32 clock,
# and an H20's matrix units are cut to a quarter. Pascal has none: fp16 runs on the FP32 lanes.
RATIO = {"Pascal": 1, "Volta": 8, "Turing": 8, "Ampere": 4, "Ada": 4, "Hopper": 14.8, "CDNA2": 4,
         "CDNA3": 8}  # fmt: skip
GEFORCE_RATIO = {"Pascal": 1, "Turing": 4, "Ampere": 2, "Ada": 2, "Blackwell": 2}


def ratio(gpu: Gpu) -> float:
    if "GeForce" in gpu.title or gpu.name in ("l40", "l20", "a10g"):
        return GEFORCE_RATIO[gpu.architecture]
    if gpu.name == "h20-96gb":
        return 3.75
    if gpu.capability == GA100:
        return 16
    if gpu.architecture == "Blackwell":
        return 30 if gpu.capability == (10, 0) else 4
    return 13.9 if "nvl" in gpu.name else RATIO[gpu.architecture]


def for_each_gpu(law: Callable[[Gpu], None]) -> Callable[[], None]:
    """The law, held for every card in one test, which names the card that breaks it."""

    def test() -> None:
        for gpu in all_gpus():
            try:
                law(gpu)
            except AssertionError as error:
                error.add_note(gpu.name)
                raise

    test.__doc__ = law.__doc__
    return test


@for_each_gpu
def test_each_figure_has_its_source(gpu: Gpu) -> None:
    figures = (
        "memory_bytes", "bandwidth", "fp32_flops", "tf32_flops", "fp16_flops", "memory_type",
        "link_bandwidth",
    )  # fmt: skip
    for figure in figures:
        assert len(gpu.sources[figure]) > 20, figure
    taken = re.match(r"no report found: taken to be that of ([^:]*)", gpu.sources["memory_bytes"])
    assert taken is None or taken[1] in {other.name for other in all_gpus()} - {gpu.name}


def test_a_source_has_only_the_notes_of_its_figure() -> None:
    said = find_gpu("rtx-4090").sources
    assert "tensor rate" in said["bf16_flops"]
    assert not any("tensor" in said[name] for name in ("bandwidth", "memory_type", "fp32_flops"))


@for_each_gpu
def test_a_link_has_the_rate_of_its_lanes(gpu: Gpu) -> None:
    """GT/s of one lane, of whose bits 128 in 130 are data from generation 3 on."""
    found = re.match(r"PCIe (\d)\.0 x(\d+): ", gpu.sources["link_bandwidth"])
    if found is None:
        assert gpu.sources["link_bandwidth"].startswith("NVLink-C2C: ")
        return
    generation, lanes = map(int, found.groups())
    rate = {3: 8e9, 4: 16e9, 5: 32e9}[generation] * lanes * 128 / 130 / 8
    # The catalogue rounds to 0.05 GB/s or less.
    assert gpu.link_bandwidth == pytest.approx(rate, rel=5e-4)


@for_each_gpu
def test_memory_is_stacked_or_graphics_memory(gpu: Gpu) -> None:
    """The chips made for data centers have HBM; cards that render, and their like, GDDR."""
    assert re.fullmatch("HBM(2e?|3e?)|GDDR(5X?|6X?|7)", gpu.memory_type)
    stacked = gpu.capability in (P100, (7, 0), GA100, (9, 0), (10, 0)) or gpu.vendor == "AMD"
    assert gpu.memory_type.startswith("HBM") == stacked


# Gbit/s of one pin, as memory of each type is clocked on cards.
PIN_RATES = {
    "GDDR5": (7.23, 8.01), "GDDR5X": (10.01, 11.01, 11.41), "GDDR6X": (19, 19.5, 21, 22.4, 23),
    "GDDR6": (12, 12.5, 14, 14.5, 15, 15.5, 16, 17, 18, 20), "GDDR7": (25, 28, 30),
}  # fmt: skip


@for_each_gpu
def test_bandwidth_is_that_of_whole_chips_of_32_pins(gpu: Gpu) -> None:
    """And each chip, or two that share the pins, holds 0.5 to 6 GB; not of stacked memory."""
    if gpu.memory_type.startswith("HBM"):
        return
    chips = [float(re.findall(r"(\d+) GB", gpu.title)[-1]) / size for size in (0.5, 1, 2, 4, 6)]
    known = [4 * n * rate for n in chips if n.is_integer() for rate in PIN_RATES[gpu.memory_type]]
    off = min(abs(gpu.bandwidth / 1e9 / found - 1) for found in known)
    assert off < 0.004, f"bandwidth_gb_s, or a rate of a pin that PIN_RATES lacks: {known} GB/s"


@for_each_gpu
def test_fp32_rate_is_lanes_times_clock(gpu: Gpu) -> None:
    if gpu.boost_mhz is None:
        return  # no clock is published
    lanes = 64 if gpu.capability in (P100, GA100) else LANES.get(gpu.architecture, 128)
    derived = gpu.num_sms * lanes * 2 * gpu.boost_mhz * 1e6
    assert gpu.fp32_flops == pytest.approx(derived, rel=0.015)


@for_each_gpu
def test_tensor_rates_are_dense_and_accumulate_in_fp32(gpu: Gpu) -> None:
    assert gpu.fp16_flops is not None
    assert gpu.fp16_flops / gpu.fp32_flops == pytest.approx(ratio(gpu), rel=0.015)
    if gpu.bf16_flops is not None:
        assert gpu.bf16_flops == gpu.fp16_flops
    if gpu.tf32_flops is not None:
        assert gpu.fp16_flops / gpu.tf32_flops == pytest.approx(2, rel=0.03)


@for_each_gpu
def test_capability_says_which_architecture_and_formats_there_are(gpu: Gpu) -> None:
    """bf16 and tf32 matrix units came with Ampere (8.0)."""
    assert gpu.capability in CAPABILITIES.get(gpu.architecture, [None])
    if gpu.capability is not None:
        is_new = gpu.capability >= (8, 0)
        assert (gpu.has_bf16, gpu.tf32_flops is not None) == (is_new, is_new)


@for_each_gpu
def test_memory_and_bandwidth_are_in_their_units(gpu: Gpu) -> None:
    assert 2.9 * GIB < gpu.memory_bytes < 260 * GIB
    assert 1e11 < gpu.bandwidth < 1e13
    # A device reads its own memory in 5 ms (HBM) to 75 ms (a T4 or an A16).
    assert 0.005 < gpu.memory_bytes / gpu.bandwidth < 0.08


@for_each_gpu
def test_names_round_trip(gpu: Gpu) -> None:
    spaced, joined = gpu.name.replace("-", " "), gpu.name.replace("-", "_")
    for spelling in (gpu.name, gpu.name.upper(), spaced, joined, f"NVIDIA {gpu.name}"):
        assert find_gpu(spelling) == gpu
    for device_name in gpu.device_names:
        assert recognise_gpu(device_name, gpu.memory_bytes) == gpu


def test_find_gpu_forgives() -> None:
    for text, name in {
        "RTX 3090": "rtx-3090", "rtx3090": "rtx-3090", "NVIDIA GeForce RTX 3090": "rtx-3090",
        "GeForceRTX3090Ti": "rtx-3090-ti", "NVIDIA H200": "h200-sxm-141gb",
        "NVIDIA H100 80GB HBM3": "h100-sxm-80gb", "NVIDIA H100 PCIe": "h100-pcie-80gb",
        "NVIDIA A100 80GB PCIe": "a100-pcie-80gb", "a100 sxm 40": "a100-sxm-40gb",
        "A6000": "rtx-a6000", "6000 Ada": "rtx-6000-ada", "Tesla T4": "t4", "mi250x": "mi250x-gcd",
        "3090": "rtx-3090",  # a bare number is the card of that number
        "1080": "gtx-1080", "gtx1080ti": "gtx-1080-ti", "4070 super": "rtx-4070-super",
        "h20": "h20-96gb", "titanv": "titan-v", "TITAN X (Pascal)": "titan-x-pascal",
    }.items():  # fmt: skip
        assert find_gpu(text).name == name
    with pytest.raises(UsageError, match=r"names 2 GPUs.*'rtx-3080-10gb'.*'rtx-3080-ti'"):
        find_gpu("3080")  # none is called that alone


def test_an_unknown_name_gets_the_nearest_and_the_way_out() -> None:
    """The same number comes before the same letters."""
    for text, name in {
        "h10": "h100-sxm-80gb", "rtx 1080": "gtx-1080", "4070 supr": "rtx-4070-super",
        "p1000": "p100-pcie-12gb", "rtx 3900": "rtx-3090", "k100": "p100-pcie-12gb",
        "radeon 7900": None,
    }.items():  # fmt: skip
        with pytest.raises(UsageError) as caught:
            find_gpu(text)
        first, second = str(caught.value).split("\n")
        meant = f" Did you mean {name!r}" if name else ""
        assert first.startswith(f"unknown GPU {text!r}.{meant}")
        assert first.endswith("?") == (name is not None)
        assert second == "List GPUs with 'planner gpus'."


def test_memory_tells_cards_of_one_name_apart() -> None:
    name = "NVIDIA GeForce RTX 4060 Ti"
    small, large = recognise_gpu(name, 8188 * MIB), recognise_gpu(name, 16380 * MIB)
    sizes = ["rtx-4060-ti-8gb", "rtx-4060-ti-16gb"]
    assert [gpu and gpu.name for gpu in (small, large)] == sizes
    assert recognise_gpu(name) is None
    assert recognise_gpu("NVIDIA GeForce RTX 4090", 48 * GIB) is None, "a modified card"
    assert recognise_gpu("NVIDIA GeForce GTX 980") is None


def test_visible_devices_are_cudas() -> None:
    h200 = DetectedGpu(0, "NVIDIA H200", "GPU-1f0c", 140 * GIB, 0, "570.124.06", (9, 0))
    gpus = [h200, replace(h200, index=1, uuid="GPU-2a4b")]

    assert [gpu.index for gpu in visible_gpus(gpus, {})] == [0, 1]
    # CUDA stops at the first entry that it does not know.
    for value, indices in {"1": [1], "1,0": [1, 0], "GPU-2a": [1], "": [], "0,7,1": [0]}.items():
        seen = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": value})
        assert [gpu.index for gpu in seen] == indices


def test_the_workspace_follows_the_capability_and_the_environment() -> None:
    """Quoted: getChosenWorkspaceSize (aten/src/ATen/cuda/CublasHandlePool.cpp); 4,096 KiB times 8
    is 32 MiB, and the default is 4,096 KiB twice and 16 KiB eight times."""
    h100, t4, amd = find_gpu("h100-sxm"), find_gpu("t4"), find_gpu("mi300x")
    thor = replace(h100, capability=(11, 0))
    large, small = 32 * 1024**2, 8_519_680
    for gpu, size in [(h100, large), (find_gpu("b200"), large), (find_gpu("rtx-5090"), large),
                      (thor, small), (t4, small), (amd, small), (None, small)]:  # fmt: skip
        assert overheads_for(gpu, {}).workspace_bytes == size
    for text, size in [(":4096:8", large), (":4096:2:16:8", small), (":16:8", 131_072),
                       ("nonsense", small)]:  # fmt: skip
        assert overheads_for(t4, {"CUBLAS_WORKSPACE_CONFIG": text}).workspace_bytes == size
    assert overheads_for(amd, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}).workspace_bytes == small
    said = overheads_for(t4, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}).basis
    assert any("CUBLAS_WORKSPACE_CONFIG=:4096:8" in line for line in said)
    said = overheads_for(t4, {"CUBLASLT_WORKSPACE_SIZE": "32768"}).basis
    assert any("CUBLASLT_WORKSPACE_SIZE adds nothing" in line for line in said)


# Held-out points of an all-reduce between numbers of ranks that the link's own curves have: sizes
# between theirs. Between other numbers of ranks the same bound holds from 4 MiB on.
SIZE_ERROR = 0.11
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
LINKS = st.sampled_from(all_links())
SIZES = st.integers(1, 1 << 34)


def test_points_that_are_used_are_met() -> None:
    for link in all_links():
        for curve in link.curves:
            for size, seconds in curve.points:
                assert link.seconds(curve.collective, size, curve.ranks) == pytest.approx(seconds)


def held_out() -> Iterator[tuple[Link, int, int, float]]:
    """(link, ranks, bytes, seconds) of published all-reduces that no prediction uses."""
    for entry in read_catalogue()["links"]:
        for curve in entry.get("held_out", ()):
            for size, microseconds in curve["points"]:
                yield find_link(entry["name"]), curve["ranks"], size, microseconds * 1e-6


def test_held_out_points_are_met() -> None:
    checked = 0
    for link, ranks, size, took in held_out():
        own = not link.curves or ranks in {curve.ranks for curve in link.curves}
        if own or size >= 4 * MIB:
            error = link.seconds("all_reduce", size, ranks) / took - 1
            assert abs(error) <= SIZE_ERROR, (link.name, ranks, size, error)
            checked += 1
    assert checked > 40


def test_more_gpus_than_a_link_joins_are_refused_with_the_machines_they_need() -> None:
    with pytest.raises(UsageError, match="nvlink-h100 joins at most 8 GPUs in a machine") as error:
        find_fabric(find_gpu("h100-sxm"), 1, None, 64)
    assert "--nodes 8" in error.value.way_out
    assert find_fabric(find_gpu("h100-sxm"), 8, None, 8).between is not None


@given(LINKS, st.sampled_from(COLLECTIVES), st.integers(2, 64), SIZES, SIZES)
def test_more_bytes_take_no_less_time(
    link: Link, collective: Collective, ranks: int, one: int, other: int
) -> None:
    small, large = sorted((one, other))
    took = link.seconds(collective, small, ranks)
    assert 0 < took <= link.seconds(collective, large, ranks) * (1 + 1e-9)


@given(LINKS, st.integers(2, 64), SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    link: Link, ranks: int, size: int
) -> None:
    """Where none has figures of its own. The start of a ring is counted once more in two calls."""
    if {f.collective for f in (*link.curves, *link.rates)} != {"all_reduce"}:
        return
    whole = link.seconds("all_reduce", size, ranks)
    parts = sum(link.seconds(c, size, ranks) for c in COLLECTIVES[1:3])
    assert whole <= parts * (1 + 1e-9) <= whole + 8.5e-6


def test_switches_that_sum_speed_up_only_all_reduce_of_a_whole_machine() -> None:
    rate = find_link("nvlink-h100").bus_rate
    found = rate("all_reduce", 8), rate("all_reduce", 4), rate("all_gather", 8)
    assert found == pytest.approx((478e9, 370e9, 350e9))


@for_each_gpu
def test_cards_are_joined_as_their_slots_allow(gpu: Gpu) -> None:
    """By PCIe of the generation that they have. NVIDIA's driver grants GeForce cards no P2P from
    Turing on (pull request 22 of tinygrad/open-gpu-kernel-modules)."""
    if gpu.joined_by is None or (hop := usual_link(gpu).hop) == "nvlink":
        return
    is_geforce = "GeForce" in gpu.title or gpu.name == "titan-rtx"
    generation = gpu.sources["link_bandwidth"].removeprefix("PCIe ")[0]
    by = "no-p2p" if is_geforce and gpu.architecture != "Pascal" else f"pcie{generation}"
    assert (hop, gpu.joined_by[: len(by)]) == ("pcie", by)


def test_a_gpu_without_a_usual_link_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match=r"Grace Hopper .* has no usual one") as error:
        find_fabric(find_gpu("gh200"), 1)
    assert "nvlink-h100" in error.value.way_out


def test_what_nobody_named_is_assumed_and_said() -> None:
    a100 = find_gpu("a100-sxm-80gb")
    fabric = find_fabric(a100, 2)
    assert fabric.name == f"nvlink-a100,{ASSUMED_NETWORK}"
    assert [line.split()[0] for line in fabric.assumed] == ["nvlink-a100", ASSUMED_NETWORK]
    named = find_fabric(a100, 2, "8xib-hdr, nvlink-a100")
    assert (named.name, named.assumed) == ("nvlink-a100,8xib-hdr", ())
    with pytest.raises(UsageError, match="8xib-hdr joins machines, and there is one"):
        find_fabric(a100, 1, "8xib-hdr")
    with pytest.raises(UsageError, match="counts a link within a machine"):
        find_fabric(a100, 1, "2xpcie4")


def test_between_machines_the_slower_of_network_and_link_counts() -> None:
    """Sixteen A100 in two machines: 1 GiB crosses at the cards' rate until NVLink is slower."""
    within, size = find_link("nvlink-a100"), 1 << 30

    def rate(network: str, cards: int, sharing: int = 1) -> float:
        fabric = Fabric(within, find_link(network), cards)
        seconds = fabric.seconds("all_reduce", size, 16, 2, sharing)
        return bus_factor("all_reduce", 16) * size / seconds

    assert rate("ib-hdr", 1) == pytest.approx(24e9, rel=0.01)
    assert rate("ib-hdr", 4) == pytest.approx(96e9, rel=0.02)
    assert rate("ib-ndr", 8) == pytest.approx(within.bus_rate("all_reduce", 8), rel=0.03)
    assert rate("ib-hdr", 4, sharing=4) == pytest.approx(24e9, rel=0.01)


def test_a_measured_bus_bandwidth_is_a_link() -> None:
    link = find_link("25 GB/s")
    assert link.bus_rate("all_reduce", 4) == 25e9
    size = 512 * MIB
    assert link.seconds("all_reduce", size, 4) == pytest.approx(1.5 * size / 25e9, rel=0.02)
    with pytest.raises(UsageError, match="joins nothing"):
        find_link("0 GB/s")
