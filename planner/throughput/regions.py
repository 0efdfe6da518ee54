"""Which operations of a step are compiled, and in which compiled region. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.core.schema import TrainSetting
from planner.ledger.ledger import Computed
from planner.memory.compiled import is_kernel

COMPILED_PHASES = frozenset(("forward", "backward"))  # the optimizer's step is not compiled
WHOLE = ""  # the region that is the model, and what the step does around it


def regions_of(
    operations: Sequence[tuple[str, Computed]], setting: TrainSetting
) -> list[str | None]:
    """Of each of `operations` (phase, operation) the compiled region that runs it, or None.

    Compiled block by block, a region is a block. Recorded, its kernels are known by their names;
    of an eager step in place of a compiled one, they are the operations of modules within numbered
    ones: of the blocks in stages, where most are so deep.
    """
    if setting.compile == "off":
        return [None] * len(operations)
    if setting.compile_scope == "model":
        return [WHOLE if phase in COMPILED_PHASES else None for phase, _ in operations]
    is_known = any(is_kernel(operation.name) for _, operation in operations)
    paths = {operation.path: _numbers(operation.path) for _, operation in operations}
    numbered = [len(paths[op.path]) for _, op in operations if paths[op.path]]
    is_deep = sum(count > 1 for count in numbered) > 0.75 * len(numbered)
    depth = 2 if is_deep else 1
    block = {path: _block(path, found, depth) for path, found in paths.items()}
    return [
        block[operation.path]
        if phase in COMPILED_PHASES and is_kernel(operation.name) >= is_known
        else None
        for phase, operation in operations
    ]


def _numbers(path: str) -> list[int]:
    """Where in a path, counted in its parts, the numbers are."""
    return [place for place, part in enumerate(path.split(".")) if part.isdecimal()]


def _block(path: str, numbers: Sequence[int], depth: int) -> str | None:
    """`layers.0.blocks.1` of `layers.0.blocks.1.mlp.fc1` at depth 2, None of what lies above."""
    if len(numbers) < depth:
        return None
    return ".".join(path.split(".")[: numbers[depth - 1] + 1])


def entries(phases: Iterable[str], regions: Iterable[str | None]) -> list[bool]:
    """Whether a compiled region is entered with an operation: it is another than before."""
    found, previous = [], None
    for here in zip(phases, regions, strict=True):
        found.append(here[1] is not None and here != previous)
        previous = here
    return found
