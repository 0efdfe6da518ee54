"""The kernels that a compiled step runs in place of its operations. Imports no torch.

First which operations are compiled, and in which compiled region; then the kernels that Inductor
fuses them to, and the updates that wait until backward is done.
"""

from collections.abc import Iterable, Sequence
from itertools import compress, groupby, pairwise
from operator import itemgetter

from planner.core.schema.setting import TrainSetting
from planner.ledger.ledger import Computed, Exchange, Operation
from planner.memory.compiled import FUSED_PREFIX, is_kernel

COMPILED_PHASES = frozenset(("forward", "backward"))  # the optimizer's step is not compiled
WHOLE_MODEL = ""  # the region that is the model, and what the step does around it


def find_regions(operations: Sequence[Operation], setting: TrainSetting) -> list[str | None]:
    """For each operation the compiled region that runs it, or None.

    Compiled block by block, a region is a numbered module: the blocks of stages
    (`layers.0.blocks.1`), where most modules are so deep. In a recorded compiled step it is one in
    which Inductor's kernels run; an eager step that stands for a compiled one has none.
    """
    if setting.compile == "off":
        return [None] * len(operations)
    if setting.compile_scope == "model":
        return [WHOLE_MODEL if phase in COMPILED_PHASES else None for phase, _ in operations]
    paths = {operation.path: _number_places(operation.path) for _, operation in operations}
    depths = [len(paths[operation.path]) for _, operation in operations if paths[operation.path]]
    is_deep = sum(depth > 1 for depth in depths) > 0.75 * len(depths)
    block = {path: _block_path(path, places, 1 + is_deep) for path, places in paths.items()}
    regions = [block[o.path] if phase in COMPILED_PHASES else None for phase, o in operations]
    kernels = [is_kernel(operation.name) for _, operation in operations]
    compiled = set(compress(regions, kernels)) or set(regions)
    return [region if region in compiled else None for region in regions]


def _number_places(path: str) -> list[int]:
    """The indices of the numbers among the parts of a path."""
    return [place for place, part in enumerate(path.split(".")) if part.isdecimal()]


def _block_path(path: str, number_places: Sequence[int], depth: int) -> str | None:
    """`layers.0.blocks.1` of `layers.0.blocks.1.mlp.fc1` at depth 2; None above the blocks."""
    if len(number_places) < depth:
        return None
    return ".".join(path.split(".")[: number_places[depth - 1] + 1])


def mark_entries(phases: Iterable[str], regions: Iterable[str | None]) -> list[bool]:
    """For each operation, whether it enters a compiled region: one other than that before it."""
    marks, previous = [], None
    for current in zip(phases, regions, strict=True):
        marks.append(current[1] is not None and current != previous)
        previous = current
    return marks


_FUSIBLE_KINDS = frozenset(("pointwise", "reduction", "copy"))
# A pointwise operation inside a chain reads and writes equally much. Fused, the read vanishes and
# the write stays only where backward needs it: between 0 and 1/2 of its bytes remain (derived);
# the middle is assumed.
_FUSED_BYTES_KEPT = 0.25


def fuse_operations(
    operations: Sequence[Operation], regions: Sequence[str | None]
) -> tuple[list[Operation], list[str | None]]:
    """The kernels that Inductor makes of `operations`, and the region of each.

    A chain of pointwise, reduction and copy operations in one phase of a compiled region becomes
    one kernel per reduction (at least one), and most of what it would write between them stays in
    registers. Operations in no region are left as they are.
    """
    keys: list[object] = []  # equal for neighbours in one chain
    for (phase, operation), region in zip(operations, regions, strict=True):
        is_fused = operation[0].startswith(FUSED_PREFIX)
        is_fusible = region is not None and operation[1] in _FUSIBLE_KINDS and not is_fused
        keys.append((phase, region) if is_fusible else len(keys))
    fused: list[Operation] = []
    fused_regions: list[str | None] = []
    for _, group in groupby(zip(keys, operations, regions, strict=True), key=itemgetter(0)):
        _, chain, (region, *_) = zip(*group, strict=True)
        fused.append((chain[0][0], _fuse_chain([operation for _, operation in chain])))
        fused_regions.append(region)
    return fused, fused_regions


def fuse_between_exchanges(
    operations: Sequence[Operation], regions: Sequence[str | None], exchanges: Sequence[Exchange]
) -> tuple[list[Operation], list[str | None], tuple[Exchange, ...]]:
    """`fuse_operations` of each run of operations between two exchanges, and the exchanges with
    their places among the kernels."""
    fused: list[Operation] = []
    fused_regions: list[str | None] = []
    moved = []
    ends = [exchange.place for exchange in exchanges] + [len(operations)]
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        kernels, kernel_regions = fuse_operations(operations[start:end], regions[start:end])
        fused += kernels
        fused_regions += kernel_regions
        if number < len(exchanges):
            moved.append(exchanges[number]._replace(place=len(fused)))
    return fused, fused_regions, tuple(moved)


def _fuse_chain(chain: Sequence[Computed]) -> Computed:
    if len(chain) == 1:
        return chain[0]
    _, kinds, dtypes, flops, sizes, _, paths = zip(*chain, strict=True)
    max_bytes = max(sizes)
    largest = sizes.index(max_bytes)
    return Computed(
        name=f"fused_{len(chain)}",
        kind=kinds[largest],
        dtype=dtypes[largest],
        flops=sum(flops),
        num_bytes=max_bytes + int(_FUSED_BYTES_KEPT * (sum(sizes) - max_bytes)),
        kernels=max(1, kinds.count("reduction")),
        path=paths[0],
    )


def move_updates_last(operations: list[Operation], setting: TrainSetting) -> list[Operation]:
    """`operations` with the updates that run in backward after it, where the model is compiled
    whole: it hands over all gradients as its backward returns."""
    is_whole = setting.compile != "off" and setting.compile_scope == "model"
    if not setting.updates_beside or not is_whole:
        return operations
    return sorted(operations, key=lambda operation: operation[0] == "optimizer")
