"""docs/reference.md and the pages for man(1): from the commands, and what the commands are now."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import click
import pytest

from planner.cli import main
from planner.cli.manual import ARGUMENTS, EXIT_STATUS, ManualPage, manual_pages, markdown, roff
from tests.cli.test_help import ALL, planner_context

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages() -> dict[str, ManualPage]:
    return {page.path: page for page in manual_pages(planner_context())}


def test_the_reference_is_that_of_the_commands(pages: dict[str, ManualPage]) -> None:
    kept = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert kept == markdown(list(pages.values())), "run 'planner manual --output docs'"


def test_every_command_has_a_page_with_all_that_help_shows(pages: dict[str, ManualPage]) -> None:
    assert set(pages) == {"planner", "planner bench", *ALL}
    for path, found in ALL.items():
        page, document = pages[path], markdown([pages[path]])
        parameters = found.command.get_params(found)
        written = [written for _, records in page.options for written, _ in records]
        assert len(written) == sum(isinstance(p, click.Option) for p in parameters)
        assert page.examples
        assert bool(page.arguments) == any(isinstance(p, click.Argument) for p in parameters)
        for text in (*page.paragraphs, *page.examples, *written, page.synopsis):
            assert text in document


def test_every_argument_that_is_explained_is_one(pages: dict[str, ManualPage]) -> None:
    assert {name for page in pages.values() for name, _ in page.arguments} == set(ARGUMENTS)


def test_headings_are_anchors_that_links_name(pages: dict[str, ManualPage]) -> None:
    document = markdown(list(pages.values()))
    anchors = {f"#{path.replace(' ', '-')}" for path in pages}
    links = {part.partition(")")[0] for part in document.split("](")[1:]}
    assert {link for link in links if link.startswith("#")} == anchors - {"#planner"}


def test_groff_warns_of_nothing(pages: dict[str, ManualPage]) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    text = "".join(map(roff, pages.values()))
    shown = subprocess.run(
        ["groff", "-ww", "-man", "-Tutf8", "-P-c"], input=text, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert shown.stderr == ""
    plain = " ".join(shown.stdout.split())
    for page in pages.values():
        assert " ".join(page.synopsis.split()[:2]) in plain
        assert all(example in shown.stdout for example in page.examples)
    for number, meaning in EXIT_STATUS[:1]:
        assert f"{number} {meaning}" in plain


def test_what_steers_roff_is_escaped() -> None:
    hostile = ".so /etc/passwd \\fB 'x' \"…\" -a"
    page = ManualPage("planner x", hostile, hostile, (hostile,), ((hostile, hostile),),
                      (("Options", ((hostile, hostile),)),), (), (hostile,))  # fmt: skip
    shown = roff(page)
    assert shown.isascii()
    macros = (".TH", ".SH", ".SS", ".PP", ".TP", ".nf", ".fi")
    for line in shown.splitlines():
        assert not line.startswith(("'", ".")) or line.startswith(macros), line
    assert "\\fB \\(aq" not in shown


def test_files_are_written_where_they_are_asked_for(
    tmp_path: Path, pages: dict[str, ManualPage], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manual", "--format", "man", "--output", str(tmp_path / "man1")]) == 0
    names = {path.name for path in (tmp_path / "man1").iterdir()}
    assert names == {f"{path.replace(' ', '-')}.1" for path in pages}
    assert main(["manual", "--output", str(tmp_path)]) == 0
    whole = (tmp_path / "reference.md").read_bytes()
    assert main(["manual", "bench", "attention", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "planner-bench-attention.md").is_file()
    assert (tmp_path / "reference.md").read_bytes() == whole
    assert main(["manual", "--output", ""]) == 2
    capsys.readouterr()
    assert main(["manual", "tune", "--format", "man"]) == 0
    assert capsys.readouterr().out == (tmp_path / "man1" / "planner-tune.1").read_text("utf-8")
    (tmp_path / "file").touch()
    assert main(["manual", "--output", str(tmp_path / "file" / "docs")]) == 1
