"""The file of a page: where it may be written, told before anything is estimated, and written."""

from __future__ import annotations

import os
from pathlib import Path

from planner.core.errors import PlannerError, as_text, shorten
from planner.core.files import check_output, unwritable, write_output
from planner.report.page.contents import Page
from planner.report.page.rendering import is_page, page_html

_ENDINGS = (".html", ".htm")
_SNIFFED = 2000  # bytes of a file, in which a page says that it is one


def check_page(output: str | os.PathLike[str], force: bool = False) -> Path:
    """The file that a page may be written to.

    Raises as `check_output`, and PlannerError where a file is there that is no page of ours and
    `force` does not say to replace it.
    """
    path = check_output(output, "a page", _ENDINGS)
    try:
        if path.exists() or path.is_symlink():
            _check_replaced(path, shorten(as_text(str(path))), force)
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def write_page(page: Page, output: str | os.PathLike[str], force: bool = False) -> Path:
    """Writes the page, whole or not at all. Raises what `check_page` raises."""
    return write_output(check_page(output, force), page_html(page).encode())


def _check_replaced(path: Path, shown: str, force: bool) -> None:
    if path.exists() and not path.is_file():
        raise PlannerError(f"{shown} is no file that can be replaced.", "Name another file.")
    if not force and _is_anothers(path):
        raise PlannerError(
            f"{shown} exists, and 'planner report' did not write it.",
            "Name another file, or remove this one ('planner report --force' replaces it).",
        )


def _is_anothers(path: Path) -> bool:
    """Whether somebody would miss it: a link, or anything that is neither empty nor a page."""
    if path.is_symlink():
        return True
    with path.open("rb") as file:
        start = file.read(_SNIFFED)
    return bool(start) and not is_page(start.decode(errors="replace"))
