"""Laws of the live panel: whatever a search stands at, it fits and says it."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from planner.core.schema import TrainSetting
from search.loop.progress import Progress
from search.loop.space import candidate
from search.runs.live import Status, live_panel
from tests.search.tables import make_record

TEXT = st.text(max_size=80)
SECONDS = st.none() | st.floats(0, 1e6)
RECORD = st.none() | st.just(make_record(TrainSetting(batch_size=8)))
PROBES = st.builds(
    Progress, kind=st.sampled_from(("start", "end")), phase=TEXT, best=RECORD, record=RECORD,
    candidate=st.just(candidate(TrainSetting(batch_size=8))), probe=st.integers(1, 10**6),
    num_probes=st.none() | st.integers(1, 99), seconds_left=SECONDS, deadline_seconds=SECONDS,
)  # fmt: skip
STANDINGS = st.builds(
    Status, heading=TEXT, way_out=TEXT, last=st.none() | PROBES, at=st.floats(0, 1e6), doing=TEXT
)


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
