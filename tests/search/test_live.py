"""Laws of the live panel: whatever a search stands at, it fits and says it."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from search.loop.progress import Progress
from search.runs.live import Status, after, live_panel
from tests.search.replays import Replay, search_table
from tests.search.tables import BUDGET, invented_table, true_prior

TEXT = st.text(max_size=80)
SECONDS = st.none() | st.floats(0, 1e6)
STANDINGS = st.builds(
    Status, heading=TEXT, way_out=TEXT, title=TEXT, phase=TEXT, doing=TEXT,
    number=st.integers(0, 10**6), begun_at=SECONDS, deadline_seconds=SECONDS, best=TEXT,
    num_done=st.integers(0, 10**6), num_all=st.none() | st.integers(1, 99), ends_at=SECONDS,
)  # fmt: skip


def shown(status: Status, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(live_panel(status, 100.0, width))
    return captured.get()


@settings(max_examples=40, deadline=None)
@given(STANDINGS, st.integers(24, 220))
def test_it_is_never_wider_than_the_terminal_and_always_as_high(status: Status, width: int) -> None:
    """rich erases a frame by the height of the one that it drew before."""
    lines = shown(status, width).splitlines()
    assert len(lines) == 6
    for line in lines:
        assert line.isprintable()  # nothing of others steers the terminal
        assert cell_len(line) <= width


def test_names_of_others_are_text() -> None:
    hostile = Status(
        heading="[red]a[/red]", title="[bold]b :smile: \x1b[2J\r\n\x9bm", begun_at=60.0, number=3
    )
    text = shown(hostile)
    assert "[red]a[/red]" in text
    assert r"[bold]b :smile: \x1b[2J \x9bm" in text


def test_a_search_stands_where_its_events_say() -> None:
    """Every event of a whole search, at a second each."""
    seen: list[tuple[Progress, Status]] = []

    def hear(progress: Progress) -> None:
        before = seen[-1][1] if seen else Status()
        seen.append((progress, after(before, progress, float(len(seen)))))

    replay = Replay(invented_table())
    prior = true_prior(replay)
    search, _ = search_table(replay, prior, BUDGET, trials=12, on_progress=hear)
    starts = [s for p, s in seen if p.kind == "start"]
    ends = [s for p, s in seen if p.kind == "end"]
    assert [s.num_done for s in ends] == list(range(1, len(search.records) + 1))
    assert [s.number for s in starts] == [s.num_done for s in ends]
    assert all(s.title and s.begun_at is not None and s.deadline_seconds for s in starts)
    assert all(not s.title and s.begun_at is None and s.num_all == 12 for s in ends)
    rates = [float(s.best.split()[0]) for s in ends if s.best]
    assert rates == sorted(rates), "the best so far"
