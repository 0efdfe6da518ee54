"""Definitions of the planner's own that a script holds a copy of, since it runs without it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

BLOCK_FINDERS = ("CONTAINERS", "TORCH_BLOCKS", "repeated_blocks", "_kind", "_may_be_block")
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class ModelSource:
    """`build_model()` as source, with the imports that it needs, one line each."""

    imports: tuple[str, ...]
    body: str


def copied(file: str, *names: str) -> ModelSource:
    """What a file of the planner's that imports only torch defines as `names` (all, where none are
    given), with all of its imports."""
    text = (_PACKAGE / file).read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = text.splitlines(keepends=True)
    if names:
        chosen = [node for node in nodes if not set(names).isdisjoint(_names(node))]
        body = "\n\n".join("".join(lines[n.lineno - 1 : n.end_lineno]) for n in chosen)
    else:
        body = "".join(lines[imports[-1].end_lineno :]).strip("\n") + "\n"
    return ModelSource(
        imports=tuple(ast.unparse(node) for node in imports[1:]),  # the first is of annotations
        body=body + "\n\n",
    )


def compiled_blocks(source: ModelSource, how: str) -> ModelSource:
    """`source`, its `build_model` compiling each repeated block; `how` are arguments of
    `torch.compile`."""
    compiling = copied("compilation.py", "compile_blocks")
    finding = copied("checkpointing.py", *BLOCK_FINDERS)
    if "def repeated_blocks" in source.body:
        finding = ModelSource((), "")
    needed = ["from collections import Counter"] if finding.body else []
    line = f"    compile_blocks(repeated_blocks(model), {how})\n"
    return ModelSource(
        (*source.imports, *needed, *compiling.imports),
        finding.body + compiling.body + before_return(source.body, line),
    )


def before_return(body: str, lines: str) -> str:
    """`body`, whose one `return model` ends `build_model`, with `lines` in front of that."""
    end = "    return model\n"
    assert body.count(end) == 1, body
    return body.replace(end, lines + end)


def _names(node: ast.stmt) -> list[str]:
    """What a statement at the top of a file defines."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
