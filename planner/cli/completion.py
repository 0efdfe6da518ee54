"""`planner completion SHELL`: the script that completes our commands, and what it asks us.

The scripts are those of click, but for three things that our values need: bash takes ':' and '='
for the ends of words, fish cut a value at its commas, and a value that goes on gets no space.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from planner.cli import COMPLETION
from planner.cli.command import Command
from planner.cli.values import CONTINUED
from planner.errors import UsageError, unknown_name

_ENDS = "".join(CONTINUED)

_BASH = """\
# Completes the commands of %(prog_name)s, their options and values in bash 4.4 and later. Install:
#   planner completion bash > ~/.local/share/bash-completion/completions/planner
# or, without the package bash-completion, in ~/.bashrc:
#   source <(planner completion bash)
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                COMPREPLY+=("$value")
                [[ $value == *[ENDS] ]] && compopt -o nospace
                ;;
        esac
    done < <(
        env PLANNER_LINE="${COMP_LINE:0:COMP_POINT}" PLANNER_BREAKS="$COMP_WORDBREAKS" \\
            %(complete_var)s=bash_complete "$1" 2> /dev/null
    )
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
""".replace("ENDS", _ENDS)

_ZSH = """\
#compdef %(prog_name)s
# Completes the commands of %(prog_name)s, their options and values in zsh. Install:
#   planner completion zsh > "${fpath[1]}/_planner"
# or, after compinit, in ~/.zshrc:
#   source <(planner completion zsh)
%(complete_func)s() {
    local -a plain going described response
    local kind value said
    (( ! $+commands[%(prog_name)s] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
%(complete_var)s=zsh_complete %(prog_name)s 2> /dev/null)}")

    for kind value said in ${response}; do
        if [[ "$kind" == "plain" ]]; then
            if [[ "$value" == *[ENDS] ]]; then
                going+=("$value")
            elif [[ "$said" == "_" ]]; then
                plain+=("$value")
            else
                described+=("$value":"$said")
            fi
        elif [[ "$kind" == "dir" ]]; then
            _path_files -/
        elif [[ "$kind" == "file" ]]; then
            _path_files -f
        fi
    done

    (( $#described )) && _describe -V unsorted described -U
    (( $#plain )) && compadd -U -V unsorted -a plain
    (( $#going )) && compadd -U -S '' -V unsorted -a going
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
""".replace("ENDS", _ENDS)

_FISH = """\
# Completes the commands of %(prog_name)s, their options and values in fish. Install:
#   planner completion fish > ~/.config/fish/completions/planner.fish
function %(complete_func)s
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \\
COMP_CWORD=(commandline -t) %(prog_name)s 2> /dev/null)
    for completion in $response
        set -l parts (string split -m 1 "," -- $completion)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2]
            case file
                __fish_complete_path $parts[2]
            case plain
                echo $parts[2]
        end
    end
end

complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


class _Whole(ShellComplete):
    """Completes `--option=VALUE` to all of it, as shells replace a whole word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        found = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if option.startswith("-") and equals:
            for item in found:
                item.value = f"{option}={item.value}"
        return found


@add_completion_class
class Bash(_Whole, BashComplete):
    """Reads the line itself: the words of bash end at each ':' and '='."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["PLANNER_LINE"]
        words = split_arg_string(line)
        incomplete = "" if not words or line[-1].isspace() else words.pop()
        while words and re.match(r"\w+=", words[0]):  # a variable before the command
            words.pop(0)
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Of a value only what follows the last end of a word in it that is typed already."""
        line, breaks = os.environ["PLANNER_LINE"], os.environ.get("PLANNER_BREAKS", ":=")
        typed = re.split(r"(?<!\\)\s", line)[-1]
        value = str(item.value)
        if item.type != "plain" or typed[:1] in ("'", '"'):
            return f"{item.type},{value}"
        shown = max((typed.rfind(end) + 1 for end in ":=" if end in breaks), default=0)
        return f"plain,{_quoted(value[shown:])}"


def _quoted(value: str) -> str:
    """As bash takes it for one word; what may go on is left open."""
    return value if re.fullmatch(r"[\w@%+=:,./~-]*", value) else shlex.quote(value)


@add_completion_class
class Zsh(_Whole, ZshComplete):
    source_template = _ZSH


@add_completion_class
class Fish(_Whole, FishComplete):
    source_template = _FISH


SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=Command,
    examples=(
        "planner completion bash > ~/.local/share/bash-completion/completions/planner",
        'planner completion zsh > "${fpath[1]}/_planner"',
        "planner completion fish > ~/.config/fish/completions/planner.fish",
    ),
)
@click.argument("shell", required=False, metavar="[bash|zsh|fish]")
@click.pass_context
def command(ctx: click.Context, shell: str | None) -> None:
    """Print the script that completes commands, options and values in a shell.

    Without an argument, the script is for the shell of $SHELL. Its first lines say where to put
    it. It also completes values: models, GPUs, fields, settings and the folders of runs.
    """
    name = Path(os.environ.get("SHELL", "")).name if shell is None else shell
    if shell is None and name not in SHELLS:
        raise UsageError("no shell was named.", "Write for example 'planner completion bash'.")
    if name not in SHELLS:
        raise unknown_name("shell", name, SHELLS, f"One of {', '.join(SHELLS)}.")
    found = get_completion_class(name)
    assert found is not None, "they are registered above"
    root = ctx.find_root().command
    click.echo(found(root, {}, "planner", COMPLETION).source(), nl=False)
