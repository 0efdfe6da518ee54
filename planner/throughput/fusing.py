"""What a compiled step runs in place of its operations: fused kernels, updates after backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.core.schema.setting import TrainSetting
from planner.ledger.ledger import Computed, Exchanged
from planner.memory.compiled import FUSED_PREFIX

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
