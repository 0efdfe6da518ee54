"""What a compiled step runs in place of its operations: fused kernels, updates after backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from planner.core.schema import TrainSetting
from planner.ledger.ledger import Computed, Exchanged
from planner.memory.compiled import FUSED_PREFIX, is_kernel

Operation = tuple[str, Computed]  # (phase, operation), as `Ledger.operations` yields them

_FUSIBLE_KINDS = frozenset(("pointwise", "reduction", "copy"))
# A pointwise operation inside a chain reads and writes equally much. Fused, the read vanishes and
# the write stays only where backward needs it: between 0 and 1/2 of its bytes remain (derived);
# the middle is assumed.
_FUSED_BYTES_KEPT = 0.25


def with_updates_last(
    operations: list[tuple[str, Any]], setting: TrainSetting
) -> list[tuple[str, Any]]:
    """Updates in backward follow that of a compiled model: it hands over all gradients as it
    returns."""
    is_whole = setting.compile != "off" and setting.compile_scope == "model"
    if not setting.updates_beside or not is_whole:
        return operations
    return sorted(operations, key=lambda operation: operation[0] == "optimizer")


def fuse_operations(
    operations: Sequence[Operation], regions: Sequence[str | None]
) -> tuple[list[Operation], list[str | None]]:
    """`operations` as Inductor runs them, and their `regions`: a chain of pointwise, reduction and
    copy operations in one phase of a compiled region becomes one kernel per reduction (at least
    one), and most of what it would write between them stays in registers. What is in no region is
    left as it is."""
    fused: list[Operation] = []
    where: list[str | None] = []
    chain: list[Computed] = []
    chained: tuple[str, str | None] = ("", None)

    def add(phase: str, operation: Computed, region: str | None) -> None:
        fused.append((phase, operation))
        where.append(region)

    for (phase, operation), region in zip(operations, regions, strict=True):
        fusible = operation[1] in _FUSIBLE_KINDS and region is not None
        fusible = fusible and not operation[0].startswith(FUSED_PREFIX)  # fused already
        if chain and (not fusible or (phase, region) != chained):
            add(chained[0], _fuse(chain), chained[1])
            chain = []
        if fusible:
            chain.append(operation)
            chained = phase, region
        else:
            add(phase, operation, region)
    if chain:
        add(chained[0], _fuse(chain), chained[1])
    return fused, where


def fuse_between(
    operations: Sequence[Operation], regions: Sequence[str | None], exchanges: Sequence[Exchanged]
) -> tuple[list[Operation], list[str | None], tuple[Exchanged, ...]]:
    """`fuse_operations` of what lies between exchanges, with their places among the fused."""
    fused: list[Operation] = []
    where: list[str | None] = []
    moved = []
    done = 0
    for exchange in exchanges:
        part = slice(done, exchange.place)
        kernels, their = fuse_operations(operations[part], regions[part])
        fused += kernels
        where += their
        done = exchange.place
        moved.append(exchange._replace(place=len(fused)))
    rest = fuse_operations(operations[done:], regions[done:])
    return [*fused, *rest[0]], [*where, *rest[1]], tuple(moved)


def _fuse(chain: Sequence[Computed]) -> Computed:
    if len(chain) == 1:
        return chain[0]
    _, kinds, dtypes, flops, sizes, _, paths = zip(*chain, strict=True)
    most = max(sizes)
    largest = sizes.index(most)
    return Computed(
        name=f"fused_{len(chain)}",
        kind=kinds[largest],
        dtype=dtypes[largest],
        flops=sum(flops),
        num_bytes=most + int(_FUSED_BYTES_KEPT * (sum(sizes) - most)),
        kernels=max(1, kinds.count("reduction")),
        path=paths[0],
    )


# Which operations of a step are compiled, and in which compiled region. Imports no torch.

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
