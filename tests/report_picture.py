"""Draws docs/pictures/report.png anew: the top of the page of an estimate, in Chromium.

    python -m tests.report_picture

The same page is one of README's commands.
"""

import shlex
import tempfile
from pathlib import Path

from planner.cli import main
from tests.page.browser import looking_at, settle

PICTURE = Path(__file__).parents[1] / "docs/pictures/report.png"
COMMAND = "planner report timm:swin_base_patch4_window7_224 --batch-size 128 --gpu 'RTX 4090'"
WIDTH_PX = 1180
LAST = "#g1-memory"  # the section that the picture ends with


def draw() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        assert main([*shlex.split(COMMAND)[1:], "--output", str(path)]) == 0
        with looking_at(path) as page:
            page.set_viewport_size({"width": WIDTH_PX, "height": 2000})
            settle(page)
            box = page.locator(LAST).bounding_box()
            clip = {"x": 0, "y": 0, "width": WIDTH_PX, "height": box["y"] + box["height"] + 16}
            page.screenshot(path=PICTURE, clip=clip)


if __name__ == "__main__":
    draw()
