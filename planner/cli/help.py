"""`planner help [COMMAND]`: what `planner COMMAND --help` prints, as people ask for it."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from planner.cli.command import Command
from planner.core.errors import unknown_name


def _complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names that may follow those that were typed as the argument `command`."""
    found = find_command(ctx.find_root(), ctx.params.get("command") or ())
    if not isinstance(found.command, click.Group):
        return []
    return found.command.shell_complete(found, incomplete)


@click.command(cls=Command, examples=("planner help tune", "planner help bench attention"))
@click.argument("command", nargs=-1, shell_complete=_complete)
@click.pass_context
def command(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Explain COMMAND and its options, or list all commands."""
    click.echo(find_command(ctx.find_root(), command).get_help())


def find_command(ctx: click.Context, names: tuple[str, ...]) -> click.Context:
    """The context in which the command of these names within `ctx` would run.

    Raises UsageError.
    """
    found = ctx
    for name in names:
        group = found.command
        known = group.list_commands(found) if isinstance(group, click.Group) else []
        if not isinstance(group, click.Group) or name not in known:
            way_out = f"See '{found.command_path} --help'."
            raise unknown_name("command", name, known, way_out)
        command = group.get_command(found, name)
        assert command is not None, "it is listed"
        found = click.Context(
            command, info_name=name, parent=found,
            help_option_names=found.help_option_names,
        )  # fmt: skip
    return found
