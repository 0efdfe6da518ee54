"""What nccl-tests printed, and our own JSON, as a curve; and what is no measurement, refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.errors import UsageError
from planner.core.schema.link import LinkCurve, bus_factor
from planner.machine.hardware.link_file import parse_nccl_tests, read_link

RECORDED = Path(__file__).parent / "links"
TITLES = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"


def run(
    program: str = "all_reduce_perf",
    rows: Sequence[str] = ("1048576 262144 float sum -1 30.0 34.9 34.9 0 20.0 52.4 52.4 0",),
    ranks: int = 2,
    start: str = "# Collective test starting: {}",
    titles: str = TITLES,
    device: str = "NVIDIA H200",
    groups: int = 1,
) -> str:
    """One run in the layout of NVIDIA/nccl-tests @cfa8a967, src/util.cu."""
    lines = [start.format(program)] if start else []
    lines += ["# nThread 1 nGpus 1 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 1", "#"]
    lines += [
        f"#  Rank {rank:2d} Group {rank % groups:2d} Pid {40 + rank} on box device {rank:2d} "
        f"[0000:0{rank}:00] {device}"
        for rank in range(ranks)
    ]
    lines += ["#", f"#   {titles}", "#    (B)   (elements)   (us) (GB/s)", *rows]
    return "\n".join([*lines, "# Out of bounds values : 0 OK", ""])


def points(curve: LinkCurve) -> list[tuple[str, int, float]]:
    return [(p.collective, p.num_bytes, round(p.seconds * 1e6, 2)) for p in curve.points]


def test_a_recorded_run_of_two_nodes() -> None:
    curve = read_link(RECORDED / "h100-2x8.txt")
    assert (curve.world_size, curve.nodes) == (16, 2)
    assert (curve.device, curve.backend) == ("NVIDIA H100 80GB HBM3", "nccl")
    assert points(curve)[0] == ("all_reduce", 1024, 123.1), "in place, as DDP calls it"
    assert points(curve)[-1] == ("all_reduce", 8_589_934_592, 47743.0)
    assert curve.source == "nccl-tests, h100-2x8.txt"


def test_times_are_those_of_the_bus_bandwidth_beside_them() -> None:
    """The table's own busbw, from our seconds: sizes are those of the whole array."""
    curve = read_link(RECORDED / "h100-2x8.txt")
    lines = (RECORDED / "h100-2x8.txt").read_text().splitlines()
    told = {int(c[0]): float(c[-2]) for line in lines if (c := line.split()) and c[0].isdigit()}
    for point in curve.points[3:]:
        factor = bus_factor(point.collective, curve.world_size)
        busbw = factor * point.num_bytes / point.seconds / 1e9
        assert busbw == pytest.approx(told[point.num_bytes], rel=2e-3)


def test_several_runs_of_a_file_are_one_curve() -> None:
    scattered = "1048576 131072 float sum -1 15.0 69.9 34.9 0 99.0 10.6 5.3 0"
    gathered = "1048576 131072 float none -1 16.0 65.5 32.7 0 14.0 74.9 37.4 0"
    sent = "1048576 262144 float none 0 12.0 87.4 87.4 0 11.0 95.3 95.3 0"
    text = "".join(
        (
            run(),
            run(rows=["1048576 262144 float sum -1 30.0 34.9 34.9 0 22.0 47.7 47.7 0"]),
            run(rows=["1048576 262144 float sum -1 30.0 34.9 34.9 0 99.0 10.6 10.6 0"]),
            run("reduce_scatter_perf_mpi", [scattered]),
            run("all_gather_perf", [gathered]),
            run("broadcast_perf", [sent]),
            run("alltoall_perf", ["1048576 131072 float none -1 5.0 1.0 1.0 0 5.0 1.0 1.0 N/A"]),
        )
    )
    assert points(parse_nccl_tests(text, "f")) == [
        ("all_gather", 1048576, 14.0),
        ("all_reduce", 1048576, 22.0),  # the median of three
        ("broadcast", 1048576, 11.0),
        ("reduce_scatter", 1048576, 15.0),  # out of place
    ]


def test_what_launchers_and_others_print_is_passed_over() -> None:
    mpi = "box:12:13 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to PHB\n"
    route = "box:12:13 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n"
    text = (
        "$ mpirun -x NCCL_IB_HCA=mlx5_0 -x NCCL_DEBUG=INFO ./all_reduce_perf -b 8\n"
        "NCCL version 2.30.3+cuda13.0\n"
        + mpi
        + route
        + "".join(f"[0] {line}\n" for line in run(start="").splitlines())
    )
    curve = parse_nccl_tests(text, "f")
    assert points(curve) == [("all_reduce", 1048576, 20.0)]
    assert curve.versions == {"nccl": "2.30.3"}
    assert curve.variables == {"NCCL_IB_HCA": "mlx5_0", "NCCL_P2P_LEVEL": "PHB"}
    assert curve.topology == "via SHM/direct/direct"


@pytest.mark.parametrize(
    ("row", "collective"),
    [
        ("1048576 262144 float sum -1 30.0 34.9 52.4 0 20.0 52.4 78.6 0", "all_reduce"),
        ("1048576 262144 float sum -1 30.0 34.9 26.2 0 20.0 52.4 39.3 0", "reduce_scatter"),
        ("1048576 262144 float none -1 30.0 34.9 26.2 0 20.0 52.4 39.3 0", "all_gather"),
        ("1048576 262144 float none 0 30.0 34.9 34.9 0 20.0 52.4 52.4 0", "broadcast"),
    ],
)
def test_a_run_that_does_not_name_itself_is_told_by_its_table(row: str, collective: str) -> None:
    curve = parse_nccl_tests(run(rows=[row], start="", ranks=4), "f")
    assert {p.collective for p in curve.points} == {collective}


WRONG = "1048576 262144 float sum -1 30.0 34.9 34.9 7 20.0 52.4 52.4 7"
SHORT = "1048576 262144 float sum -1 30.0 34.9"
VAGUE = "64 16 float sum -1 30.0 0.00 0.00 0 20.0 0.00 0.00 0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ordinary prose\nof 2 lines\n", "holds no output of nccl-tests"),
        (run(rows=[]), "a table without a row"),
        (run(rows=[WRONG]), "computed wrong values"),
        (run(rows=[SHORT]), "a row has 13 cells, and that of f, line 9, has 7"),
        (run(ranks=0), "names the ranks"),
        (run(ranks=1), "between two devices or more"),
        (run().replace("Rank  1", "Rank  0"), "several processes are rank 0"),
        (run(start="", rows=[VAGUE]), "which collective"),
        (run("alltoall_perf"), "holds only alltoall_perf"),
        (run() + run(ranks=4), "2 ranks of NVIDIA H200 (line 2) and 4 ranks of NVIDIA H200"),
        (run() + run(device="Tesla T4"), "of one link"),
        (run(titles=TITLES.replace("time", "cputime")), "processor's time"),
        (run() + "box: Test CUDA failure common.cu:502 'an illegal memory access'", "illegal"),
        (run().replace(": 0 OK", ": 4 FAILED"), "Out of bounds values : 4 FAILED"),
        ("NCCL_ALGO=Ring ./all_reduce_perf\n" + run()
         + "NCCL_ALGO=Tree ./all_reduce_perf\n" + run(), "NCCL_ALGO='Ring' and NCCL_ALGO='Tree'"),
    ],
)  # fmt: skip
def test_what_is_no_measurement_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as found:
        parse_nccl_tests(text, "f")
    assert words in found.value.message
    assert found.value.way_out


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "has 4 faults"),
        ([], "must be a mapping"),
        ({"link_format": 9}, "in format 9"),
        ({"version": 1, "config": {}, "results": []}, "the JSON of nccl-tests"),
        ({"device": "x", "backend": "nccl", "world_size": 2, "points": []}, "without a point"),
        (
            {"device": "x", "backend": "nccl", "world_size": 0, "points": [
                {"collective": "all_reduce", "num_bytes": 0, "seconds": -1.0}]},
            "world_size",
        ),
    ],
)  # fmt: skip
def test_a_bad_file_of_ours_is_refused(data: object, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=words):
        read_link(tmp_path / "a.json")


@given(st.text(alphabet="#0123456789 RankGroupPidondevice[]sizecounttypetime.-\n", max_size=300))
def test_no_text_does_worse_than_be_refused(text: str) -> None:
    try:
        curve = parse_nccl_tests(f"{run()}{text}\n", "f")
    except UsageError:
        return
    assert curve.points
