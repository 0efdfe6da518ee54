"""Definitions of the planner's own that a script holds a copy of, since it runs without it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK_FINDERS = ("CONTAINERS", "TORCH_BLOCKS", "repeated_blocks", "_kind", "_may_be_block")
_ROOT = Path(__file__).parents[2]


class Source(NamedTuple):
    """Functions as source, with the imports that they need, one line each."""

    imports: tuple[str, ...] = ()
    body: str = ""


def sections(*parts: str) -> str:
    """A file of these parts, two lines between them; those that are empty are left out."""
    return "\n\n".join(part for part in parts if part)


def copied(module: str, *names: str, without: tuple[str, ...] = ()) -> Source:
    """What a module of the planner's that imports only torch defines as `names` (all, where none
    are given, but `without`), with the imports that it needs."""
    file = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = text.splitlines(keepends=True)
    if names:
        chosen = [node for node in nodes if not set(names).isdisjoint(_names(node))]
        body = "\n\n".join("".join(lines[place_of(n)]) for n in chosen)
    else:
        for node in nodes:
            if not set(without).isdisjoint(_names(node)):
                lines[place_of(node)] = [""] * len(lines[place_of(node)])
        body = "".join(lines[imports[-1].end_lineno :]).strip("\n") + "\n"
    return Source(imports=tuple(_needed(imports, body)), body=body + "\n\n")


def _needed(imports: list[ast.Import | ast.ImportFrom], body: str) -> Iterator[str]:
    """Those of `imports` whose names stand in `body`."""
    words = set(re.findall(r"\w+", body))
    for node in imports:
        node.names = [n for n in node.names if (n.asname or n.name).partition(".")[0] in words]
        if node.names and ast.unparse(node) != "from __future__ import annotations":
            yield ast.unparse(node)


def block_finding() -> Source:
    """`repeated_blocks` and what it calls."""
    return copied("planner.libraries.checkpointing", *_BLOCK_FINDERS)


def compiled_blocks(source: Source, how: str) -> Source:
    """`source`, its `build_model` compiling each repeated block; `how` are arguments of
    `torch.compile`."""
    compiling = copied("planner.training.compilation", "compile_blocks")
    finding = block_finding()
    if "def repeated_blocks" in source.body:
        finding = Source()
    line = f"    compile_blocks(repeated_blocks(model), {how})\n"
    return Source(
        (*source.imports, *finding.imports, *compiling.imports),
        finding.body + compiling.body + before_return(source.body, line),
    )


def before_return(body: str, lines: str) -> str:
    """`body`, whose one `return model` ends `build_model`, with `lines` in front of that."""
    end = "    return model\n"
    assert body.count(end) == 1, body
    return body.replace(end, lines + end)


def place_of(node: ast.stmt) -> slice:
    """The lines of a statement, its decorators with it."""
    decorators = getattr(node, "decorator_list", [])
    return slice(min(part.lineno for part in (node, *decorators)) - 1, node.end_lineno)


def _names(node: ast.stmt) -> list[str]:
    """What a statement at the top of a file defines."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
