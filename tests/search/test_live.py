"""Laws of the live panel: whatever a search stands at, it fits and says it."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from search.runs.live import Status, live_panel

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
    text = shown(Status(heading="[red]a[/red] :smile: \x1b[2J\r\n\x9bm"))
    assert r"[red]a[/red] :smile: \x1b[2J \x9bm" in text
