"""What a step takes beside its tensors: what CUDA kernels ask the caching allocator for, by device,
what convolutions work in, and what is pinned of the host's memory.

A ledger names the law and its sizes (`planner.ledger.ledger.Scratch`); `on_device` puts in the
bytes. Laws are quoted from ATen's launches (torch 2.13 and 2.15) and from CUB, and held to the
requests that torch's own CUDA code makes (tests/memory/test_scratch.py).
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
    EventsAt,
    Ledger,
)


@dataclass(frozen=True)
class Processors:
    """What of a device decides how large scratch is."""

    num_sms: int
    threads_per_sm: int
    capability: tuple[int, int]


def on_device(ledger: Ledger, device: Processors) -> Ledger:
    """The ledger with all scratch as large as `device` makes it: events keep their places."""
    events = ledger.events
    if not isinstance(events, EventsAt):
        events = EventsAt(AffineLedger(ledger, {}), ledger.batch_size)
    if events.scratch_bytes is not None:
        return ledger  # it is of a device already
    return replace(ledger, events=replace(events, scratch_bytes=partial(scratch_bytes, device)))


@lru_cache(maxsize=1 << 14)
def scratch_bytes(device: Processors, law: str, sizes: tuple[int, ...]) -> int:
    """The bytes that one request of `law` is for; 0 is no request."""
    return LAWS[law](device, *sizes)


def _up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _power_below(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1) if number else 1


# aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig.
_MAX_THREADS = 512  # MAX_NUM_THREADS
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_VECTOR_FROM = 128  # elements that are summed, from which on vectors of them are loaded


def _split(
    device: Processors, outputs: int, inputs: int, along: int, vector: int
) -> tuple[int, int, int]:
    """How a reduction of `inputs` elements for each of `outputs` is laid over blocks: (blocks that
    share an output, blocks side by side, elements that each block leaves per output of its own).

    `along` is whether the fastest dimension is summed; `vector` how many elements a thread can load
    at once, of one output where `along`, else of neighbouring ones.
    """
    if along and inputs < _VECTOR_FROM:
        vector = 1
    output_vector = 1 if along else vector
    first, second = (inputs // vector, outputs) if along else (outputs // vector, inputs)
    threads = _MAX_THREADS // output_vector
    first, second = min(_power_below(first), threads), min(_power_below(second), threads)
    width = min(first, _WARP)
    height = min(second, threads // width)
    width = min(first, threads // height)
    step_input, step_output = (width, 1) if along else (1, width)
    if _up(inputs, step_input) < min(height * _MIN_VALUES, _MAX_VALUES):
        return 1, 1, 1
    step_input *= height
    values = _up(inputs, step_input)
    grid = _up(outputs // output_vector, step_output)
    target = device.num_sms * (device.threads_per_sm // (width * height))
    if values < _MAX_VALUES or grid > target:
        return 1, 1, 1
    shared = max(
        min(_up(target, grid), _up(values, _MIN_VALUES)), _up(values, _MAX_VALUES)
    )  # fmt: skip
    return shared, grid, 1 if along else width * vector


def _reduction(device: Processors, outputs: int, inputs: int, along: int, vector: int) -> int:
    """Partial sums in fp32, whatever is summed but integers."""
    shared, _, each = _split(device, outputs, inputs, along, vector)
    return 4 * outputs * shared * each if shared > 1 else 0


def _integer_reduction(device: Processors, *sizes: int) -> int:
    """Partial sums in int64."""
    return 2 * _reduction(device, *sizes)


def _semaphores(device: Processors, outputs: int, inputs: int, along: int, vector: int) -> int:
    shared, grid, _ = _split(device, outputs, inputs, along, vector)
    return 4 * grid if shared > 1 else 0


# aten/src/ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: where rows are
# many and short, blocks sum 32 of them each, and `sum(0)` adds up what they leave; what it gives
# takes the place of the gradients that were there.
_MANY_ROWS, _ROWS_PER_BLOCK, _MAX_BLOCKS = 64 * 1024, 32, 32 * 1024


def _norm_blocks(device: Processors, rows: int, columns: int) -> int:
    """How many blocks leave a partial sum; 0 where none does."""
    if rows <= _MANY_ROWS or columns // _WARP >= device.num_sms // 2:
        return 0
    return min(_MAX_BLOCKS // _up(columns, _WARP), _up(rows, _ROWS_PER_BLOCK))


def _norm_parts(device: Processors, rows: int, columns: int, itemsize: int) -> int:
    return _norm_blocks(device, rows, columns) * columns * itemsize


def _norm_replaced(device: Processors, rows: int, columns: int, itemsize: int) -> int:
    return columns * itemsize if _norm_blocks(device, rows, columns) else 0


def _of_norm_parts(law: Callable[..., int]) -> Callable[..., int]:
    """`law` of the sum over partial sums."""

    def law_of_parts(device: Processors, rows: int, columns: int) -> int:
        blocks = _norm_blocks(device, rows, columns)
        return law(device, columns, blocks, 0, vector_of(columns)) if blocks else 0

    return law_of_parts


def vector_of(*elements: int) -> int:
    """How many elements are loaded at once of what begins at multiples of `elements`."""
    return next(v for v in (4, 2, 1) if all(n % v == 0 for n in elements))


# CUB's DeviceRadixSort of int64 keys with int64 values, 8 bits a pass, offsets of 8 bytes: up to
# one tile in one block, which asks for a byte; else "onesweep", by tiles that differ with the
# capability (measured on its own host code: torch 2.13 and 2.15, 49 to 1,000,000 keys).
_SINGLE_TILE = 2304
_SORT_TILES = (((9, 0), 4608), ((8, 0), 3840), ((0, 0), 2816))  # from that capability on
_DIGITS, _SORT_UNIT = 256, 256


def _sort(device: Processors, keys: int, rows: int) -> int:
    """The temporary storage in which `keys` indices into `rows` rows are sorted."""
    if keys <= _SINGLE_TILE:
        return 1
    tile = _of_capability(device, _SORT_TILES)
    passes = _up((rows - 1).bit_length(), 8)
    parts = [8 * _DIGITS * passes, 4 * _DIGITS * _up(keys, tile), 4 * passes]
    parts += [8 * keys] * 2 if passes > 1 else []
    return _SORT_UNIT - 1 + sum(_up(part, _SORT_UNIT) * _SORT_UNIT for part in parts)


# The gradient of an embedding (cuda/Embedding.cu, EmbeddingBackwardKernel.cu): above so many
# indices these are sorted, and rows of one index are summed by tens. CUB keeps 16 bytes for each
# tile that it scans, and of 32 more, and 256; its tiles of "unique by key" differ with the
# capability (measured on its own host code: torch 2.14, 3073 to 1,000,000 indices).
_FEW_INDICES, _SUMMED_ROWS = 3072, 10
_SCAN_TILE = 896
_UNIQUE_TILES = (((9, 0), 5120), ((8, 6), 320), ((8, 0), 1344), ((0, 0), 320))


def _of_many(law: Callable[..., int]) -> Callable[..., int]:
    """`law` where there are many indices; nothing is asked for where there are few."""

    def law_of_many(device: Processors, indices: int, *sizes: int) -> int:
        return law(device, indices, *sizes) if indices > _FEW_INDICES else 0

    return law_of_many


def _each(_: Processors, indices: int, itemsize: int) -> int:
    return indices * itemsize


def _segments(_: Processors, indices: int, rows: int, itemsize: int) -> int:
    """For each index that there is, of `rows` at most."""
    return min(indices, rows) * itemsize


def _parts_of_segments(_: Processors, indices: int, rows: int, itemsize: int) -> int:
    return (indices // _SUMMED_ROWS + min(indices, rows)) * itemsize


def _unique(device: Processors, indices: int) -> int:
    return _scanned(indices, _of_capability(device, _UNIQUE_TILES))


def _scan(_: Processors, indices: int, rows: int) -> int:
    return _scanned(min(indices, rows), _SCAN_TILE)


def _scanned(elements: int, tile: int) -> int:
    states = _up(16 * (_up(elements, tile) + 32), _SORT_UNIT) * _SORT_UNIT
    return _SORT_UNIT - 1 + states + _SORT_UNIT


def _of_capability(device: Processors, sizes: Iterable[tuple[tuple[int, int], int]]) -> int:
    return next(size for capability, size in sizes if device.capability >= capability)


# The backward of memory-efficient attention (cuda/mem_eff_attention/kernels/cutlassB.h and
# kernel_backward.h) adds up the queries' gradient by blocks of `rows` x `columns` floats, each
# behind four int32, and where registers do not hold those of keys and values, these too.
_BLOCK_HEAD_BYTES = 16
_SPLIT_HEADS, _MAX_SPLIT = 256, 200  # attention_backward.cu, "Keys splitting heuristic"


def _attention_blocks(
    device: Processors, heads: int, rows: int, keys: int, channels: int, wide: int, itemsize: int
) -> int:
    """Of `heads` of the whole batch with `channels` of queries and `wide` ones of values, either
    above 64."""
    widest, is_half = max(channels, wide), itemsize < 4
    high, across, most = _attention_tile(device.capability, widest, is_half)
    blocks = _up(rows, high) * _up(channels, across)
    total = blocks * (_BLOCK_HEAD_BYTES + 4 * high * across)
    if is_half and most > high:
        parts = 1 if heads >= _SPLIT_HEADS and keys <= 2 * across else _up(keys, across)
        parts = max(1, min(parts, _MAX_SPLIT // heads))
        total += 4 * parts * across * high * (_up(channels, high) + _up(wide, high))
    return heads * total


_ANY = 1 << 16  # channels of the kernels for heads of any size


def _attention_tile(
    capability: tuple[int, int], widest: int, is_half: bool
) -> tuple[int, int, int]:
    """(queries, keys, most channels) of the kernel for heads above 64 channels."""
    has_ampere, is_small = capability >= (8, 0), capability in ((8, 6), (8, 9))
    has_much_shared = has_ampere and not is_small and capability[0] != 12
    most = 128 if widest <= 128 else _ANY
    if not is_half:
        return (128 if has_much_shared else 64), 64, most
    if widest <= 96 and is_small:
        return 128, 64, 96
    if widest <= 128 and has_ampere:
        return (128, 128, 128) if has_much_shared else (64, 64, 128)
    return 128, 64, most


# Flash attention's forward (torch's flash_api.cpp, set_params_splitkv, num_splits_heuristic).
_FLASH_QUERIES = 64


def _flash_split(
    device: Processors, heads: int, rows: int, keys: int, channels: int, each: int
) -> int:
    """`each` fp32 of every query in every part of the keys, where there are several."""
    block = 256 if channels <= 64 else 128 if channels <= 128 else 64
    parts = _flash_parts(heads * _up(rows, _FLASH_QUERIES), 2 * device.num_sms, _up(keys, block))
    return 4 * parts * heads * rows * each if parts > 1 else 0


def _flash_parts(blocks: int, slots: int, key_blocks: int) -> int:
    """The fewest parts that fill at least 85% as much of the last wave as any number does."""
    if blocks >= 0.8 * slots:
        return 1
    fills = {
        parts: blocks * parts / slots / _up(blocks * parts, slots)
        for parts in range(1, min(128, slots, key_blocks) + 1)
        if parts == 1 or _up(key_blocks, parts) != _up(key_blocks, parts - 1)
    }
    return next(parts for parts, fill in fills.items() if fill >= 0.85 * max(fills.values()))


# Batch norm over rows of channels (ATen/native/cuda/Normalization.cuh, flexible_launch_configs).
_BN_THREADS, _BN_TILE, _BN_ROWS, _BN_BLOCKS = 512, 32, 16, (8, 128)


def _batch_norm_grid(rows: int, channels: int) -> tuple[int, int]:
    """(blocks of channels, blocks of rows)."""
    width = min(_power_below(channels), _BN_TILE)
    height = min(_power_below(_up(rows, _BN_ROWS)), _BN_THREADS // width)
    if width * height != _BN_THREADS:
        width = min(_power_below(channels), _BN_THREADS // height)
    fewest, most = _BN_BLOCKS
    blocks = min(_up(rows, height * _BN_ROWS), most)
    return _up(channels, width), blocks if blocks >= fewest else 1


def _batch_norm_parts(_: Processors, rows: int, channels: int, each: int) -> int:
    blocks = _batch_norm_grid(rows, channels)[1]
    return 4 * each * channels * blocks if blocks > 1 else 0


def _batch_norm_semaphores(_: Processors, rows: int, channels: int) -> int:
    of_channels, of_rows = _batch_norm_grid(rows, channels)
    return 4 * of_channels if of_rows > 1 else 0


def _bytes(_: Processors, num_bytes: int) -> int:
    return num_bytes


LAWS: dict[str, Callable[..., int]] = {
    "bytes": _bytes,  # what no device changes
    "reduction": _reduction,
    "semaphores": _semaphores,
    "integer_reduction": _integer_reduction,
    "integer_semaphores": _semaphores,
    "norm_parts": _norm_parts,
    "norm_replaced": _norm_replaced,
    "norm_reduction": _of_norm_parts(_reduction),
    "norm_semaphores": _of_norm_parts(_semaphores),
    "batch_norm_parts": _batch_norm_parts,
    "batch_norm_semaphores": _batch_norm_semaphores,
    "sort": _sort,
    "many_indices": _of_many(_each),
    "many_sorted": _of_many(_sort),
    "many_unique": _of_many(_unique),
    "many_scanned": _of_many(_scan),
    "many_segments": _of_many(_segments),
    "many_parts": _of_many(_parts_of_segments),
    "attention_blocks": _attention_blocks,
    "flash_split": _flash_split,
}

# The memory that convolutions work in, which no ledger counts: a range for it.
#
# torch lets cuDNN take what its fastest algorithm asks for, as far as that much is free (issue
# 49207 of pytorch/pytorch: one block of 8.7 GiB was seen), and gets it back after each. What is
# published of whole networks is moderate: about 100 MB for ResNet-34 at batch 160 (PR 695 of
# davisking/dlib), 150 to 180 MB for ResNet-50 at 32 and 64 (issue 5536 of deeplearning4j), and on
# one card no algorithm was faster for having more than 128 MB (PR 502 of sonots/cumo). So the range
# goes from nothing to as much as the largest convolution reads and writes, which is above these:
# 610 MB in the forward of that ResNet-34. Not measured by us.

CAP_VARIABLE = "CUDNN_CONV_WSCAP_DBG"  # MiB; cuDNN's own, which torch's documentation names


# What no law above is of.
UNCOUNTED_SCRATCH = "the scratch memory of kernels other than those that the estimate counts"


@dataclass(frozen=True)
class ConvolutionWorkspace:
    """`num_convolutions` in one forward, and the most that one of a step is expected to take.
    `what` is a single one called."""

    num_convolutions: int
    high_bytes: int
    what: str = "the only convolution"

    @property
    def left_out(self) -> str:
        """What the estimate leaves out, in words."""
        if self.num_convolutions == 0:
            return UNCOUNTED_SCRATCH
        if self.num_convolutions == 1:
            return f"cuDNN's workspace for {self.what}, and {UNCOUNTED_SCRATCH}"
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
    """Of the steady step. A single convolution is taken for a patch embedding: nothing is added."""
    found = [(phase, o) for phase, o in ledger.operations() if o.kind.endswith("conv")]
    paths = {operation.path for phase, operation in found if phase == "forward"}
    num_forward = sum(phase == "forward" for phase, _ in found)
    if len(paths) < 2:
        return ConvolutionWorkspace(min(num_forward, 1), 0)
    high = max(operation.num_bytes for _, operation in found)
    cap = environment.get(CAP_VARIABLE, "")
    if cap.isdecimal():
        high = min(high, int(cap) * MIB)
    return ConvolutionWorkspace(len(paths), high)


# What a step that offloads pins of the host's memory.


@dataclass(frozen=True)
class Pinned:
    """`num_bytes` are held of what is on the device, in `pinned_bytes`. No block is
    split, and each is rounded up to a power of two (aten/src/ATen/core/CachingHostAllocator.h;
    issue 150517 of pytorch/pytorch)."""

    num_bytes: int = 0
    pinned_bytes: int = 0


def pinned_memory(ledger: Ledger) -> Pinned:
    """Of the forward that moves most. All of it is on the host at once, when that forward ends."""
    moved = [
        [op.num_bytes for _, op in run if op.name == TO_HOST]
        for phase, run in groupby(ledger.operations(), itemgetter(0))
        if phase == "forward"
    ]
    most = max(moved, key=sum, default=[])
    return _pinned(most)


def pinned_by_optimizer(ledger: Ledger) -> Pinned:
    """Of an optimizer on the host: a copy of each weight that it updates, and of its gradient."""
    weights = [op.num_bytes for _, op in ledger.operations() if op.name == WEIGHT_TO_DEVICE]
    return _pinned(2 * weights)


def leaving_bytes(ledger: Ledger) -> int:
    """Of gradients on their way to the host, whose memory is used again only once they are there:
    where memory is plentiful torch may reserve as much more."""
    return sum(op.num_bytes for _, op in ledger.operations() if op.name == GRADIENT_TO_HOST)


def _pinned(sizes: list[int]) -> Pinned:
    return Pinned(sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size))
