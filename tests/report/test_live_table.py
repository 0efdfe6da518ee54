"""Laws of the live table: whatever a search stands at, it fits and says it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from search.loop.progress import Progress
from search.loop.study.records import format_record
from search.report.live_table import live_table
from search.report.status import NUM_ENDED, Ended, Status, after, doing_text
from search.tuning.tune import tune
from tests.search.tables import invented_table

TEXT = st.text(max_size=80)
ENDED = st.builds(Ended, st.integers(0, 10**6), TEXT, TEXT, TEXT, st.booleans())
SECONDS = st.none() | st.floats(0, 1e6)
STANDINGS = st.builds(
    Status, heading=TEXT, noun=TEXT, way_out=TEXT, title=TEXT, phase=TEXT, doing=TEXT,
    number=st.integers(0, 10**6), begun_at=SECONDS, deadline_seconds=SECONDS,
    best=st.none() | ENDED, num_done=st.integers(0, 10**6), num_all=st.none() | st.integers(1, 99),
    ends_at=SECONDS, ended=st.lists(ENDED, max_size=NUM_ENDED).map(tuple),
)  # fmt: skip


def shown(status: Status, width: int = 100, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(live_table(status, 100.0, width, height))
    return captured.get()


def at_work() -> Status:
    return Status(
        heading="planner tune native:swin_tiny",
        way_out="Ctrl-C ends with the best so far",
        title="batch 8, fp32", phase="search", number=3, begun_at=60.0, deadline_seconds=150.0,
        doing=doing_text("measure", 12, 0.101), num_done=2, num_all=9, ends_at=190.0,
        best=Ended(1, "batch 4, fp32, adamw", "120 images/s", "2.00 GiB"),
        ended=(
            Ended(1, "batch 4, fp32, adamw", "120 images/s", "2.00 GiB"),
            Ended(2, "batch 64, fp32, adamw", "out of memory", is_good=False),
        ),
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(STANDINGS, st.integers(24, 220), st.integers(8, 60))
def test_it_is_never_wider_nor_taller_than_the_terminal(
    status: Status, width: int, height: int
) -> None:
    lines = shown(status, width, height).splitlines()
    assert 0 < len(lines) <= height
    for line in lines:
        assert line.isprintable()  # nothing of others steers the terminal
        assert cell_len(line) <= width


def test_all_that_matters_is_there() -> None:
    text = shown(at_work())
    for part in (
        "planner tune native:swin_tiny", "probe 3 of 9 [search]: batch 8, fp32",
        "timing steps: 12 so far, 101 ms each · 40 s of 2 min 30 s at most",
        "120 images/s, 2.00 GiB: batch 4", "2 of 9 probes · 1 min 30 s left",
        "2 out of memory", "1 120 images/s", "Ctrl-C ends with the best so far",
    ):  # fmt: skip
        assert part in text
    for height in (7, 24):
        narrow = shown(at_work(), 44, height)
        assert "batch 8" in narrow
        assert ("batch 64" in narrow) == (height == 24)


def test_names_of_others_are_text() -> None:
    hostile = replace(at_work(), heading="[red]a[/red]", title="[bold]b :smile: \x1b[2J\r\n\x9bm")
    text = shown(hostile)
    assert "[red]a[/red]" in text
    assert r"[bold]b :smile: \x1b[2J \x9bm" in text


def test_a_search_stands_where_its_events_say(tmp_path: Path) -> None:
    """Every event of a whole search, at a second each."""
    seen: list[tuple[Progress, Status]] = []

    def hear(progress: Progress) -> None:
        before = seen[-1][1] if seen else Status()
        seen.append((progress, after(before, progress, float(len(seen)))))

    table = tmp_path / "table.jsonl"
    table.write_bytes(b"".join(format_record(r) for r in invented_table()))
    found = tune(None, replay=table, trials=12, on_progress=hear)
    starts = [s for p, s in seen if p.kind == "start"]
    ends = [s for p, s in seen if p.kind == "end"]
    assert [s.num_done for s in ends] == list(range(1, found.num_probes + 1))
    assert [s.number for s in starts] == [s.num_done for s in ends]
    assert all(s.title and s.begun_at is not None and s.deadline_seconds for s in starts)
    assert all(not s.title and s.begun_at is None and s.num_all == 12 for s in ends)
    assert found.evidence is not None
    assert ends[-1].best is not None
    fastest = max(float(s.best.found.split()[0]) for s in ends if s.best)
    assert ends[-1].best.found == f"{fastest:.4g} images/s"
    assert len(ends[-1].ended) == NUM_ENDED
