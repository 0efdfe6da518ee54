"""Records of a search for TensorBoard, after it or while it runs."""

from __future__ import annotations

from contextlib import closing
from os import PathLike
from pathlib import Path

from planner.files import named_path
from search.board import Board
from search.report.frame import Records, gathered


def write_tensorboard(records: Records, folder: str | PathLike[str]) -> Path:
    """Writes event files of a search into `folder`: images/s, memory and the best so far by probe,
    and a run for each probe that TensorBoard's HPARAMS tab compares.

    `records` are those of `records_frame`. Returns the folder. Raises as it does, and
    PlannerError where tensorboard is missing or the folder cannot be written.
    """
    path = named_path(folder, "folder")
    found = list(gathered(records))
    with closing(Board(path, [record.setting for record in found])) as board:
        for record in found:
            board.add(record)
    return path
