"""Links between devices: published times met, and what lies between and beyond them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.errors import UsageError
from planner.core.schema.setting import Collective
from planner.core.units import MIB
from planner.machine.hardware import find_gpu
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
    link = find_link("nvlink-h100")
    assert link.bus_rate("all_reduce", 8) == pytest.approx(478e9)
    assert link.bus_rate("all_reduce", 4) == pytest.approx(370e9)
    assert link.bus_rate("all_gather", 8) == pytest.approx(350e9)


@pytest.mark.parametrize(
    ("gpu", "link"),
    [
        ("a100-sxm-80gb", "nvlink-a100"), ("a100-pcie-80gb", "pcie4"), ("v100-pcie-16gb", "pcie3"),
        ("rtx-4090", "no-p2p"), ("rtx-5090", "no-p2p-pcie5"), ("rtx-5000-ada", "pcie4"),
        ("h200-sxm-141gb", "nvlink-h100"), ("h100-pcie-80gb", "pcie5"), ("mi300x", "xgmi-mi300x"),
    ],
)  # fmt: skip
def test_a_gpu_has_the_link_that_most_machines_have(gpu: str, link: str) -> None:
    assert usual_link(find_gpu(gpu)).name == link


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
