"""The imports of a file, as isort orders them."""

from __future__ import annotations

BESIDE = "native_swin"  # a module that lies beside the file


def import_block(imports: tuple[str, ...], standard: tuple[str, ...] = ()) -> str:
    """The imports of a file, in isort's order: the standard library's, all others, and those of
    what lies beside it."""
    plain = {*imports, *(f"import {name}" for name in standard), "import torch"}
    lines = _merged({*plain, "from torch import nn"})
    first = sorted((line for line in lines if _module(line) in _STANDARD), key=_isort_key)
    rest = sorted((line for line in lines if _module(line) not in _STANDARD), key=_isort_key)
    second = [line for line in rest if _module(line) != BESIDE]
    third = [line for line in rest if _module(line) == BESIDE]
    blocks = ["from __future__ import annotations", *map("\n".join, (first, second, third))]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _merged(lines: set[str]) -> set[str]:
    """The same imports, those from one module in one line."""
    names: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith("from "):
            module, _, imported = line.partition(" import ")
            found = (name.strip() for name in imported.strip("()").split(","))
            names.setdefault(module, set()).update(name for name in found if name)
    merged = {_import(module, sorted(found)) for module, found in names.items()}
    return merged | {line for line in lines if not line.startswith("from ")}


def _import(module: str, names: list[str]) -> str:
    """In one line where it fits into 100 columns."""
    line = f"{module} import {', '.join(names)}"
    if len(line) <= 100:
        return line
    return f"{module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


_STANDARD = frozenset(
    ("argparse", "collections", "contextlib", "dataclasses", "functools", "itertools", "json",
     "math", "os", "pathlib", "random", "re", "sys", "time", "typing", "weakref")
)  # fmt: skip


def _module(line: str) -> str:
    return line.split()[1].partition(".")[0]


def _isort_key(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line.split()[1]
