"""The `planner` command. The file of a subcommand is imported when it is called.

Exit status: 0 done, 1 it could not be done or the answer is no, 2 the command line is wrong, 130
interrupted (143 by SIGTERM, 129 by SIGHUP), 141 if the reader of standard output has left.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pkgutil import resolve_name

import click
from click.shell_completion import CompletionItem, shell_complete

from planner import __version__
from planner.core.errors import PlannerError, UsageError, printable, shorten, unknown_name

HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
COMPLETION = "_PLANNER_COMPLETE"  # click's variable, in which a shell's script asks
# Words that people take for commands, and for options of this command, and what to do instead.
REPLACEMENTS = {
    "watch": "Write 'with planner.watch(\"run\") as watch:' around its loop "
    "(docs/troubleshooting.md); 'planner explain train.log' knows what it says there.",
    "help": "'planner COMMAND --help' explains a command, 'planner --help' lists them.",
    "completion": "'_PLANNER_COMPLETE=bash_source planner' prints the script for bash (or "
    "zsh_source, fish_source).",
}
OPTION_HINTS = {
    "--snapshot": "'planner emulate --gpu NAME --snapshot FILE -- python train.py' keeps torch's.",
    "--gpu": "This measures the device that is here (--device); 'planner advise MODEL --gpu NAME "
    "--json > x.json' answers for another, and 'planner tune --from x.json' begins there.",
    "--price-per-hour": "Multiply the hours that --epochs prints by the GPUs and by the price of "
    "one for an hour.",
    "--study-name": "A study is named by its model; another --storage is another study.",
    "--images-per-epoch": "Where compiling wins, a note says how long it takes to pay.",
    "--seed": "Probes have fixed seeds; the script of 'planner emit --for pytorch' has --seed.",
}
OF_MEASURING = ("--gpu", "--images-per-epoch", "--study-name")  # hints for what has --device
INTERRUPTED, READER_GONE = 130, 141  # as shells count SIGINT and SIGPIPE

TROUBLE = "When something is wrong"
BEFORE_LAUNCH, ON_DEVICE, LISTS_AND_FILES = "Before you launch", "On your device", "Lists and files"
# name -> (location of its click command, heading in `planner --help`, description there)
COMMANDS = {
    "estimate": ("estimate:command", BEFORE_LAUNCH, "Predict a training step's memory and time."),
    "advise": ("advise:command", BEFORE_LAUNCH, "Find the fastest ways to fit, change by change."),
    "emulate": ("emulate:command", BEFORE_LAUNCH, "Run your own program on an emulated GPU."),
    "tune": ("measure:tune", ON_DEVICE, "Find the fastest setting by short training runs."),
    "data": ("measure:data", ON_DEVICE, "Measure how fast this machine feeds a training."),
    "emit": ("emit:command", "Into your trainer", "Write a result as a trainer's configuration."),
    "report": ("report:command", "To look at", "Draw runs and estimates as one page."),
    "doctor": ("diagnose:doctor", TROUBLE, "Find what slows this environment down."),
    "explain": ("diagnose:explain", TROUBLE, "Say why a training ended, from its log."),
    "gpus": ("lists:gpus", LISTS_AND_FILES, "List the GPUs that --gpu knows."),
    "models": ("lists:models", LISTS_AND_FILES, "List the Swins, or any models by name."),
    "cache": ("lists:cache", LISTS_AND_FILES, "List or remove what is kept between runs."),
}
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
        location = COMMANDS.get(cmd_name, ("",))[0]
        return resolve_name(f"planner.cli.{location}") if location else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            if name in REPLACEMENTS:
                raise UsageError(f"'{name}' is not a command.", REPLACEMENTS[name])
            raise unknown_name("command", name, COMMANDS, "List commands with 'planner --help'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, group in groupby(COMMANDS, lambda name: COMMANDS[name][1]):
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), COMMANDS[name][2]) for name in group])
        with formatter.section("For example"):
            formatter.write("".join(f"  {example}\n" for example in EXAMPLES))
        formatter.write_paragraph()
        formatter.write_text("'planner COMMAND --help' explains a command.")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands with their descriptions, without importing their files."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        items = [CompletionItem(name, help=COMMANDS[name][-1]) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=LazyGroup, context_settings=HELP_SETTINGS, invoke_without_command=True)
@click.version_option(__version__, prog_name="planner", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train a vision model as fast as your GPU allows, without running out of memory.

    It predicts what a training needs before you launch it, finds the fastest setting, and says why
    a training failed. MODEL is any model of timm, torchvision or transformers, or one of your own.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` where `arguments` is None) and return its exit status.

    A command may return its own status; None means 0. Errors for people go to standard error
    without a traceback.
    """
    _open_streams()
    try:
        if completion := os.environ.get(COMPLETION):
            return shell_complete(cli, {}, "planner", COMPLETION, completion)
        # Not click's own main, which ends the process if standard output has no reader.
        arguments_typed = sys.argv[1:] if arguments is None else list(arguments)
        with cli.make_context("planner", arguments_typed) as context:
            status = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ended:
        sys.stdout.flush()
        return ended.exit_code
    except PlannerError as error:
        return _fail(str(error), error.exit_status)
    except click.ClickException as error:
        return _fail(_usage_text(error), error.exit_code)
    except (click.Abort, EOFError, KeyboardInterrupt):
        click.echo(err=True)  # below the terminal's own ^C
        return _fail("interrupted.", INTERRUPTED)
    except OSError as error:
        if error.errno in _WRITE_ERRORS and error.filename is None:
            return _report_lost_output(error)
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = shorten(os.fsdecode(error.filename))
        return _fail(f"{name} is longer than the name of any file.\nShorten it.", 2)
    return status if isinstance(status, int) else 0


# The errors of a write to standard output: a reader that left, a full disk or quota, a terminal or
# descriptor that is gone. The error of a file would name the file.
_WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _open_streams() -> None:
    """Replace closed standard streams by /dev/null: otherwise the next opened file would get their
    numbers, and what is printed would end in that file. Printing to a closed standard output must
    still fail. A character that a terminal cannot show is escaped."""
    is_closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode)  # noqa: SIM115, PTH123 (it gets the lowest free number)
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)
    if is_closed:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _usage_text(error: click.ClickException) -> str:
    context, message = getattr(error, "ctx", None), error.format_message()
    if context is not None and isinstance(error, click.NoSuchOption):
        hint = _option_hint(error.option_name, context.command)
        message = f"No such option '{error.option_name}'{hint}" if hint else message
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option):
        message = f"{error.param.opts[0]} is missing. {error.param.help}"
    message = f"{message[:600]}…" if len(message) > 600 else message  # it contains typed text
    path = "planner COMMAND" if context is None else context.command_path
    return f"{message}\nSee '{path} --help'."


def _option_hint(option: str, command: click.Command) -> str:
    """What to write instead of an unknown option. For a field, or another library's word for one,
    that is its option, if the command has one, or else --set."""
    from planner.core.errors import find_word
    from planner.estimation.arguments import ALL_FIELDS

    flags = {param.name: param.opts[0] for param in command.params}
    field = option.lstrip("-").replace("-", "_")
    word = None if field in ALL_FIELDS else find_word(field)
    if option in OPTION_HINTS and (option not in OF_MEASURING or "device" in flags):
        return f". {OPTION_HINTS[option]}"
    if "fields" not in flags or (field not in ALL_FIELDS and word is None):
        return ""
    if word is not None:
        text, typed = word.written(before="--set "), f"--set {word.field}="
        flag = f"{flags[word.field]} " if word.field in flags else typed
        return f", a word of {word.source}. {text.replace(typed, flag)}"
    flag = "gpus" if field == "world_size" and "gpus" in flags else field
    return f". Write {flags.get(flag, f'--set {field}=VALUE')}."


def _fail(message: str, status: int) -> int:
    from planner.report.text import fit_to_terminal

    with suppress(OSError):  # standard error may be gone
        click.echo(fit_to_terminal(f"Error: {printable(message)}"), err=True)
    return status


def _report_lost_output(error: OSError) -> int:
    """As in `planner gpus | head -1`. What is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return READER_GONE
    if error.errno == errno.EBADF:
        return _fail("standard output is closed, and the answer is lost.\nWrite: > FILE", 1)
    return _fail(f"standard output cannot be written: {error.strerror}.\nWrite it elsewhere.", 1)


if __name__ == "__main__":
    sys.exit(main())
