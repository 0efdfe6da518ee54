"""The memory of a step beside its tensors: the scratch that CUDA kernels request from the caching
allocator, by device; the workspaces of convolutions; and the pinned memory of the host.

A ledger names the law of a scratch and its sizes (`planner.ledger.ledger.Scratch`); `size_scratch`
fills in the bytes. The laws are quoted from ATen's launches (torch 2.13 and 2.15) and from CUB, and
tests hold them to the requests of torch's own CUDA code (tests/memory/test_scratch.py). A law is a
function of the device and the sizes; `LAWS` names them all.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter

from planner.core.units import MIB, format_bytes
from planner.ledger.ledger import (
    GRADIENT_TO_HOST,
    TO_HOST,
    WEIGHT_TO_DEVICE,
    AffineLedger,
    BatchEvents,
    Ledger,
)


@dataclass(frozen=True)
class Processors:
    """The properties of a device that decide how large scratch is."""

    num_sms: int
    threads_per_sm: int
    capability: tuple[int, int]


def size_scratch(ledger: Ledger, device: Processors) -> Ledger:
    """The ledger with the bytes that each scratch has on `device`; events keep their indices."""
    events = ledger.events
    if not isinstance(events, BatchEvents):
        events = BatchEvents(AffineLedger(ledger), ledger.batch_size)
    if events.scratch_bytes is not None:
        return ledger  # already sized
    return replace(ledger, events=replace(events, scratch_bytes=partial(scratch_bytes, device)))


@lru_cache(maxsize=1 << 14)
def scratch_bytes(device: Processors, law: str, sizes: tuple[int, ...]) -> int:
    """The bytes that a scratch of `law` requests; 0 is no request."""
    return LAWS[law](device, *sizes)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _floor_power(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1) if number else 1


# Reductions: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig.
_MAX_THREADS = 512  # MAX_NUM_THREADS
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_MIN_VECTOR_INPUTS = 128  # from here on a thread loads vectors of the elements that it sums


def _reduction_grid(
    device: Processors, outputs: int, inputs: int, sums_fastest: int, vector: int
) -> tuple[int, int, int]:
    """The blocks of a reduction of `inputs` elements to each of `outputs`: (blocks that share an
    output, blocks side by side, partial sums that a block has for each of its outputs).

    `sums_fastest`: the fastest dimension is summed. `vector` is the number of elements that a
    thread can load at once: of one output if `sums_fastest`, of neighbouring outputs otherwise.
    """
    if sums_fastest and inputs < _MIN_VECTOR_INPUTS:
        vector = 1
    output_vector = 1 if sums_fastest else vector
    first, second = (inputs // vector, outputs) if sums_fastest else (outputs // vector, inputs)
    threads = _MAX_THREADS // output_vector
    first, second = min(_floor_power(first), threads), min(_floor_power(second), threads)
    width = min(first, _WARP)
    height = min(second, threads // width)
    width = min(first, threads // height)
    step_input, step_output = (width, 1) if sums_fastest else (1, width)
    if _ceil_div(inputs, step_input) < min(height * _MIN_VALUES, _MAX_VALUES):
        return 1, 1, 1
    step_input *= height
    values = _ceil_div(inputs, step_input)
    grid = _ceil_div(outputs // output_vector, step_output)
    target = device.num_sms * (device.threads_per_sm // (width * height))
    if values < _MAX_VALUES or grid > target:
        return 1, 1, 1
    shared = min(_ceil_div(target, grid), _ceil_div(values, _MIN_VALUES))
    shared = max(shared, _ceil_div(values, _MAX_VALUES))
    return shared, grid, 1 if sums_fastest else width * vector


def _reduction(device: Processors, outputs: int, *sizes: int) -> int:
    """Partial sums in fp32, for every dtype but integers."""
    shared, _, partials = _reduction_grid(device, outputs, *sizes)
    return 4 * outputs * shared * partials if shared > 1 else 0


def _integer_reduction(device: Processors, *sizes: int) -> int:
    """Partial sums in int64."""
    return 2 * _reduction(device, *sizes)


def _semaphores(device: Processors, *sizes: int) -> int:
    shared, grid, _ = _reduction_grid(device, *sizes)
    return 4 * grid if shared > 1 else 0


# Layer norm's weight gradients: aten/src/ATen/native/cuda/layer_norm_kernel.cu,
# LaunchGammaBetaBackwardCUDAKernel. Where rows are many and short, each block sums 32 of them, and
# `sum(0)` adds up these partial sums; its result replaces the gradients that were allocated before.
_MANY_ROWS, _ROWS_PER_BLOCK, _MAX_BLOCKS = 64 * 1024, 32, 32 * 1024


def _norm_blocks(device: Processors, rows: int, columns: int) -> int:
    """The number of blocks with a partial sum; 0 where one kernel sums all rows."""
    if rows <= _MANY_ROWS or columns // _WARP >= device.num_sms // 2:
        return 0
    return min(_MAX_BLOCKS // _ceil_div(columns, _WARP), _ceil_div(rows, _ROWS_PER_BLOCK))


def _norm_parts(device: Processors, rows: int, columns: int, itemsize: int) -> int:
    return _norm_blocks(device, rows, columns) * columns * itemsize


def _norm_replaced(device: Processors, rows: int, columns: int, itemsize: int) -> int:
    return columns * itemsize if _norm_blocks(device, rows, columns) else 0


def _apply_to_norm_parts(law: Callable[..., int]) -> Callable[..., int]:
    """A reduction's `law`, for the sum over the partial sums."""

    def norm_law(device: Processors, rows: int, columns: int) -> int:
        blocks = _norm_blocks(device, rows, columns)
        return law(device, columns, blocks, 0, vector_width(columns)) if blocks else 0

    return norm_law


def vector_width(*elements: int) -> int:
    """The number of elements that a thread can load at once, from addresses that are multiples of
    each of `elements`."""
    return next(width for width in (4, 2, 1) if all(n % width == 0 for n in elements))


# CUB's DeviceRadixSort of int64 keys with int64 values, 8 bits a pass, offsets of 8 bytes. One
# block sorts up to one tile, and requests a byte; beyond that "onesweep" sorts by tiles whose size
# depends on the capability (measured on its own host code: torch 2.13 and 2.15, 49 to 1,000,000
# keys).
_SINGLE_TILE = 2304
_SORT_TILES = (((9, 0), 4608), ((8, 0), 3840), ((0, 0), 2816))  # (least capability, tile)
_DIGITS, _SORT_UNIT = 256, 256


def _sort(device: Processors, keys: int, rows: int) -> int:
    """The temporary storage for sorting `keys` indices into `rows` rows."""
    if keys <= _SINGLE_TILE:
        return 1
    tile = _find_tile(device, _SORT_TILES)
    passes = _ceil_div((rows - 1).bit_length(), 8)
    parts = [8 * _DIGITS * passes, 4 * _DIGITS * _ceil_div(keys, tile), 4 * passes]
    parts += [8 * keys] * 2 if passes > 1 else []
    return _SORT_UNIT - 1 + sum(_ceil_div(part, _SORT_UNIT) * _SORT_UNIT for part in parts)


# The gradient of an embedding (cuda/Embedding.cu, EmbeddingBackwardKernel.cu): more than
# _FEW_INDICES indices are sorted, and the rows of one index are summed by tens. CUB keeps 16 bytes
# for each tile that it scans and for 32 more, and 256; its tiles of "unique by key" depend on the
# capability (measured on its own host code: torch 2.14, 3073 to 1,000,000 indices).
_FEW_INDICES, _SUMMED_ROWS = 3072, 10
_SCAN_TILE = 896
_UNIQUE_TILES = (((9, 0), 5120), ((8, 6), 320), ((8, 0), 1344), ((0, 0), 320))


def _apply_to_many(law: Callable[..., int]) -> Callable[..., int]:
    """`law` where there are many indices; 0 where there are few."""

    def many_law(device: Processors, indices: int, *sizes: int) -> int:
        return law(device, indices, *sizes) if indices > _FEW_INDICES else 0

    return many_law


def _index_bytes(_: Processors, indices: int, itemsize: int) -> int:
    return indices * itemsize


def _segments(_: Processors, indices: int, rows: int, itemsize: int) -> int:
    """One item for each different index."""
    return min(indices, rows) * itemsize


def _segment_parts(_: Processors, indices: int, rows: int, itemsize: int) -> int:
    return (indices // _SUMMED_ROWS + min(indices, rows)) * itemsize


def _unique(device: Processors, indices: int) -> int:
    return _scan_bytes(indices, _find_tile(device, _UNIQUE_TILES))


def _scan(_: Processors, indices: int, rows: int) -> int:
    return _scan_bytes(min(indices, rows), _SCAN_TILE)


def _scan_bytes(elements: int, tile: int) -> int:
    states = _ceil_div(16 * (_ceil_div(elements, tile) + 32), _SORT_UNIT) * _SORT_UNIT
    return _SORT_UNIT - 1 + states + _SORT_UNIT


def _find_tile(device: Processors, tiles: Iterable[tuple[tuple[int, int], int]]) -> int:
    return next(tile for capability, tile in tiles if device.capability >= capability)


# The backward of memory-efficient attention (cuda/mem_eff_attention/kernels/cutlassB.h and
# kernel_backward.h) adds up the queries' gradient in blocks of queries x keys floats, each behind
# four int32. Where registers do not hold the gradients of keys and values, it does so for these
# too.
_BLOCK_HEAD_BYTES = 16
_SPLIT_HEADS, _MAX_SPLIT = 256, 200  # attention_backward.cu, "Keys splitting heuristic"


def _attention_blocks(
    device: Processors, heads: int, rows: int, keys: int, channels: int, values: int, itemsize: int
) -> int:
    """The bytes for the `heads` of the whole batch, by the `rows` of queries and the keys. A query
    has `channels`, a value has `values`; one of both numbers is above 64."""
    widest, is_half = max(channels, values), itemsize < 4
    height, width, max_channels = _attention_tile(device.capability, widest, is_half)
    blocks = _ceil_div(rows, height) * _ceil_div(channels, width)
    total = blocks * (_BLOCK_HEAD_BYTES + 4 * height * width)
    if is_half and max_channels > height:
        parts = 1 if heads >= _SPLIT_HEADS and keys <= 2 * width else _ceil_div(keys, width)
        parts = max(1, min(parts, _MAX_SPLIT // heads))
        total += (
            4 * parts * width * height * (_ceil_div(channels, height) + _ceil_div(values, height))
        )
    return heads * total


_ANY = 1 << 16  # channels of the kernels for heads of any size


def _attention_tile(
    capability: tuple[int, int], widest: int, is_half: bool
) -> tuple[int, int, int]:
    """(queries, keys, maximum channels) of the kernel for heads of `widest` channels, above 64."""
    is_ampere, is_small = capability >= (8, 0), capability in ((8, 6), (8, 9))
    has_much_shared = is_ampere and not is_small and capability[0] != 12
    max_channels = 128 if widest <= 128 else _ANY
    if not is_half:
        return (128 if has_much_shared else 64), 64, max_channels
    if widest <= 96 and is_small:
        return 128, 64, 96
    if widest <= 128 and is_ampere:
        return (128, 128, 128) if has_much_shared else (64, 64, 128)
    return 128, 64, max_channels


# Flash attention's forward (torch's flash_api.cpp, set_params_splitkv, num_splits_heuristic).
_FLASH_QUERIES = 64


def _flash_split(
    device: Processors, heads: int, queries: int, keys: int, channels: int, floats: int
) -> int:
    """`floats` fp32 for every query in every part of the keys, where the keys are split."""
    block = 256 if channels <= 64 else 128 if channels <= 128 else 64
    blocks = heads * _ceil_div(queries, _FLASH_QUERIES)
    parts = _flash_parts(blocks, 2 * device.num_sms, _ceil_div(keys, block))
    return 4 * parts * heads * queries * floats if parts > 1 else 0


def _flash_parts(blocks: int, slots: int, key_blocks: int) -> int:
    """The fewest parts that fill the waves of blocks at least 85% as well as any number does."""
    if blocks >= 0.8 * slots:
        return 1
    fills = {
        parts: blocks * parts / slots / _ceil_div(blocks * parts, slots)
        for parts in range(1, min(128, slots, key_blocks) + 1)
        if parts == 1 or _ceil_div(key_blocks, parts) != _ceil_div(key_blocks, parts - 1)
    }
    return next(parts for parts, fill in fills.items() if fill >= 0.85 * max(fills.values()))


# Batch norm over rows of channels (ATen/native/cuda/Normalization.cuh, flexible_launch_configs).
_BN_THREADS, _BN_TILE, _BN_ROWS, _BN_BLOCKS = 512, 32, 16, (8, 128)


def _batch_norm_grid(rows: int, channels: int) -> tuple[int, int]:
    """(blocks across channels, blocks across rows)."""
    width = min(_floor_power(channels), _BN_TILE)
    height = min(_floor_power(_ceil_div(rows, _BN_ROWS)), _BN_THREADS // width)
    if width * height != _BN_THREADS:
        width = min(_floor_power(channels), _BN_THREADS // height)
    min_blocks, max_blocks = _BN_BLOCKS
    row_blocks = min(_ceil_div(rows, height * _BN_ROWS), max_blocks)
    return _ceil_div(channels, width), row_blocks if row_blocks >= min_blocks else 1


def _batch_norm_parts(_: Processors, rows: int, channels: int, floats: int) -> int:
    row_blocks = _batch_norm_grid(rows, channels)[1]
    return 4 * floats * channels * row_blocks if row_blocks > 1 else 0


def _batch_norm_semaphores(_: Processors, rows: int, channels: int) -> int:
    channel_blocks, row_blocks = _batch_norm_grid(rows, channels)
    return 4 * channel_blocks if row_blocks > 1 else 0


LAWS: dict[str, Callable[..., int]] = {
    "bytes": lambda _, num_bytes: num_bytes,  # the same on every device
    "reduction": _reduction,
    "semaphores": _semaphores,
    "integer_reduction": _integer_reduction,
    "integer_semaphores": _semaphores,
    "norm_parts": _norm_parts,
    "norm_replaced": _norm_replaced,
    "norm_reduction": _apply_to_norm_parts(_reduction),
    "norm_semaphores": _apply_to_norm_parts(_semaphores),
    "batch_norm_parts": _batch_norm_parts,
    "batch_norm_semaphores": _batch_norm_semaphores,
    "sort": _sort,
    "many_indices": _apply_to_many(_index_bytes),
    "many_sorted": _apply_to_many(_sort),
    "many_unique": _apply_to_many(_unique),
    "many_scanned": _apply_to_many(_scan),
    "many_segments": _apply_to_many(_segments),
    "many_parts": _apply_to_many(_segment_parts),
    "attention_blocks": _attention_blocks,
    "flash_split": _flash_split,
}

# The workspaces of convolutions, which no ledger counts: a range for them.
#
# torch lets cuDNN take the workspace of its fastest algorithm, as far as that much is free (issue
# 49207 of pytorch/pytorch: one block of 8.7 GiB was seen), and gets it back after each convolution.
# Published figures of whole networks are moderate: about 100 MB for ResNet-34 at batch 160 (PR 695
# of davisking/dlib), 150 to 180 MB for ResNet-50 at 32 and 64 (issue 5536 of deeplearning4j), and
# on one card no algorithm was faster for having more than 128 MB (PR 502 of sonots/cumo). So the
# range goes from nothing to as much as the largest convolution reads and writes, which is above
# these: 610 MB in the forward of that ResNet-34. Not measured by us.

CAP_VARIABLE = "CUDNN_CONV_WSCAP_DBG"  # MiB; cuDNN's own variable, which torch's docs name


# What no law above covers.
UNCOUNTED_SCRATCH = "the scratch memory of kernels other than those that the estimate counts"


@dataclass(frozen=True)
class ConvolutionWorkspace:
    """The number of convolutions in one forward, and the largest workspace that one of a step is
    expected to take. `single_name` names a single convolution."""

    num_convolutions: int
    high_bytes: int
    single_name: str = "the only convolution"

    @property
    def left_out(self) -> str:
        """The memory that the estimate leaves out, in words."""
        if self.num_convolutions == 0:
            return UNCOUNTED_SCRATCH
        if self.num_convolutions == 1:
            return f"cuDNN's workspace for {self.single_name}, and {UNCOUNTED_SCRATCH}"
        return (
            f"cuDNN's workspaces for {self.num_convolutions} convolutions: the range has up to "
            f"{format_bytes(self.high_bytes)} for them, as much as the largest reads and writes. "
            f"cuDNN may take more where more is free ({CAP_VARIABLE}=MIB limits it). And "
            f"{UNCOUNTED_SCRATCH}"
        )


# Swin's only convolution is its patch embedding, whose windows do not overlap: a plain product.
PATCH_EMBEDDING = ConvolutionWorkspace(1, 0, "the patch embedding")


def convolution_workspace(
    ledger: Ledger, environment: Mapping[str, str] = os.environ
) -> ConvolutionWorkspace:
    """The workspaces of the steady step. A single convolution is taken for a patch embedding, which
    needs none."""
    convolutions = [(phase, op) for phase, op in ledger.operations() if op.kind.endswith("conv")]
    forward_paths = [op.path for phase, op in convolutions if phase == "forward"]
    num_modules = len(set(forward_paths))
    if num_modules < 2:
        return ConvolutionWorkspace(min(len(forward_paths), 1), 0)
    high = max(op.num_bytes for _, op in convolutions)
    cap = environment.get(CAP_VARIABLE, "")
    if cap.isdecimal():
        high = min(high, int(cap) * MIB)
    return ConvolutionWorkspace(num_modules, high)


# The host's memory that a step pins where it offloads.


@dataclass(frozen=True)
class PinnedMemory:
    """`num_bytes` of tensors, which lie in `pinned_bytes` of the host's memory: no block is split,
    and each is rounded up to a power of two (aten/src/ATen/core/CachingHostAllocator.h; issue
    150517 of pytorch/pytorch)."""

    num_bytes: int = 0
    pinned_bytes: int = 0


def pinned_activations(ledger: Ledger) -> PinnedMemory:
    """The activations of the forward that offloads most. All are on the host at once, when that
    forward ends."""
    forwards = [
        [op.num_bytes for _, op in operations if op.name == TO_HOST]
        for phase, operations in groupby(ledger.operations(), itemgetter(0))
        if phase == "forward"
    ]
    return _pin(max(forwards, key=sum, default=[]))


def pinned_weights(ledger: Ledger) -> PinnedMemory:
    """The host's copy of each weight that its optimizer updates, and of its gradient."""
    weights = [op.num_bytes for _, op in ledger.operations() if op.name == WEIGHT_TO_DEVICE]
    return _pin(2 * weights)


def offloaded_gradient_bytes(ledger: Ledger) -> int:
    """The bytes of all gradients that go to the host. Their memory is used again only once they are
    there: where memory is plentiful torch may reserve as much more."""
    return sum(op.num_bytes for _, op in ledger.operations() if op.name == GRADIENT_TO_HOST)


def _pin(sizes: list[int]) -> PinnedMemory:
    return PinnedMemory(sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size))
