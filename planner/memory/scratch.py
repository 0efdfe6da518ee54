"""The memory of a step beside its tensors: the scratch that CUDA kernels request from the caching
allocator, by device; the workspaces of convolutions; and the pinned memory of the host.

A ledger names the law of a scratch and its sizes (`planner.ledger.ledger.Scratch`); `size_scratch`
fills in the bytes. The laws are quoted from ATen's launches (torch 2.13 and 2.15) and from CUB, and
tests hold them to the requests of torch's own CUDA code (tests/memory/test_scratch.py). A law is a
function of the device and the sizes; `LAWS` names them all.
"""

import os
from collections.abc import Callable, Mapping
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
    tile = next(size for capability, size in _SORT_TILES if device.capability >= capability)
    passes = _ceil_div((rows - 1).bit_length(), 8)
    parts = [8 * _DIGITS * passes, 4 * _DIGITS * _ceil_div(keys, tile), 4 * passes]
    parts += [8 * keys] * 2 if passes > 1 else []
    return _SORT_UNIT - 1 + sum(_ceil_div(part, _SORT_UNIT) * _SORT_UNIT for part in parts)


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
    "sort": _sort,
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
