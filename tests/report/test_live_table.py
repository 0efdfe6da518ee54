"""Laws of the live table: whatever a search stands at, it fits and says it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from planner.report.live_table import live_lines
from planner.report.standing import NUM_ENDED, Ended, Standing, after, doing_text
from search.progress import Progress, step_progress
from search.study.records import format_record
from search.tuning import tune
from tests.live_picture import PICTURE, Recorded, draw
from tests.search.tables import invented_table

STYLE = re.compile(r"\x1b\[[0-9;]*m")
TEXT = st.text(max_size=80)
ENDED = st.builds(Ended, st.integers(0, 10**6), TEXT, TEXT, TEXT, st.booleans())
SECONDS = st.none() | st.floats(0, 1e6)
STANDINGS = st.builds(
    Standing, heading=TEXT, noun=TEXT, way_out=TEXT, title=TEXT, phase=TEXT, doing=TEXT,
    number=st.integers(0, 10**6), begun_at=SECONDS, deadline_seconds=SECONDS,
    best=st.none() | ENDED, num_done=st.integers(0, 10**6), num_all=st.none() | st.integers(1, 99),
    ends_at=SECONDS, ended=st.lists(ENDED, max_size=NUM_ENDED).map(tuple),
)  # fmt: skip


def shown(standing: Standing, width: int = 100, height: int = 24, encoding: str = "utf-8") -> str:
    return STYLE.sub("", "\n".join(live_lines(standing, 100.0, width, height, encoding)))


def at_work() -> Standing:
    return Standing(
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
@given(STANDINGS, st.integers(1, 220), st.integers(1, 60), st.sampled_from(["utf-8", "ascii"]))
def test_it_is_never_wider_nor_taller_than_the_terminal(
    standing: Standing, width: int, height: int, encoding: str
) -> None:
    lines = live_lines(standing, 5.0, width, height, encoding)
    assert 0 < len(lines) <= height
    for line in lines:
        bare = STYLE.sub("", line)
        assert bare.isprintable()  # nothing of others steers the terminal
        assert cell_len(bare) <= max(width, 2)
        line.encode(encoding)


def test_all_that_matters_is_there() -> None:
    text = shown(at_work())
    for part in (
        "planner tune native:swin_tiny", "probe 3 of 9 [search]: batch 8, fp32",
        "timing steps: 12 so far, 101 ms each · 40 s of 2 min 30 s at most",
        "120 images/s, 2.00 GiB: batch 4", "2 of 9 probes · 1 min 30 s left",
        "✗ out of memory", "✓ 120 images/s", "Ctrl-C ends with the best so far",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("width", [39, 59])
def test_a_narrow_one_keeps_the_setting_and_what_was_found(width: int) -> None:
    text = shown(at_work(), width, 7)
    assert "batch 8" in text
    assert "120 images/s" in text
    assert "Ctrl-C ends" in text
    assert "out of memory batch 64" in shown(at_work(), width)


def test_a_low_one_keeps_what_runs() -> None:
    for height in range(1, 7):
        assert "batch 8, fp32" in shown(at_work(), 100, height)


def test_what_the_last_probes_have_in_common_is_left_out() -> None:
    rows = [line for line in shown(at_work()).splitlines() if "✓" in line or "✗" in line]
    assert ["adamw" in row for row in rows] == [False, False]
    one = replace(at_work(), ended=at_work().ended[:1])
    assert "✓ 120 images/s 2.00 GiB batch 4, fp32, adamw" in shown(one)


def test_names_of_others_are_text() -> None:
    hostile = replace(at_work(), heading="[red]a[/red]", title="[bold]b :smile: \x1b[2J\r\n\x9bm")
    text = shown(hostile)
    assert "[red]a[/red]" in text
    assert r"[bold]b :smile: \x1b[2J \x9bm" in text


def test_without_utf8_nothing_but_ascii_is_there() -> None:
    text = shown(replace(at_work(), title="µ × ✓ 窓"), encoding="ascii")
    assert text.isascii()
    assert r"\xb5 x \u2713 \u7a93" in text


@pytest.mark.parametrize(("name", "value", "coloured"), [("NO_COLOR", "1", False), ("A", "", True)])
def test_colours(monkeypatch: pytest.MonkeyPatch, name: str, value: str, coloured: bool) -> None:
    for other in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(name, value)
    text = "\n".join(live_lines(at_work(), 0.0, 100, 24))
    assert ("\x1b[32m" in text) == coloured


def test_a_search_stands_where_its_events_say(tmp_path: Path) -> None:
    """Every event of a whole search, at a second each."""
    seen: list[tuple[Progress, Standing]] = []

    def hear(progress: Progress) -> None:
        before = seen[-1][1] if seen else Standing()
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


def test_events_of_a_worker_and_notes() -> None:
    standing = after(Standing(), Progress("note", "12 settings; no prior.\nmore"), 0.0)
    assert standing.doing == "12 settings; no prior."
    standing = after(standing, step_progress("compile", 0, None), 1.0)
    assert standing.doing == "compiling"
    standing = after(standing, step_progress("measure", 3, 0.5), 1.0)
    assert standing.doing == "timing steps: 3 so far, 500 ms each"
    assert after(standing, step_progress("of a later worker", 0, None), 1.0).doing == (
        "of a later worker"
    )


def test_the_picture_names_no_host_and_no_font_of_anybody() -> None:
    show = Recorded("planner tune [red]a")
    show.lines, show.taken = ["[search] probe 1 of 9: batch 4"], (at_work(), 100.0)
    for picture in (draw(show), PICTURE.read_text(encoding="utf-8")):
        assert "http" not in picture.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "@font-face" not in picture
        assert "url(" not in picture.replace("url(#live-", "")
        words = re.sub(r"<[^>]*>", " ", picture).replace("&#160;", " ")
        assert "timing steps: " in words
        assert "Ctrl-C ends with the best so far" in words
