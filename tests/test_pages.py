"""Links between pages lead to files that are there, and to headings that they have; each command
that a page shows on a line of its own can be typed; README and docs stay short."""

import re
import shlex
from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from planner.cli import cli
from planner.core.schema.model import SwinConfig
from planner.core.schema.setting import Distribution, TrainSetting
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


def test_the_commands_of_the_pages_can_be_typed() -> None:
    texts = [page.read_text("utf-8").replace("\\\n", "") for page in PAGES]
    found = [line for text in texts for line in COMMAND.findall(text) if "$" not in line]
    assert len(set(found)) > 60
    for line in {*found, *COMMANDS.values()}:
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


# What guides advise, in techniques.md: every technique has one row, its status is counted, and its
# files exist.

TEXT = (ROOT / "tests/techniques.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| \d", line)
]


def test_the_statuses_are_counted() -> None:
    count = Counter(row[2] for row in ROWS)
    assert set(count) <= {"works", "partly", "absent"}
    said = f"{count['works']} work, {count['partly']} partly, {count['absent']} are absent."
    assert said in " ".join(TEXT.split())
    assert f"name {len(ROWS)} techniques" in TEXT
    assert [row[0] for row in ROWS] == [str(n) for n in range(1, len(ROWS) + 1)]


COMMANDS = {
    row[0]: command.group(1)
    for row in ROWS
    if row[2] == "works" and (command := re.match(r"`(planner [^`]+)`", row[3]))
}


def test_what_works_has_a_command() -> None:
    untyped = [row for row in ROWS if row[2] == "works" and row[0] not in COMMANDS]
    assert [row[0] for row in untyped if not row[3].startswith("`python examples/")] == []


ANSWERED = [line for line in dict.fromkeys(COMMANDS.values()) if re.match(
    r"planner (estimate|advise|doctor)( |$)", line
)]  # fmt: skip
"""Those that measure nothing and need no earlier result."""


@pytest.mark.truth
@pytest.mark.parametrize("line", ANSWERED)
def test_a_command_that_shows_what_works_runs(line: str) -> None:
    if "zero" in line:
        pytest.importorskip("deepspeed")
    ended = CliRunner().invoke(cli, shlex.split(line)[1:])
    assert ended.exit_code == 0, ended.output
