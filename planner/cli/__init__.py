"""The `planner` command. Each subcommand is a file of its own, imported when it is called.

Exit status: 0 done, 1 it could not be done, 2 the command line is wrong, 130 interrupted (143 by
SIGTERM, 129 by SIGHUP), 141 where the reader of standard output has left.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click
from click.shell_completion import CompletionItem, shell_complete

from planner import __version__
from planner.cli.command import HELP_SETTINGS
from planner.core.errors import PlannerError, UsageError, as_text, printable, shorten, unknown_name

COMPLETION = "_PLANNER_COMPLETE"  # click's variable: what a shell's script asks in it
# What is no command, or no longer, and what to do instead.
INSTEAD = {
    "watch": "Write 'with planner.watch(\"run\") as watch:' around its loop "
    "(docs/troubleshooting.md); 'planner explain run' reads what it writes.",
    "help": "'planner COMMAND --help' explains a command, 'planner --help' lists them.",
    "completion": "'_PLANNER_COMPLETE=bash_source planner' prints the script for bash (or "
    "zsh_source, fish_source).",
    "validate": "'planner tune MODEL --output run' measures, and 'planner report run' shows each "
    "probe beside what was predicted.",
    "bench": "'python examples/window_attention.py' times window attention.",
}
NO_OPTION = {
    "--plot": "'planner report MODEL' draws a step as a page.",
    "--snapshot": "'planner emulate --snapshot FILE -- python train.py' keeps torch's own.",
}
MAX_SAID = 600  # characters of click's own message, which holds what was typed
INTERRUPTED, READER_GONE = 130, 141  # as shells count SIGINT and SIGPIPE

# heading -> name -> (where its click command is, what `planner --help` says of it)
GROUPS = {
    "Before you launch": {
        "estimate": ("planner.cli.estimate:command", "Predict a training step's memory and time."),
        "advise": ("planner.cli.advise:command", "Find the fastest ways to fit, change by change."),
        "emulate": ("planner.cli.emulate:command", "Run your own program on an emulated GPU."),
    },
    "On your device": {
        "tune": ("planner.cli.tune:command", "Find the fastest setting by short training runs."),
        "data": ("planner.cli.data:command", "Measure how fast this machine feeds a training."),
        "profile": ("planner.cli.profile:command", "Measure where a step's time goes."),
    },
    "Into your trainer": {
        "emit": ("planner.cli.emit:command", "Write a result as a trainer's configuration."),
    },
    "To look at": {
        "report": ("planner.cli.report:command", "Draw runs and estimates as one page."),
    },
    "When something is wrong": {
        "doctor": ("planner.cli.doctor:command", "Find what slows this environment down."),
        "explain": ("planner.cli.explain:command", "Say why a training ended, from its log."),
    },
    "Lists and files": {
        "gpus": ("planner.cli.gpus:command", "List the GPUs that --gpu knows."),
        "models": ("planner.cli.models:command", "List the published models of each library."),
        "cache": ("planner.cli.cache:command", "List or remove the traces that estimates keep."),
    },
}  # fmt: skip
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
EXAMPLES = (
    "planner estimate native:swin_tiny --batch-size 64 --gpu 'RTX 3090'",
    "planner advise native:swin_tiny --batch-size 256 --gpu 'RTX 3060'",
    "planner tune native:swin_tiny --budget 10m --output run",
    "planner emit run --for timm --output args.yaml",
)


class LazyGroup(click.Group):
    """A group that imports a command's file only to run it or to print its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            if name in INSTEAD:
                raise UsageError(f"'{name}' is no command.", INSTEAD[name])
            raise unknown_name("command", name, COMMANDS, "List commands with 'planner --help'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in group.items()])
        with formatter.section("For example"):
            for example in EXAMPLES:
                formatter.write(f"  {example}\n")
        formatter.write_paragraph()
        formatter.write_text("'planner COMMAND --help' explains a command.")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands, and what is said of them, without their files."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=LazyGroup, context_settings=HELP_SETTINGS, invoke_without_command=True)
@click.version_option(__version__, prog_name="planner", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train a Swin Transformer as fast as the card allows without running out of memory."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` where `arguments` is None) and return its exit status.

    A command may return its own status; None means 0. Errors that are for people go to standard
    error in their own words, without a traceback.
    """
    _open_streams()
    try:
        status = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except PlannerError as error:
        return _fail(str(error), error.exit_status)
    except click.ClickException as error:
        return _fail(_usage(error), error.exit_code)
    except (click.Abort, EOFError, KeyboardInterrupt):
        click.echo(err=True)  # below the terminal's own ^C
        return _fail("interrupted.", INTERRUPTED)
    except OSError as error:
        if error.errno in _WRITING and error.filename is None:
            return _output_gone(error)
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = shorten(as_text(os.fsdecode(error.filename)))
        return _fail(f"{name} is longer than the name of any file.", 2)
    return status


def _run(arguments: list[str]) -> int:
    """The status of the command. Not click's own main, which ends the process by itself where
    standard output has no reader."""
    asked = os.environ.get(COMPLETION)
    if asked:
        return shell_complete(cli, {}, "planner", COMPLETION, asked)
    try:
        with cli.make_context("planner", arguments) as context:
            status = cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    return status if isinstance(status, int) else 0


# What a write to standard output fails with: a reader that left, a full disk or quota, a terminal
# or descriptor that is no more. A file's error names the file.
_WRITING = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _open_streams() -> None:
    """A standard stream that was closed is /dev/null: the next file to be opened would take its
    number, and what is printed would end in it. What we print there ourselves fails as it would. A
    terminal without a sign shows its escape."""
    is_closed = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if is_closed:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _usage(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    said = error.format_message()
    said = said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]}…"
    if context is None:
        return said
    return f"{_as_field(error) or said}\nSee '{context.command_path} --help'."


def _as_field(error: click.ClickException) -> str | None:
    """What to write in place of an option that is no option, and a field or another library's word
    for one: its own option where the command has one, else --set."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    if error.option_name in NO_OPTION:
        return f"No such option '{error.option_name}'. {NO_OPTION[error.option_name]}"
    if (error.ctx.info_name, error.option_name) == ("tune", "--gpu"):
        return (
            "No such option '--gpu'. A tune measures the device that is here (--device); "
            "'planner advise MODEL --gpu NAME --json > advice.json' answers for another, and "
            "--from advice.json begins there."
        )
    from planner.cli.arguments import MODEL_OPTIONS, SEVERAL_OPTIONS
    from planner.core.vocabulary import find_word
    from planner.estimation.arguments import ALL_FIELDS

    field = error.option_name.lstrip("-").replace("-", "_")
    taken = {param.name for param in error.ctx.command.params}
    word = None if field in ALL_FIELDS else find_word(field)
    if "fields" not in taken or (field not in ALL_FIELDS and word is None):
        return None
    if word is not None:
        written = word.written(before="--set ")
        return f"No such option '{error.option_name}', a word of {word.source}. {written}"
    named = {f: option for option, f in {**MODEL_OPTIONS, **SEVERAL_OPTIONS}.items()}
    own = named.get(field, field)
    way_out = f"--{own.replace('_', '-')}" if own in taken else f"--set {field}=VALUE"
    return f"No such option '{error.option_name}'. Write {way_out}."


def _fail(message: str, status: int) -> int:
    from planner.report.text import fitted

    with suppress(OSError):  # nobody can be told
        click.echo(fitted(f"Error: {printable(message)}"), err=True)
    return status


def _output_gone(error: OSError) -> int:
    """`planner gpus | head -1`: what is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return READER_GONE
    if error.errno == errno.EBADF:
        return _fail("standard output is closed, and the answer is lost.\nWrite: > FILE", 1)
    return _fail(f"standard output cannot be written: {error.strerror}.", 1)


if __name__ == "__main__":
    sys.exit(main())
