"""Links between pages lead to files that are there, and to headings that they have; each command
that a page shows on a line of its own can be typed; README and docs stay short."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from planner.cli import cli
from planner.core.schema.distribution import Distribution
from planner.core.schema.model import SwinConfig
from planner.core.schema.setting import TrainSetting
from planner.core.schema.validation import declared_options

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "tests", "tests/truth", "examples")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
LINK = re.compile(r"(?:\]\(|src=\")(?!https?:|mailto:)([^)\s#\"]*)(?:#([^)\s]+))?[)\"]")


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(page.read_text("utf-8")):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{name} of {page.name}"
        if anchor:
            assert anchor in anchors(target), f"{name}#{anchor} of {page.name}"


COMMAND = re.compile(r"^(?:\$ |    )?(planner [^\n|]*)$", re.MULTILINE)


def shown_commands() -> list[str]:
    texts = [page.read_text("utf-8").replace("\\\n", "") for page in PAGES]
    found = [line for text in texts for line in COMMAND.findall(text) if "$" not in line]
    return list(dict.fromkeys(found))


def test_the_commands_of_the_pages_can_be_typed() -> None:
    assert len(shown_commands()) > 60
    for line in shown_commands():
        _, name, *arguments = shlex.split(line.partition(" > ")[0], comments=True)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        try:
            command.make_context(name, arguments)
        except click.UsageError as error:
            pytest.fail(f"{line}: {error.message}")


def test_each_field_without_an_option_is_in_the_table() -> None:
    setting = [f for f in TrainSetting.model_fields if f not in Distribution.model_fields]
    fields = [*setting, *Distribution.model_fields, *SwinConfig.model_fields]
    typed = {*declared_options(TrainSetting), *declared_options(SwinConfig)}
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    table = page.partition("| field | values |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    found = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert found == [field for field in fields if field not in typed]


READ = (ROOT / "README.md", *ROOT.glob("docs/*.md"))  # what users read


def test_readme_and_docs_are_short() -> None:
    words = {page.name: len(page.read_text("utf-8").split()) for page in READ}
    assert words["README.md"] <= 900
    assert sum(words.values()) <= 14_000, words


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_no_cell_of_a_table_is_long(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell) > 120] == []
