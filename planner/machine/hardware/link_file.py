"""A measured link from a file: our own JSON, or what nccl-tests printed.

Of nccl-tests (NVIDIA/nccl-tests @cfa8a967, src/util.cu; older tables after NVIDIA/nccl-tests#44 and
NVIDIA/nccl#428) the text of all_reduce_perf, all_gather_perf, reduce_scatter_perf and
broadcast_perf is read, several runs in one file as well; RCCL's tests print the same. A table's
size is that of the whole array. Times are those in place, as training calls these collectives; of
a reduce-scatter those out of place, as FSDP2 calls it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, get_args

from planner.core.collectives import Collective
from planner.core.errors import UsageError, shorten
from planner.core.files import parse_json, read_text, write_whole
from planner.core.schema.link import LINK_FORMAT, LinkCurve, LinkPoint, bus_factor
from planner.core.schema.validation import parse
from planner.core.units import MIB

MAX_LINK_BYTES = 16 * MIB
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
_WAY_OUT = (
    "Pass what all_reduce_perf, all_gather_perf and reduce_scatter_perf of nccl-tests printed, or "
    "what 'planner doctor --links --output FILE' wrote."
)
_AGAIN = "Run it again, and pass the whole of what it prints."

_PROGRAM = re.compile(r"(?<![a-z_])([a-z_]+)_perf")
_START = re.compile(r"\bnThread \d+ nGpus \d+")
_RANK = re.compile(
    r"\bRank +(\d+) +(?:Group +(\d+) +)?(?:Pid +\d+ +)?on +(\S+) +device +\d+ +\[[^\]]*\] +(.+)"
)
_FAILURE = re.compile(r"\bTest \w+ failure\b.*|\bOut of bounds values : [1-9]\d* FAILED")
_VARIABLE = re.compile(r"\b(NCCL_\w+)=(\S+)|\b(NCCL_\w+) set by environment to (\S+)")
_VERSION = re.compile(r"\bR?NCCL version :? ?(\d+\.\d+\.\d+)|\br?nccl-library=(\d+)")
_ROUTE = re.compile(r"NCCL INFO Channel .* via ([A-Z]\S+)")
# What launchers put before each line of a rank: "[0] ", "0: ".
_PREFIX = re.compile(r"^\s*(\[\d+\]|\d+:)\s")
# What changes no collective: what NCCL says of itself, and the tests' own switches.
_QUIET = ("NCCL_DEBUG", "NCCL_TESTS", "NCCL_HOSTID")


class _Rank(NamedTuple):
    number: int
    group: int
    host: str
    device: str


@dataclass
class _Run:
    """One run of one program: `line` is where it begins, `columns` the titles of its table."""

    line: int
    program: str = ""
    ranks: list[_Rank] = field(default_factory=list)
    columns: Sequence[str] = ()
    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True)
class _World:
    """Between whom a run was measured."""

    world_size: int
    nodes: int
    device: str

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.world_size} ranks of {self.device}{nodes}"


def read_link(path: str | Path) -> LinkCurve:
    """The curve in a file of ours or of nccl-tests. Raises UsageError."""
    text = read_text(Path(path), MAX_LINK_BYTES)
    if text.lstrip().startswith(("{", "[")):
        return _own(text, str(path))
    return parse_nccl_tests(text, str(path))


def write_link(path: str | Path, curve: LinkCurve) -> None:
    """Raises OSError."""
    write_whole(Path(path), curve.model_dump_json(indent=1) + "\n")


def parse_nccl_tests(text: str, source: str) -> LinkCurve:
    """The curve in what nccl-tests printed; `source` names it in errors. Raises UsageError where a
    run failed or computed wrong sums, and where runs are of different links."""
    every = [run for run in _runs(text) if run.columns or run.ranks or run.failure]
    if not every:
        raise UsageError(f"{source} holds no output of nccl-tests.", _WAY_OUT)
    for run in every:
        _refuse_failure(run, source)
    worlds = {run.line: _world(run, source) for run in every}
    runs = [(run, _collective(run, worlds[run.line], source)) for run in every]
    kept = [(run, collective) for run, collective in runs if collective is not None]
    if not kept:
        other = sorted({run.program for run in every})
        raise UsageError(f"{source} holds only {', '.join(other)}_perf.", _WAY_OUT)
    first = kept[0][0]
    for run, _ in kept:
        if worlds[run.line] != worlds[first.line]:
            raise UsageError(
                f"a link file is of one link, and {source} holds {worlds[first.line]} (line "
                f"{first.line}) and {worlds[run.line]} (line {run.line}).",
                "Put the runs of each into a file of its own.",
            )
    world = worlds[first.line]
    return LinkCurve(
        device=world.device,
        backend="nccl",
        world_size=world.world_size,
        nodes=world.nodes,
        points=tuple(_points(kept, source)),
        versions=_versions(text),
        variables=_variables(text, source),
        topology=", ".join(f"via {route}" for route in dict.fromkeys(_ROUTE.findall(text))),
        source=f"nccl-tests, {Path(source).name}",
    )


def _own(text: str, source: str) -> LinkCurve:
    data = parse_json(text, source)
    if isinstance(data, dict) and "results" in data and "link_format" not in data:
        raise UsageError(
            f"{source} is the JSON of nccl-tests, which is not read.", "Pass what the run printed."
        )
    if isinstance(data, dict) and data.get("link_format", LINK_FORMAT) != LINK_FORMAT:
        raise UsageError(
            f"{source} holds a link in format {shorten(data['link_format'])}, and this planner "
            f"reads format {LINK_FORMAT}.",
            "Measure it again with this version of planner.",
        )
    curve = parse(LinkCurve, data, source)
    if not curve.points:
        raise UsageError(f"{source} holds a link without a point.", _WAY_OUT)
    return curve


def _runs(text: str) -> Iterator[_Run]:
    """The runs of a file in order. Each begins with its line of options; where every process of a
    launch prints that line, all of them are one run."""
    program = ""
    run = _Run(1)
    for number, whole in enumerate(text.splitlines(), 1):
        line = _PREFIX.sub("", whole)
        if (named := _PROGRAM.search(line)) and "concluded" not in line:
            program = named.group(1)
        if _START.search(line):
            if run.columns:
                yield run
                run = _Run(number)
            run.line = run.line if run.ranks else number
            run.program, program = program or run.program, ""
        if rank := _RANK.search(line):
            run.ranks.append(_Rank(int(rank[1]), int(rank[2] or 0), rank[3], rank[4].strip()))
        elif failed := _FAILURE.search(line):
            run.failure = run.failure or failed.group().strip()
        else:
            _take_cells(run, number, line.replace("#wrong", "wrong").strip(" #").split())
    run.program = run.program or program
    yield run


def _take_cells(run: _Run, number: int, cells: list[str]) -> None:
    """A table's titles or one of its rows; any other line is passed over."""
    if cells[:3] == ["size", "count", "type"]:
        run.columns = run.columns or cells
    elif run.columns and len(cells) > 2 and cells[0].isdigit() and cells[1].isdigit():
        run.rows.append((number, cells))


def _refuse_failure(run: _Run, source: str) -> None:
    if run.failure:
        raise UsageError(
            f"a run that failed is no measurement, and that of {source}, line {run.line}, did: "
            f"{shorten(run.failure)}.",
            _AGAIN,
        )
    if not run.columns:
        raise UsageError(f"{source} holds a run (line {run.line}) without a table.", _AGAIN)
    if "time" not in run.columns:
        raise UsageError(
            f"{source} holds the processor's time of its collectives (line {run.line}), and a link "
            "is the device's.",
            "Run it again without -C.",
        )


def _world(run: _Run, source: str) -> _World:
    """Ranks and hosts; of a world that was split, those of one group."""
    numbers = [rank.number for rank in run.ranks]
    if not numbers:
        raise UsageError(
            f"no line of {source} names the ranks of its run (line {run.line}).",
            "Pass the whole output, with the lines '# Rank 0 …' above the table.",
        )
    if len(set(numbers)) < len(numbers):
        raise UsageError(
            f"{source} holds a run (line {run.line}) in which several processes are rank "
            f"{statistics.mode(numbers)}: each measured by itself, and not the link.",
            "Build nccl-tests with MPI=1, and run it again.",
        )
    group = [rank for rank in run.ranks if rank.group == run.ranks[0].group]
    if len(group) < 2:
        raise UsageError(
            f"a link is between two devices or more, and the run of {source}, line {run.line}, is "
            "of one.",
            "Run it on several: all_reduce_perf -g 2.",
        )
    devices = ", ".join(dict.fromkeys(rank.device for rank in group))
    return _World(len(group), len({rank.host for rank in group}), devices)


def _collective(run: _Run, world: _World, source: str) -> Collective | None:
    """What a run timed; None of a collective that no training here calls."""
    if run.program:
        return next((known for known in COLLECTIVES if known == run.program), None)
    found = _told_by_rows(run, world)
    if found is None:
        raise UsageError(
            f"nothing in {source} says which collective the run of line {run.line} is.",
            "Put the line of its command above it, as './build/all_reduce_perf -g 2'.",
        )
    return found


def _told_by_rows(run: _Run, world: _World) -> Collective | None:
    """Which collective an old run was that does not name itself: by its titles and operation, and
    where these leave two, by how its table's bus bandwidth follows from the other."""
    index = {title: place for place, title in reversed(list(enumerate(run.columns)))}
    _, cells = max(run.rows, key=lambda row: int(row[1][0]), default=(0, []))
    if len(cells) < len(run.columns):
        return None
    reduces = "redop" in index and cells[index["redop"]] != "none"
    rooted = "root" in index and cells[index["root"]] != "-1"
    if rooted:
        return None if reduces else "broadcast"
    if not reduces:
        return "all_gather"
    algbw, busbw = (_number(cells[index[title]]) for title in ("algbw", "busbw"))
    if not algbw or not busbw or algbw < 1:  # two digits after the point say too little
        return None
    kinds: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")
    factors = {kind: bus_factor(kind, world.world_size) for kind in kinds}
    return min(kinds, key=lambda kind: abs(factors[kind] - busbw / algbw))


def _points(runs: Sequence[tuple[_Run, Collective]], source: str) -> Iterator[LinkPoint]:
    """One for each collective and size: the median, where several runs timed it."""
    found: dict[tuple[Collective, int], list[float]] = {}
    for run, collective in runs:
        for number, cells in run.rows:
            if int(cells[0]) > 0:  # a size too small for so many ranks is printed as 0
                seconds = _seconds(run, collective, cells, f"{source}, line {number}")
                found.setdefault((collective, int(cells[0])), []).append(seconds)
    if not found:
        raise UsageError(f"{source} holds a table without a row.", _AGAIN)
    for (collective, num_bytes), times in sorted(found.items()):
        seconds = statistics.median(times)
        yield LinkPoint(collective=collective, num_bytes=num_bytes, seconds=seconds)


def _seconds(run: _Run, collective: Collective, cells: list[str], where: str) -> float:
    if len(cells) < len(run.columns):
        raise UsageError(
            f"a row has {len(run.columns)} cells, and that of {where}, has {len(cells)}.", _AGAIN
        )
    places = [place for place, title in enumerate(run.columns) if title == "time"]
    wrong = [cells[place] for place, title in enumerate(run.columns) if title == "wrong"]
    if any(count.isdigit() and int(count) for count in wrong):
        raise UsageError(f"{where}: the collective computed wrong values.", _AGAIN)
    first, second = _number(cells[places[0]]), _number(cells[places[-1]])
    micros = (first or second) if collective == "reduce_scatter" else (second or first)
    if not micros:
        raise UsageError(f"{where}: a time is above 0, not {shorten(cells[places[0]])}.", _AGAIN)
    return micros * 1e-6


def _number(cell: str) -> float | None:
    """A finite number from 0 on; None for anything else."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _versions(text: str) -> dict[str, str]:
    found = _VERSION.search(text)
    if found is None:
        return {}
    if found[1]:
        return {"nccl": found[1]}
    major, rest = divmod(int(found[2]), 10_000)  # NCCL_VERSION_CODE since 2.9
    return {"nccl": f"{major}.{rest // 100}.{rest % 100}"}


def _variables(text: str, source: str) -> dict[str, str]:
    """NCCL's variables on the lines that call a program, and those that NCCL says it heeds."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if "_perf" not in line and "set by environment" not in line:
            continue
        for name, value, told, told_value in _VARIABLE.findall(line):
            name, value = name or told, (value or told_value).rstrip(".")
            if name.startswith(_QUIET):
                continue
            if found.setdefault(name, value) != value:
                raise UsageError(
                    f"a link file is of one setting of NCCL, and {source} holds runs with "
                    f"{name}={shorten(found[name])} and {name}={shorten(value)}.",
                    "Put the runs of each into a file of its own.",
                )
    return found
