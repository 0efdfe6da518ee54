"""ARCHITECTURE.md is true: its files exist, the code imports in the one direction it shows, and no
package has more code lines than it may.

Its table of packages is read from top to bottom; a package may import from the rows below its own.
A package is a folder or a file directly under `planner/` or `search/`. Its number only goes down:
as a package shrinks, to 1% above what it has.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/accuracy.md", "tests/techniques.md")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TESTS_AT_MOST = 17_870
FACES = ("planner", "search", "planner/__main__")  # which import on first use
ROW = re.compile(r"^\| (`[^|]+`) \|.*\| ([\d,]+) \|$", re.MULTILINE)
PATH = re.compile(r"`((?:planner|search|tests|docs|examples)/[\w./-]*)(?::\w+)?`")


def rows() -> list[tuple[str, int]]:
    """The package of each row of the table, as a path without suffix (`planner/step`), and how many
    code lines it may have."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("## The packages")[2].partition("\n## ")[0]
    return [
        (name.strip("`").removesuffix("/").removesuffix(".py"), int(lines.replace(",", "")))
        for name, lines in ROW.findall(table)
    ]


@cache
def parsed(path: Path) -> tuple[str, ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def code_lines(path: Path) -> int:
    """Lines of a file that are neither blank, a comment, nor a part of a docstring."""
    text, tree = parsed(path)
    code = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if (stripped := line.strip()) and not stripped.startswith("#")
    }
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and isinstance(node.end_lineno, int):
            code.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code - documented)


def package_of(module: str) -> str:
    """The package that a dotted module lies in: "planner/step" for `planner.step.nn`."""
    return "/".join(module.split(".")[:2])


def imports_of(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(parsed(path)[1]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = whole.with_suffix(".py").is_file() or whole.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def sources() -> list[Path]:
    return [path for top in ("planner", "search") for path in (ROOT / top).rglob("*.py")]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_package_is_in_the_table_once() -> None:
    listed = [package for package, _ in rows()]
    assert len(listed) <= 20
    assert len(listed) == len(set(listed))
    assert {*listed, *FACES} == {package_of(module_of(path)) for path in sources()}


def test_imports_run_downwards() -> None:
    floor = {package: number for number, (package, _) in enumerate(rows())}
    upwards = set()
    for path in sources():
        here = package_of(module_of(path))
        for module in imports_of(path):
            there = package_of(module)
            if here not in floor or there not in floor or here == there:
                continue
            if floor[there] <= floor[here]:
                upwards.add(f"{path.relative_to(ROOT)} imports {there}")
    assert not upwards, "\n".join(sorted(upwards))


def test_no_package_has_more_code_lines_than_it_may() -> None:
    limits = {**dict(rows()), "tests": TESTS_AT_MOST}
    counts: Counter[str] = Counter()
    for path in sources():
        counts[package_of(module_of(path))] += code_lines(path)
    counts["tests"] = sum(code_lines(path) for path in (ROOT / "tests").rglob("*.py"))
    over = {name: counts[name] for name, limit in limits.items() if counts[name] > limit}
    assert not over, f"{over} of {limits}: first take lines out there (CONTRIBUTING.md)"


def test_no_file_of_the_current_folder_replaces_a_module_of_ours() -> None:
    """Python puts the current folder first where a process is started by -m or -c without -P."""
    unsafe = re.compile(r"sys\.executable,\s*\"-[mc]\"")
    found = [path.relative_to(ROOT) for path in sources() if unsafe.search(parsed(path)[0])]
    assert found == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_is_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text(encoding="utf-8"))
    assert named
    given = [name for name in named if "NAME" not in name]  # a recipe's file is yours to make
    missing = [name for name in given if not (ROOT / name).exists()]
    assert not missing, f"{page} names what is not there: {', '.join(missing)}"
