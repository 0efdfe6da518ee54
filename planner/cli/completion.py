"""`planner completion SHELL`: click's script that completes our commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from planner.cli import COMPLETION
from planner.cli.command import Command


@click.command(
    cls=Command,
    examples=(
        "planner completion bash > ~/.local/share/bash-completion/completions/planner",
        'planner completion zsh > "${fpath[1]}/_planner"',
        "planner completion fish > ~/.config/fish/completions/planner.fish",
    ),
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and values in a shell.

    Write it where your shell looks for such scripts (bash: needs the package bash-completion).
    Values are models, GPUs, fields, settings and files.
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    if shell == "bash":  # or else LIBRARY:NAME would be two words
        click.echo('COMP_WORDBREAKS="${COMP_WORDBREAKS//:/}"')
    click.echo(found(ctx.find_root().command, {}, "planner", COMPLETION).source(), nl=False)
