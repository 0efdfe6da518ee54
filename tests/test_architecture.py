"""ARCHITECTURE.md is true: its files exist, and the code imports in the one direction it shows.

Its table of rooms is read from top to bottom; a room may import from the rows below its own. A room
is a folder directly under `planner/` or `search/`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/how-it-works.md")
FACES = ("planner", "search", "planner/__main__")  # which import on first use
ROW = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)
PATH = re.compile(r"`((?:planner|search|tests|docs|examples)/[\w./-]*)`")


def rows() -> list[list[str]]:
    """The rooms of each row of the table, as paths without suffix: `planner/step`."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("## The rooms")[2].partition("\n## ")[0]
    return [
        [name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", row)]
        for row in ROW.findall(table)
    ]


def room_of(module: str) -> str:
    """The room that a dotted module lies in; a house's own `__init__` is the house."""
    return "/".join(module.split(".")[:2])


def imports_of(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = whole.with_suffix(".py").is_file() or whole.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def sources() -> list[Path]:
    return [path for house in ("planner", "search") for path in (ROOT / house).rglob("*.py")]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_room_is_in_the_table_once() -> None:
    listed = [room for row in rows() for room in row]
    assert len(listed) <= 20
    assert len(listed) == len(set(listed))
    assert {*listed, *FACES} == {room_of(module_of(path)) for path in sources()}


def test_imports_run_downwards() -> None:
    floor = {room: number for number, row in enumerate(rows()) for room in row}
    upwards = set()
    for path in sources():
        here = room_of(module_of(path))
        for module in imports_of(path):
            there = room_of(module)
            if here not in floor or there not in floor or here == there:
                continue
            if floor[there] <= floor[here]:
                upwards.add(f"{path.relative_to(ROOT)} imports {there}")
    assert not upwards, "\n".join(sorted(upwards))


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_is_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text(encoding="utf-8"))
    assert named
    given = [name for name in named if "NAME" not in name]  # a recipe's file is yours to make
    missing = [name for name in given if not (ROOT / name).exists()]
    assert not missing, f"{page} names what is not there: {', '.join(missing)}"


def anchors(page: Path) -> set[str]:
    """Where links may lead in it, as renderers of Markdown name headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/truth/*.md")]
    wrong = []
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page.name}: {link}")
    assert wrong == []
