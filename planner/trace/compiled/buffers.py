"""The kernels Inductor makes of one half of a partitioned graph, and the buffers they share.

Transcribed in outline from torch/_inductor (lowering.py, ir.py, scheduler.py of torch 2.13):
pointwise values are computed where they are used until too many reads have gathered; products,
convolutions, attention and reductions are kernels with results in memory; kernels over the same
elements fuse, and what only they share is never written. A buffer lives from its kernel to the
last that reads it; a kernel may write over an input that dies in it. The order of kernels is the
graph's; what Inductor does to it to save memory (`reorder_for_peak_memory`) is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from planner.ledger.ledger import OperationKind
from planner.memory.compiled import EXTERN_PREFIX, FUSED_PREFIX
from planner.step.attention import backward_scratch
from planner.trace.compiled.graph import Value, recomputable_operators, view_operators

_MAX_READS_REUSED = 4  # config.realize_reads_threshold
_MAX_READS = 8  # config.realize_acc_reads_threshold
_MAX_OPERATIONS = 30  # config.realize_opcount_threshold
_MAX_DISTANCE = 64  # kernels apart that may still fuse (config.max_fusion_size, of its order)
_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "any", "argmax", "var_mean", "prod", "max"))
_TUPLE_VIEWS = frozenset(("unbind", "split", "split_with_sizes"))
_POINTWISE = frozenset((  # besides what is recomputable
    "cat", "constant_pad_nd", "copy", "fma", "inductor_lookup_seed", "inductor_random",
    "select_scatter", "slice_scatter",
))  # fmt: skip
_KINDS: dict[str, OperationKind] = {
    "mm": "matmul", "addmm": "matmul", "bmm": "matmul", "convolution": "conv",
    "_scaled_mm": "matmul", "convolution_backward": "conv",
}  # fmt: skip
_ATTENTION = tuple(
    f"_scaled_dot_product_{kernel}_attention" for kernel in ("efficient", "flash", "cudnn")
)


@dataclass(eq=False)
class Kernel:
    """One launch: the values it computes, the buffers it reads (by the values that made them) and
    those of its values that are written to memory. `frees` are dead after it; `overwrites` maps
    a written value to the dying buffer it takes over."""

    values: list[Value]
    is_extern: bool
    elements: int
    columns: bool
    reads: dict[Value, None] = field(default_factory=dict)
    writes: list[Value] = field(default_factory=list)
    frees: list[Value] = field(default_factory=list)
    overwrites: dict[Value, Value] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.values[-1].path

    @property
    def name(self) -> str:
        """As Inductor names them: `extern_kernels.mm`, or `triton_` and the operations fused."""
        if self.is_extern:
            return f"{EXTERN_PREFIX}{self.values[0].op}"
        operations = dict.fromkeys(v.op for v in self.values if v.op != "getitem")
        return FUSED_PREFIX + "_".join(list(operations)[:4])

    @property
    def kind(self) -> OperationKind:
        if self.is_extern:
            operation = self.values[0].op
            return (
                "attention" if operation.startswith(_ATTENTION) else _KINDS.get(operation, "copy")
            )
        reduces = any(_source(value).op in _REDUCTIONS for value in self.values)
        return "reduction" if reduces else "pointwise"

    @property
    def num_bytes(self) -> int:
        """Moved to and from device memory."""
        return sum(v.num_bytes for v in (*self.reads, *self.writes))

    @property
    def dtype(self) -> str:
        if self.values[0].op == "_scaled_mm":  # of 8 bits, which runs at the rate of what it reads
            return self.values[0].inputs[0].dtype
        return (self.writes or self.values)[0].dtype

    @property
    def scratch(self) -> tuple[int, ...]:
        """Bytes of each further request that ends with the kernel."""
        node = self.values[0]
        if node.op != "_scaled_dot_product_efficient_attention_backward":
            return ()
        queries = node.inputs[1]
        assert queries.shape is not None
        found = backward_scratch(queries.shape, queries.dtype != "float32")
        return tuple([num_bytes for num_bytes in found if num_bytes])

    @property
    def flops(self) -> int:
        if not self.is_extern:
            return sum(value.numel for value in self.values)
        return _extern_flops(self.values[0])


def _extern_flops(node: Value) -> int:
    """A multiply-add is two."""
    shapes = [source.shape or () for source in node.inputs]
    if node.op in ("mm", "bmm", "addmm"):
        return 2 * node.numel * shapes[-2][-1]
    if node.op == "_scaled_mm":
        return 2 * node.numel * shapes[0][-1]
    if node.op == "convolution":
        return 2 * node.numel * prod(shapes[1][1:])
    if node.op == "convolution_backward":
        return 2 * node.inputs[0].numel * prod(shapes[2][1:]) * len(node.users)
    if node.op in _ATTENTION:
        return 4 * node.inputs[0].numel * shapes[1][2]
    if node.op.startswith(_ATTENTION):  # its backward, of the gradient, queries, keys …
        return 10 * node.inputs[1].numel * shapes[2][2]
    return 0


def plan(nodes: Sequence[Value], inputs: Iterable[Value], results: Iterable[Value]) -> list[Kernel]:
    """The kernels of one half: `nodes` in order, computed from `inputs`, of which `results` must be
    in memory at its end. Frees include inputs; what outlives the half is the caller's to know."""
    return _Planner(nodes, inputs, results).kernels


def buffer_of(value: Value) -> Value:
    """The value whose memory `value` is: itself, or what it is a view of."""
    while _is_view(value):
        value = value.inputs[0]
    return value


def _is_view(value: Value) -> bool:
    if value.op == "getitem":
        return value.inputs[0].op in _TUPLE_VIEWS
    return value.op in _TUPLE_VIEWS or value.op in view_operators()


def _source(value: Value) -> Value:
    """The operation that made a value: of a part of a tuple, the tuple."""
    if value.op == "getitem" and not _is_view(value):
        return value.inputs[0]
    return value


class _Planner:
    """One run over one half."""

    def __init__(
        self, nodes: Sequence[Value], inputs: Iterable[Value], results: Iterable[Value]
    ) -> None:
        self.nodes = nodes
        self.computed = set(nodes)
        self.results = {buffer_of(value) for value in results}
        self.reads: dict[Value, dict[Value, None]] = {}
        self.num_operations: dict[Value, int] = {}
        self.kernels: list[Kernel] = []
        self.kernel_of: dict[Value, int] = {}
        for value in inputs:
            self.reads[value] = {buffer_of(value): None}
            self.num_operations[value] = 0
        self.materialised = self._needed_in_memory()
        for node in nodes:
            if node not in self.reads:
                self._lower(node)
        self._set_lifetimes()

    def _needed_in_memory(self) -> set[Value]:
        """What an extern kernel reads, and results."""
        found = set(self.results)
        for node in self.nodes:
            if self._is_extern(node):
                found.update(buffer_of(source) for source in node.inputs)
        return found

    @staticmethod
    def _is_extern(node: Value) -> bool:
        if node.op == "getitem" or _is_view(node):
            return False
        return (
            node.op not in _POINTWISE
            and node.op not in _REDUCTIONS
            and node.op not in recomputable_operators()
        )

    def _lower(self, node: Value) -> None:
        inputs: dict[Value, None] = {}
        for source in node.inputs:
            inputs.update(self.reads[source])
        self.num_operations[node] = 1 + sum(self.num_operations[s] for s in node.inputs)
        if _is_view(node):
            self.reads[node] = inputs
            self.num_operations[node] -= 1
        elif node.op == "getitem":
            self._add_part(node)
        elif self._is_extern(node):
            self._add_kernel(node, Kernel([node], True, 0, False, inputs))
        elif node.op in _REDUCTIONS:
            self._fuse(node, inputs, node.inputs[0].numel, not _is_of_rows(node))
        elif self._is_realised(node, inputs):
            self._fuse(node, inputs, node.numel, False)
        else:
            self.reads[node] = inputs

    def _is_realised(self, node: Value, reads: dict[Value, None]) -> bool:
        if node in self.materialised or len(reads) > _MAX_READS:
            return True
        num_users = sum(user in self.computed for user in node.users)
        return num_users > 1 and (
            len(reads) > _MAX_READS_REUSED or self.num_operations[node] > _MAX_OPERATIONS
        )

    def _add_kernel(self, node: Value, kernel: Kernel) -> None:
        self.kernels.append(kernel)
        self._realise(node, len(self.kernels) - 1)

    def _realise(self, node: Value, position: int) -> None:
        self.reads[node] = {node: None}
        self.num_operations[node] = 0
        self.kernel_of[node] = position

    def _add_part(self, node: Value) -> None:
        position = self.kernel_of[node.inputs[0]]
        self.kernels[position].values.append(node)
        self._realise(node, position)

    def _fuse(self, node: Value, reads: dict[Value, None], elements: int, columns: bool) -> None:
        """Into the first kernel that may take it, or one of its own."""
        earliest = max((self.kernel_of.get(read, -1) for read in reads), default=-1)
        start = max(earliest, len(self.kernels) - _MAX_DISTANCE, 0)
        for position in range(start, len(self.kernels)):
            kernel = self.kernels[position]
            if kernel.is_extern or kernel.elements != elements or kernel.columns != columns:
                continue
            if columns and position == earliest:
                continue  # the sums over all rows are known after the last of them
            if position == earliest or any(read in kernel.reads for read in reads):
                kernel.values.append(node)
                kernel.reads.update(
                    {r: None for r in reads if self.kernel_of.get(r, -1) != position}
                )
                self._realise(node, position)
                return
        self._add_kernel(node, Kernel([node], False, elements, columns, reads))

    def _set_lifetimes(self) -> None:
        """What each kernel writes, and where each buffer dies."""
        last: dict[Value, int] = {}
        read_elsewhere = set(self.results)
        for position, kernel in enumerate(self.kernels):
            for read in kernel.reads:
                last[read] = position
                read_elsewhere.add(read)
        for position, kernel in enumerate(self.kernels):
            kernel.writes = [
                value for value in kernel.values
                if value.shape is not None and (value in read_elsewhere or kernel.is_extern)
            ]  # fmt: skip
            for value in kernel.writes:
                last.setdefault(value, position)
        for value, position in last.items():
            if value not in self.results:
                self.kernels[position].frees.append(value)
        for kernel in self.kernels:
            if not kernel.is_extern:
                _overwrite(kernel)


def _is_of_rows(node: Value) -> bool:
    """Whether a reduction is over the last dimension alone."""
    source = node.inputs[0].shape or (1,)
    kept = node.numel or _parts_numel(node)
    return kept * source[-1] == prod(source) and kept != source[-1]


def _parts_numel(node: Value) -> int:
    return max((user.numel for user in node.users), default=0)


def _overwrite(kernel: Kernel) -> None:
    """Inductor's in-place buffers: a written value of a dying input's size takes its place."""
    dying = [value for value in kernel.frees if value in kernel.reads and not value.is_input]
    for value in kernel.writes:
        for candidate in dying:
            if candidate.num_bytes == value.num_bytes and candidate.dtype == value.dtype:
                kernel.overwrites[value] = candidate
                dying.remove(candidate)
                kernel.frees.remove(candidate)
                break
