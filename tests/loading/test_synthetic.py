"""The folder of made JPEGs: ImageNet's sizes, the same for the same seed, nobody else's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from planner.core.errors import UsageError
from planner.training.loading.synthetic import make_synthetic
from tests.loading.made import listing


def test_pictures_are_whole_and_about_as_large_as_imagenets(tmp_path: Path) -> None:
    source = make_synthetic(tmp_path / "made", 80)
    assert (source.num_items, source.num_classes, source.synthetic) == (80, 10, True)
    files = list((tmp_path / "made").rglob("*.jpg"))
    for file in files[:10]:
        Image.open(file).load()
    assert np.mean([file.stat().st_size for file in files]) == pytest.approx(115_000, rel=0.2)


def test_a_whole_folder_is_left_as_it_is_and_another_order_replaces_it(tmp_path: Path) -> None:
    root = tmp_path / "made"
    make_synthetic(root, 2)
    before = listing(root)
    make_synthetic(root, 2)
    assert listing(root) == before
    (root / "class-00" / "mine.txt").write_text("kept")
    assert make_synthetic(root, 1).num_items == 1
    assert (root / "class-00" / "mine.txt").is_file()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    before = listing(tmp_path)
    with pytest.raises(UsageError, match="not made by planner"):
        make_synthetic(tmp_path, 4)
    assert listing(tmp_path) == before


FULL = """
import resource, sys
from pathlib import Path
from planner.core.errors import PlannerError
from planner.training.loading.synthetic import make_synthetic
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    make_synthetic(Path(sys.argv[1]), 3)
except PlannerError as error:
    print(error.message)
"""


def test_no_room_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of a file stands for a disk that is full: both fail in the write."""
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "made")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (line,) = ended.stdout.splitlines()
    assert "cannot be written: File too large" in line
