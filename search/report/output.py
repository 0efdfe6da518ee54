"""The file of a page: where it may be written, told before anything is estimated, and written."""

from __future__ import annotations

import os
from pathlib import Path

from planner.errors import PlannerError, UsageError, as_text, shorten
from planner.files import write_whole
from planner.page.contents import Page
from planner.page.rendering import is_page, page_html

_ENDINGS = (".html", ".htm")
_SNIFFED = 2000  # bytes of a file, in which a page says that it is one
_EXAMPLE = "For example --output report.html."


def check_output(output: str | os.PathLike[str], force: bool = False) -> Path:
    """The file that a page may be written to.

    Raises UsageError where the name is none of a page, PlannerError where it cannot be written, or
    where a file is there that is no page of ours and `force` does not say to replace it.
    """
    path = Path(output)
    shown = shorten(as_text(str(path)))
    try:
        if path.is_dir():
            raise UsageError(
                f"{shown} is a folder, and a page is one file.",
                f"Name a file in it, as {as_text(str(path / 'report.html'))}.",
            )
        if path.suffix.lower() not in _ENDINGS:
            raise UsageError(f"a page's file name ends in .html, and {shown} does not.", _EXAMPLE)
        if not path.parent.is_dir():
            raise PlannerError(
                f"{shown} cannot be written: the folder {shorten(str(path.parent))} does not "
                "exist.",
                "Make the folder, or choose another --output.",
            )
        if not os.access(path.parent, os.W_OK):
            raise PlannerError(
                f"{shown} cannot be written: its folder may not be written to.",
                "Choose another --output.",
            )
        if path.exists() or path.is_symlink():
            _check_replaced(path, shown, force)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL
        raise _unwritable(path, error) from None
    return path


def write_page(page: Page, output: str | os.PathLike[str], force: bool = False) -> Path:
    """Writes the page, whole or not at all. Raises what `check_output` raises."""
    path = check_output(output, force)
    try:
        write_whole(path.resolve(), page_html(page).encode())
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None
    return path


def _check_replaced(path: Path, shown: str, force: bool) -> None:
    if path.exists() and not path.is_file():
        raise PlannerError(f"{shown} is no file that can be replaced.", "Choose another --output.")
    if not force and _is_anothers(path):
        raise PlannerError(
            f"{shown} exists, and 'planner report' did not write it.",
            "Choose another --output, or replace it with --force.",
        )


def _is_anothers(path: Path) -> bool:
    """Whether somebody would miss it: a link, or anything that is neither empty nor a page."""
    if path.is_symlink():
        return True
    with path.open("rb") as file:
        start = file.read(_SNIFFED)
    return bool(start) and not is_page(start.decode(errors="replace"))


def _unwritable(path: Path, error: Exception) -> PlannerError:
    reason = getattr(error, "strerror", None) or str(error)
    return PlannerError(
        f"{shorten(as_text(str(path)))} cannot be written: {reason}.",
        "Free space or choose another --output.",
    )
