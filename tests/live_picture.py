"""Draws docs/pictures/live.svg anew: the live table of a real search, while its probe runs.

    python -m tests.live_picture

It probes a small Swin on this machine's CPU, for a minute or some, and stops in the middle of a
probe: what is drawn is what a terminal showed then. The file names no font and no host of anybody.
"""

from __future__ import annotations

import io
import re
import shlex
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from planner.cli import main, measure
from planner.cli.show import Show
from search.loop.progress import Progress
from search.runs.live import Status, live_panel

PICTURE = Path(__file__).parents[1] / "docs/pictures/live.svg"
COMMAND = (
    "planner tune native:swin_tiny --image-size 112 --set embed_dim=32 --set depths=2,2 "
    "--set num_heads=1,2 --set window_size=7 --batch-size 16,32,64 --precision fp32,bf16 "
    "--checkpointing none,blocks --compile off --optimizer adamw --device cpu --budget 10m"
)
COLUMNS, NUM_LINES = 108, 7
# The moment: from the third probe on, once two steps were timed.
PROBES_BEFORE, STEPS_BEFORE = 2, 2
FONTS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'


class Recorded(Show):
    """Keeps what a terminal would show, and ends the search at the moment of the picture."""

    def __init__(self, heading: str) -> None:
        super().__init__(heading)
        self.lines: list[str] = []
        self.taken: tuple[Status, float] | None = None

    def say(self, line: str) -> None:
        if self.taken is None:
            self.lines.append(line)

    def hear(self, progress: Progress) -> None:
        super().hear(progress)
        status = self.status
        steps = re.search(r"timing steps: (\d+) so far", status.doing)
        is_late = steps is not None and int(steps[1]) >= STEPS_BEFORE
        is_after = status.last is not None and status.last.probe > PROBES_BEFORE
        if is_after and is_late and self.taken is None:
            self.taken = status, time.monotonic()
            raise KeyboardInterrupt


def search() -> Recorded:
    """The search of COMMAND up to the moment."""
    shown: list[Recorded] = []

    def show_on(heading: str, quiet: bool) -> AbstractContextManager[Recorded]:
        shown.append(Recorded(heading))
        return nullcontext(shown[0])

    measure.show_on = show_on  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        main([*shlex.split(COMMAND)[1:], "--output", folder])
    return shown[0]


def draw(show: Recorded) -> str:
    """The command, the last lines and the table, as rich's picture of a terminal."""
    assert show.taken is not None, "the search ended before its moment: probe more settings"
    console = Console(
        file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True,
        color_system="truecolor", markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    console.print(Text(f"$ {COMMAND}", style="bold"))
    for line in show.lines[-NUM_LINES:]:
        console.print(Text(line))
    console.print(live_panel(*show.taken, COLUMNS))
    found = console.export_svg(
        title="planner tune", theme=MONOKAI, code_format=without_fonts(), unique_id="live"
    )
    return "\n".join(line.rstrip() for line in found.splitlines()) + "\n"


def without_fonts() -> str:
    """rich's frame, with the monospaced font of whoever looks in place of one from elsewhere."""
    bare = re.sub(r"@font-face \{\{.*?\}\}\n?", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    bare = re.sub(r"font-family: (Fira Code|arial)[^;]*;", f"font-family: {FONTS};", bare)
    return re.sub(r"<!-- Generated with Rich [^>]*-->", "", bare)


if __name__ == "__main__":
    picture = draw(search())
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture, encoding="utf-8")
    print(f"{PICTURE}: {len(picture)} bytes")
