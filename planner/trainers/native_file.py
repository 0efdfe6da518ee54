"""`native_swin.py`: native's Swin as a file of its own, which a script of it takes along."""

from __future__ import annotations

import ast
from pathlib import Path

from planner.core.schema import SwinConfig, model
from planner.trainers.comments import WRITTEN_BY
from planner.trainers.copies import copied, place_of, sections
from planner.trainers.imports import BESIDE, import_block
from planner.trainers.source import literal

FILENAME = f"{BESIDE}.py"
_FROM_MAPS = (
    "Pair", "CPB_HIDDEN", "feature_maps", "clamped_window", "padding", "BlockPlan", "plan_blocks",
)  # fmt: skip
_METHODS = ("num_stages", "windows", "pretrained_windows", "stage_channels", "drop_path_rates")
_ROOM = "planner.libraries.native"


def native_source() -> str:
    """The file: `build_swin(SwinConfig(…), attention, checkpointing)`, without the planner."""
    parts = [
        copied("planner.libraries.maps", *_FROM_MAPS),
        *(copied(f"{_ROOM}.{name}") for name in ("layout", "grid", "attention")),
        copied(f"{_ROOM}.module", without=("build",)),
    ]
    imports = {line for part in parts for line in part.imports if "planner" not in line}
    head = f"# {WRITTEN_BY}, for the script beside it.\n"
    head += '"""Swin Transformer, versions 1 and 2."""\n\n'
    bodies = [_config(), *(part.body.strip("\n") + "\n" for part in parts)]
    return head + sections(import_block((*imports, "from dataclasses import dataclass")), *bodies)


def _config() -> str:
    """SwinConfig as a dataclass: the same fields, without what checks them."""
    lines = []
    for name, field in SwinConfig.model_fields.items():
        if name not in ("library", "name"):
            kind = type(field.default).__name__.replace("tuple", "tuple[int, ...]")
            kind = {"window_size": "int | tuple[int, ...]", "image_size": "tuple[int, int]"}.get(
                name, kind
            )
            lines.append(f"    {name}: {kind} = {literal(field.default)}\n")
    text = Path(str(model.__file__)).read_text(encoding="utf-8")
    (found,) = (
        node for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "SwinConfig"
    )  # fmt: skip
    source = text.splitlines(keepends=True)
    methods = [
        "".join(source[place_of(node)])
        for node in found.body
        if isinstance(node, ast.FunctionDef) and node.name in _METHODS
    ]
    said = '    """A Swin Transformer: sizes in pixels or tokens, rates as probabilities."""\n\n'
    head = f"@dataclass(frozen=True)\nclass SwinConfig:\n{said}{''.join(lines)}\n"
    return head + "\n".join(methods)
