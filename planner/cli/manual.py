"""`planner manual`: every command's page, from the commands themselves, as Markdown or for man(1).

A `ManualPage` is read from a click command; what writes it knows nothing of click.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from planner import __version__
from planner.cli import EXAMPLES, GROUPS
from planner.cli.arguments import refuse_empty
from planner.cli.command import Command, Record
from planner.cli.help import find_command
from planner.files import unwritable

REFERENCE = "reference.md"
EXIT_STATUS = (
    ("0", "done"),
    ("1", "it could not be done, or the answer is no (nothing fits, something must be fixed)"),
    ("2", "it was asked for wrongly"),
    ("130, 143, 129", "interrupted by Ctrl-C, SIGTERM or SIGHUP"),
    ("141", "the reader of standard output has left"),
)
# What stands where an option does not, by how the synopsis writes it.
ARGUMENTS = {
    "MODEL": "LIBRARY:NAME, a YAML or JSON file, or package.module:factory.",
    "RUN": "The --output of a 'planner tune', or its recommendation.json.",
    "RESULT": "The --output of a 'planner tune', or its recommendation.json.",
    "DIR": "A folder: of pictures, a folder for each class; of tar shards; or a table of datasets.",
    "MODULE:FACTORY": "A function of yours that returns a Dataset.",
    "SNAPSHOT": "What torch.cuda.memory._dump_snapshot wrote.",
    "LOG": "What a training printed, or the watch.jsonl of planner.watch.",
    "FILE": "A machine, as 'planner doctor --json' wrote it.",
    "NAME": "Words of a GPU's name.",
    "TEXT": "A part of a model's name.",
    "COMMAND": "The name of a command.",
    "bash|zsh|fish": "The shell.",
}
_WRITTEN_BY = "Written by `planner manual --output docs` from the commands themselves."


@dataclass(frozen=True)
class ManualPage:
    """A command as it is explained. `summary` is its first sentence, `paragraphs` all of its text;
    `options` and `commands` are lists by heading."""

    path: str
    synopsis: str
    summary: str
    paragraphs: tuple[str, ...]
    arguments: tuple[Record, ...]
    options: tuple[tuple[str, tuple[Record, ...]], ...]
    commands: tuple[tuple[str, tuple[Record, ...]], ...]
    examples: tuple[str, ...]


def manual_pages(ctx: click.Context) -> Iterator[ManualPage]:
    """The page of a command, then those of its subcommands."""
    command = ctx.command
    yield _page(ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            yield from manual_pages(find_command(ctx, (name,)))


def _page(ctx: click.Context) -> ManualPage:
    command = ctx.command
    paragraphs = tuple(
        " ".join(text.split()) for text in inspect.cleandoc(command.help or "").split("\n\n")
    )
    pieces = command.collect_usage_pieces(ctx)
    if isinstance(command, Command):
        options, examples = command.sections(ctx), command.examples
    else:
        options, examples = _plain(ctx), () if ctx.parent else EXAMPLES
    return ManualPage(
        path=ctx.command_path,
        synopsis=" ".join([ctx.command_path, *pieces]),
        summary=paragraphs[0],
        paragraphs=paragraphs,
        arguments=tuple(_arguments(ctx)),
        options=tuple((heading, tuple(records)) for heading, records in options),
        commands=tuple(_commands(ctx)),
        examples=examples,
    )


def _arguments(ctx: click.Context) -> Iterator[Record]:
    for parameter in ctx.command.get_params(ctx):
        if isinstance(parameter, click.Argument):
            written = parameter.make_metavar(ctx).strip("[].…")
            parts = (written,) if written in ARGUMENTS else written.split("|")
            yield from ((part, ARGUMENTS[part]) for part in parts)


def _plain(ctx: click.Context) -> list[tuple[str, list[Record]]]:
    records = (p.get_help_record(ctx) for p in ctx.command.get_params(ctx))
    return [("Options", [record for record in records if record is not None])]


def _commands(ctx: click.Context) -> Iterator[tuple[str, tuple[Record, ...]]]:
    command = ctx.command
    if ctx.parent is None:
        for heading, group in GROUPS.items():
            yield heading, tuple((name, text) for name, (_, text) in group.items())
    elif isinstance(command, click.Group):
        found = [(n, command.get_command(ctx, n)) for n in command.list_commands(ctx)]
        yield "Commands", tuple((n, c.get_short_help_str(100)) for n, c in found if c is not None)


def markdown(pages: Sequence[ManualPage]) -> str:
    """All pages as one document."""
    lines = [
        "# The reference of the commands", "",
        f"{_WRITTEN_BY} `man planner-tune` shows the same once",
        "`planner manual --format man --output ~/.local/share/man/man1` has written it. "
        "[commands.md](commands.md) is the guide.", "",
        "Exit status:", "", *(f"- {number}: {meaning}" for number, meaning in EXIT_STATUS),
    ]  # fmt: skip
    for page in pages:
        lines += ["", *_markdown_page(page)]
    return "\n".join(lines) + "\n"


def _markdown_page(page: ManualPage) -> Iterator[str]:
    yield from (f"## {page.path}", "", "```text", page.synopsis, "```")
    for paragraph in page.paragraphs:
        yield from ("", paragraph)
    for heading, records in page.commands:
        yield from ("", f"**{heading}**", "")
        for name, text in records:
            anchor = f"{page.path} {name}".replace(" ", "-")
            yield f"- [`{name}`](#{anchor}): {text}"
    if page.arguments:
        yield from ("", "**Arguments**", "", *(_item(record) for record in page.arguments))
    for heading, records in page.options:
        yield from ("", f"**{heading}**", "", *(_item(record) for record in records))
    if page.examples:
        yield from ("", "**Examples**", "", "```sh", *page.examples, "```")


def _item(record: Record) -> str:
    return f"- `{record[0]}`: {record[1]}"


def roff(page: ManualPage) -> str:
    """A page for man(1), in the macros of man(7) and nothing but ASCII."""
    name = page.path.replace(" ", "-")
    lines = [
        f'.TH "{_roff(name.upper())}" 1 "" "planner {_roff(__version__)}" "planner"',
        ".SH NAME", f"{_roff(name)} \\- {_roff(page.summary)}",
        ".SH SYNOPSIS", _roff(page.synopsis),
        ".SH DESCRIPTION",
    ]  # fmt: skip
    for paragraph in page.paragraphs:
        lines += [".PP", _roff(paragraph)]
    if page.arguments:
        lines += [".SH ARGUMENTS", *_tagged(page.arguments)]
    for title, lists in (("COMMANDS", page.commands), ("OPTIONS", page.options)):
        if lists:
            lines.append(f".SH {title}")
        for heading, records in lists:
            lines += [f'.SS "{_roff(heading)}"'] * (len(lists) > 1)
            lines += _tagged(records)
    if page.examples:
        lines += [".SH EXAMPLES", ".nf", *map(_roff, page.examples), ".fi"]
    lines += [".SH EXIT STATUS", *_tagged(EXIT_STATUS)]
    others = [f"{name}-{own}" for _, records in page.commands for own, _ in records]
    if name != "planner":
        others.insert(0, name.rpartition("-")[0])
    if others:
        lines += [".SH SEE ALSO", ", ".join(f"\\fB{_roff(other)}\\fR(1)" for other in others)]
    return "\n".join(lines) + "\n"


def _tagged(records: Sequence[Record]) -> Iterator[str]:
    for written, text in records:
        yield from (".TP", f"\\fB{_roff(written)}\\fR", _roff(text))


def _roff(text: str) -> str:
    """`text` as roff shows it: what steers roff is escaped, and a hyphen can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    text = text.replace("'", "\\(aq").replace("`", "\\(ga").replace("^", "\\(ha")
    text = text.replace("~", "\\(ti")
    text = "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in text)
    return f"\\&{text}" if text.startswith(".") else text


@click.command(
    cls=Command,
    examples=(
        "planner manual --output docs",
        "planner manual tune --format man | man -l -",
        "planner manual --format man --output ~/.local/share/man/man1",
    ),
)
@click.argument("command", nargs=-1)
@click.option(
    "--format", "kind", type=click.Choice(("markdown", "man")), default="markdown",
    show_default=True, help="A document, or pages for man(1).",
)  # fmt: skip
@click.option(
    "--output", "folder", type=click.Path(file_okay=False), metavar="DIR",
    help=f"Write {REFERENCE} (of one command its own), or pages for man(1), into DIR.",
)  # fmt: skip
@click.pass_context
def command(ctx: click.Context, command: tuple[str, ...], kind: str, folder: str | None) -> None:
    """Print the reference of all commands, or of COMMAND: what --help says."""
    refuse_empty({"output": folder})
    pages = list(manual_pages(find_command(ctx.find_root(), command)))
    if kind == "man":
        files = {f"{page.path.replace(' ', '-')}.1": roff(page) for page in pages}
    else:
        name = f"{'-'.join(('planner', *command))}.md" if command else REFERENCE
        files = {name: markdown(pages)}
    if folder is None:
        click.echo("".join(files.values()), nl=False)
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error, "choose another --output") from None
    click.echo(f"Wrote {' and '.join(files) if len(files) < 3 else len(files)} into {folder}.")
