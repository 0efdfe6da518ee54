"""How PyTorch lays tensors out: shapes, strides in elements, and when a view needs no copy."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

Shape = tuple[int, ...]
NUM_CACHED = 1 << 10  # answers: a step has few shapes, and many tensors of each


@lru_cache(NUM_CACHED)
def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides of `shape`: `torch.empty(shape).stride()`."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: Shape) -> Shape:
    """Strides of [B, C, H, W] laid out as [B, H, W, C]; row-major for any other rank."""
    if len(shape) != 4:
        return contiguous_strides(shape)
    _, channels, height, width = shape
    return (channels * height * width, 1, width * channels, channels)


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """`tensor.is_contiguous()`: row-major, dimensions of size 1 excused."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@lru_cache(NUM_CACHED)
def is_dense(shape: Shape, strides: Shape) -> bool:
    """`is_non_overlapping_and_dense()`: some permutation of the dimensions is row-major."""
    expected = 1
    for stride, size in sorted((st, s) for st, s in zip(strides, shape, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def preserved_strides(shape: Shape, strides: Shape) -> Shape:
    """Strides of `empty_like(tensor)`: the tensor's if dense, or else dense in the same order."""
    if is_dense(shape, strides):
        return strides
    return elementwise_strides(shape, [(shape, strides)])


def elementwise_strides(shape: Shape, operands: Sequence[tuple[Shape, Shape]]) -> Shape:
    """Strides of a new output of an elementwise operation (TensorIterator's rule).

    `operands` are the (shape, strides) of the inputs, broadcast to `shape`. The output is dense and
    its dimensions are ordered as the inputs' strides order them, ties going to the first input.
    """
    same = [(s, st) for s, st in operands if s == shape]
    if len(same) == len(operands):
        if all(is_contiguous(s, st) for s, st in operands):
            return contiguous_strides(shape)
        first = operands[0][1]
        if all(st == first for _, st in operands) and is_dense(shape, first):
            return first
    if not shape:
        return ()
    aligned = [_broadcast_strides(shape, s, st) for s, st in operands]
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        position = i
        for j in range(i - 1, -1, -1):
            verdict = _compare(shape, aligned, order[j], order[position])
            if verdict > 0:
                order[j], order[position] = order[position], order[j]
                position = j
            elif verdict < 0:
                break
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _broadcast_strides(shape: Shape, source: Shape, strides: Shape) -> Shape:
    lead = len(shape) - len(source)
    return (0,) * lead + tuple(
        0 if size == 1 and shape[lead + i] != 1 else strides[i] for i, size in enumerate(source)
    )


def _compare(shape: Shape, operands: Sequence[Shape], inner: int, outer: int) -> int:
    """1 if dimension `inner` belongs outside dimension `outer`, -1 if inside, 0 if undecided."""
    for strides in operands:
        a, b = strides[inner], strides[outer]
        if a == 0 or b == 0:
            continue
        if a < b:
            return -1
        if a > b:
            return 1
        if shape[inner] > shape[outer]:
            return 1
    return 0


@lru_cache(NUM_CACHED)
def view_strides(shape: Shape, strides: Shape, target: Shape) -> Shape | None:
    """Strides of `tensor.view(target)`, or None where only a copy has that shape."""
    if not shape:
        return (1,) * len(target)
    if 0 in shape:
        return contiguous_strides(target)
    result = [0] * len(target)
    view_dim = len(target) - 1
    chunk_base = strides[-1]
    tensor_numel = view_numel = 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        ends_chunk = dim == 0 or (
            shape[dim - 1] != 1 and strides[dim - 1] != tensor_numel * chunk_base
        )
        if not ends_chunk:
            continue
        while view_dim >= 0 and (view_numel < tensor_numel or target[view_dim] == 1):
            result[view_dim] = view_numel * chunk_base
            view_numel *= target[view_dim]
            view_dim -= 1
        if view_numel != tensor_numel:
            return None
        if dim > 0:
            chunk_base = strides[dim - 1]
            tensor_numel = view_numel = 1
    return tuple(result) if view_dim == -1 else None


def resolve_shape(numel: int, shape: Sequence[int]) -> Shape:
    """A shape with its one -1 replaced, as `view` and `reshape` take it."""
    if -1 not in shape:
        return tuple(shape)
    rest = prod(size for size in shape if size != -1)
    return tuple(numel // rest if size == -1 else size for size in shape)


def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    """The shape that two operands broadcast to."""
    if a == b:
        return a
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    tail = tuple(x if y == 1 else y for x, y in zip(a[lead:], b, strict=True))
    return a[:lead] + tail
