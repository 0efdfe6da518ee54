"""What CUDA kernels ask for beside their results, written down where a trace meets them.

A fake kernel allocates its results and nothing else. `FOLLOWED` has, by operation, what CUDA's does
in order: results noted as they come to life, scratch taken and given back between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from planner.step.attention import BLOCK_ROWS, backward_scratch
from planner.step.reductions import reduction_of
from planner.trace.attention import HALF

aten = torch.ops.aten


class Taker(Protocol):
    """The recorder, as an operation sees it."""

    def took(self, law: str, sizes: tuple[int, ...]) -> int:
        """Scratch; its number."""

    def gave_back(self, number: int) -> None: ...

    def take(self, num_bytes: int) -> Tensor:
        """Scratch that no device changes, for as long as the tensor lives."""

    def made(self, result: Tensor | None) -> None:
        """A result came to life."""

    def tried_convolution(self, *key: object) -> None: ...


Follow = Callable[[Taker, tuple[Any, ...], Any], None]


@contextmanager
def _held(taker: Taker, law: str, *sizes: int) -> Iterator[None]:
    number = taker.took(law, sizes)
    yield
    taker.gave_back(number)


@contextmanager
def _copied(
    taker: Taker, tensor: Tensor | None, is_needed: bool, itemsize: int = 0
) -> Iterator[None]:
    """A copy of a tensor, where one `is_needed`; in its own dtype, or in one of `itemsize`."""
    if tensor is None or not is_needed:
        yield
        return
    with _held(taker, "bytes", tensor.numel() * (itemsize or tensor.itemsize)):
        yield


@contextmanager
def _contiguous(taker: Taker, *tensors: Tensor) -> Iterator[None]:
    """Contiguous copies of those that are not, until the kernel returns."""
    with ExitStack() as stack:
        for tensor in tensors:
            stack.enter_context(_copied(taker, tensor, not tensor.is_contiguous()))
        yield


def _reduce(taker: Taker, x: Tensor, dims: Sequence[int], of: str = "") -> None:
    """The partial sums of blocks that share an output, and their semaphores."""
    found = reduction_of(x.shape, x.stride(), {d % x.dim() for d in dims} if x.dim() else ())
    if found is not None:
        _take_sums(taker, of, found)


def _take_sums(taker: Taker, of: str, sizes: tuple[int, ...]) -> None:
    with _held(taker, f"{of}reduction", *sizes), _held(taker, f"{of}semaphores", *sizes):
        pass


def _follow_sum(place: int | None) -> Follow:
    """Of an operation whose argument at `place` says which dimensions are summed; all, if none."""

    def follow(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
        taker.made(result)
        x: Tensor = args[0]
        dims = args[place] if place is not None and len(args) > place else None
        dims = [dims] if isinstance(dims, int) else dims
        is_half = x.dtype in HALF and result.dtype == torch.float32
        is_cast = result.dtype != x.dtype and not is_half  # ReduceOpsUtils.h
        with _copied(taker, x, is_cast, result.itemsize):
            of = "integer_" if result.dtype == torch.int64 else ""
            _reduce(taker, x, dims or range(x.dim()), of)

    return follow


def _follow_layer_norm(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    x: Tensor = args[0]
    with _copied(taker, x, not x.is_contiguous()):
        for tensor in result:
            taker.made(tensor)


def _follow_layer_norm_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """As `planner.step.normalization` has it."""
    grad, x, shape = args[:3]
    columns = torch.Size(shape).numel()
    sizes = (x.numel() // columns, columns)
    wanted = [tensor for tensor in result[1:] if tensor is not None]
    with _copied(taker, x, not x.is_contiguous()):
        for tensor in (result[0], *wanted):
            taker.made(tensor)
        with _copied(taker, grad, not grad.is_contiguous()):
            parts = [taker.took("norm_parts", (*sizes, x.itemsize)) for _ in wanted]
            for _ in wanted:
                with _held(taker, "norm_replaced", *sizes, x.itemsize):
                    _take_sums(taker, "norm_", sizes)
            for part in reversed(parts):
                taker.gave_back(part)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without overlap, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _in_order(x: Tensor, memory_format: torch.memory_format) -> bool:
    return x.is_contiguous(memory_format=memory_format)


def _follow_convolution(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    x, weight = args[:2]
    wanted = format_of(x, weight)
    with _copied(taker, x, not _in_order(x, wanted)):
        taker.made(result)
        if not (_is_depthwise_3d(args) or _is_depthwise_2d(x, weight, args[8], wanted)):
            taker.tried_convolution("forward", *_key(args[:2]), str(args[3:]))
        with _copied(taker, weight, not _in_order(weight, wanted)):
            pass


def _follow_convolution_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """cuDNN is given copies of what is not in its format: the input for the weight's gradient
    (ATen/native/Convolution.cpp); the gradient once where its strides suggest another format, or
    where the convolution is transposed, else for either result (ATen/native/cudnn/ConvShared.cpp).
    """
    grad, x, weight = args[:3]
    if _is_depthwise_3d(args[1:]):
        for tensor in result[:2]:
            taker.made(tensor)
        with _contiguous(taker, grad, x, weight):
            _make_bias_gradient(taker, grad, result[2])
        return
    wanted = format_of(x, weight)
    if _is_depthwise_2d(x, weight, args[9], wanted):
        with _contiguous(taker, grad):
            with _contiguous(taker, x):
                taker.made(result[1])
            with _contiguous(taker, weight):
                taker.made(result[0])
        _make_bias_gradient(taker, grad, result[2])
        return
    is_in_order, is_transposed = _in_order(grad, wanted), args[7]
    is_other = suggest_memory_format(grad) != wanted or (is_transposed and not is_in_order)
    is_apart = not is_other and not is_in_order
    with (
        _copied(taker, x, result[1] is not None and not _in_order(x, wanted)),
        _copied(taker, grad, is_other),
    ):
        for place in (0, 1):
            if result[place] is None:
                continue
            with _copied(taker, grad, is_apart and place == 1):
                taker.made(result[place])
                taker.tried_convolution(place, *_key(args[:3]), str(args[4:]))
            if place == 0:
                with (
                    _copied(taker, weight, not _in_order(weight, wanted)),
                    _copied(taker, grad, is_apart),
                ):
                    pass
    _make_bias_gradient(taker, grad, result[2])


def _make_bias_gradient(taker: Taker, grad: Tensor, made: Tensor | None) -> None:
    if made is not None:
        taker.made(made)
        _reduce(taker, grad, [d for d in range(grad.dim()) if d != 1])


def _is_depthwise_3d(args: tuple[Any, ...]) -> bool:
    """Of a convolution's arguments: torch's own kernel, not cuDNN's (cuda/DepthwiseConv3d.cu)."""
    x, weight, transposed, groups = *args[:2], args[6], args[8]
    is_by_channel = groups == x.shape[1] > 1 and weight.shape[0] % groups == 0 and not transposed
    return x.dim() == 5 and is_by_channel and format_of(x, weight) is torch.contiguous_format


def format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    """That in which cuDNN is given tensors (`cudnn_conv_suggest_memory_format`)."""
    found: torch.memory_format = suggest_memory_format(x)
    return suggest_memory_format(weight) if found == torch.contiguous_format else found


def _is_by_cudnn(x: Tensor, weight: Tensor | None) -> bool:
    """Of batch norm (`_select_batch_norm_backend` in Normalization.cpp)."""
    return weight is not None and x.dtype != torch.bfloat16 and x.dim() > 2


def _sums_rows(x: Tensor, weight: Tensor | None) -> bool:
    """Whether torch normalizes, and not cuDNN, channels that are next to each other
    (batch_norm_use_channels_last_kernels)."""
    if _is_by_cudnn(x, weight):
        return False
    last = (torch.channels_last, torch.channels_last_3d)
    return (x.is_contiguous() and x.stride(1) == 1) or any(
        x.dim() == dims and _in_order(x, form) for dims, form in zip((4, 5), last, strict=True)
    )


def _sum_rows(taker: Taker, x: Tensor, each: int) -> None:
    sizes = (x.numel() // x.shape[1], x.shape[1])
    with (
        _held(taker, "batch_norm_parts", *sizes, each),
        _held(taker, "batch_norm_semaphores", *sizes),
    ):
        pass


def _follow_batch_norm(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    for tensor in result:
        taker.made(tensor)
    if args[5] and _sums_rows(*args[:2]):
        _sum_rows(taker, args[0], 4)


def _follow_batch_norm_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Two sums a channel, and what they are added up in, where channels are next to each other
    (ATen/native/cuda/Normalization.cuh); cuDNN is given the gradient in the input's format."""
    grad, x, weight = args[:3]
    if not args[7] or not _sums_rows(x, weight):
        is_by_cudnn = args[7] and _is_by_cudnn(x, weight)
        is_other = is_by_cudnn and not _in_order(grad, suggest_memory_format(x))
        with _copied(taker, grad, is_other):
            for tensor in result:
                taker.made(tensor)
        return
    with _held(taker, "bytes", 4 * x.shape[1]), _held(taker, "bytes", 4 * x.shape[1]):
        for tensor in result[1:]:
            taker.made(tensor)
        _sum_rows(taker, x, 2)
        taker.made(result[0])


def _follow_group_norm(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """A factor and a summand for each channel of an image (cuda/group_norm_kernel.cu)."""
    x, weight, _, images, channels, pixels = args[:6]
    for tensor in result:
        taker.made(tensor)
    num_bytes = 4 * images * channels
    with _copied(taker, x, not x.is_contiguous()):
        if pixels > 1 and weight is not None:
            with _held(taker, "bytes", num_bytes), _held(taker, "bytes", num_bytes):
                pass


def _follow_group_norm_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Sums for each channel of an image, and factors for each and for each group of them."""
    (grad, x), (images, channels, pixels, groups) = args[:2], args[5:9]
    with (
        _copied(taker, grad, not grad.is_contiguous()),
        _copied(taker, x, not x.is_contiguous()),
    ):
        for tensor in result:
            taker.made(tensor)
        if pixels == 1:
            return
        sizes = [channels, channels, groups, groups, channels]
        held = [taker.took("bytes", (4 * images * size,)) for size in sizes]
        for number in reversed(held):
            taker.gave_back(number)


def _is_depthwise_2d(x: Tensor, weight: Tensor, groups: int, wanted: torch.memory_format) -> bool:
    """As in three dimensions, but the weight's gradient is first (`use_cudnn_depthwise`; in fp16
    cuDNN may take some of them)."""
    is_depthwise = 1 < groups == x.shape[1] and x.dim() == 4 and weight.shape[1] == 1
    return is_depthwise and wanted == torch.contiguous_format and x.dtype != torch.float16


def _key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)


@contextmanager
def _in_format(taker: Taker, like: Tensor, *tensors: Tensor) -> Iterator[None]:
    """Copies in the memory format of `like` of those that lie in another."""
    wanted = format_of(like, like)
    with ExitStack() as stack:
        for tensor in tensors:
            stack.enter_context(_copied(taker, tensor, not _in_order(tensor, wanted)))
        yield


def _follow_max_pool(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    for tensor in result:
        taker.made(tensor)
    with _in_format(taker, args[0], args[0]):
        pass


def _follow_max_pool_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    taker.made(result)
    grad, x = args[:2]
    with _in_format(taker, x, *((x, grad) if x.dim() == 4 else (grad,))):
        pass


def _follow_dropout(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """The mask comes first (cuda/Dropout.cu)."""
    taker.made(result[1])
    taker.made(result[0])


def _follow_embedding(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Rows are selected by indices in one row (ATen/native/Embedding.cpp)."""
    with _copied(taker, args[1], args[1].dim() != 1 and not args[1].is_contiguous()):
        taker.made(result)


def _follow_embedding_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """As `planner.memory.scratch` has it, where there are many indices."""
    grad, indices, rows = args[:3]
    count, itemsize = indices.numel(), indices.itemsize
    of_each = ("many_indices", count, itemsize)
    with _contiguous(taker, indices, grad), ExitStack() as stack:

        def hold(law: str, *sizes: int) -> None:
            stack.enter_context(_held(taker, law, *sizes))

        hold(*of_each)  # sorted
        hold(*of_each)  # where each was
        with _held(taker, *of_each), _held(taker, "many_sorted", count, rows + 1):
            pass
        taker.made(result)
        hold(*of_each)  # where the rows of one index begin
        hold("many_segments", count, 1, 8)  # their number
        with _held(taker, *of_each), _held(taker, "many_unique", count):
            pass
        for _ in range(2):  # parts of each, and parts before it
            hold("many_segments", count, rows, itemsize)
        with _held(taker, "many_scanned", count, rows):
            pass
        hold("many_segments", count, 1, 8)
        hold("many_parts", count, rows, itemsize)
        hold("many_parts", count, rows, 4 * grad.shape[-1])


def _follow_index_put(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """With accumulation indices are sorted (cuda/Indexing.cu, index_put_with_sort_kernel); those of
    dimensions apart from each other are not followed."""
    taker.made(result)
    table, indices, values = args[:3]
    places = [place for place, index in enumerate(indices) if index is not None]
    if len(args) < 4 or not args[3] or len(places) <= places[-1] - places[0]:
        return
    count = torch.broadcast_shapes(*(indices[place].shape for place in places)).numel()
    num_bytes = 8 * count
    raw = taker.took("bytes", (num_bytes,))
    with _held(taker, "bytes", num_bytes):
        taker.gave_back(raw)
        for _ in places[1:]:
            raw = taker.took("bytes", (num_bytes,))
            with _held(taker, "bytes", num_bytes):
                taker.gave_back(raw)
        with _copied(taker, values, not values.is_contiguous()):
            held = [taker.took("bytes", (num_bytes,)) for _ in range(3)]
            rows = table.shape[: places[-1] + 1].numel()
            held.append(taker.took("sort", (count, rows)))
            for number in reversed(held):
                taker.gave_back(number)


def _follow_roll(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """One dimension at a time, each of what the last gave, and all live to the end
    (cuda/TensorTransformations.cu, TensorTransformations.h)."""
    x, dims = args[0], args[2] if len(args) > 2 else ()
    with ExitStack() as stack:
        for index in range(max(1, len(dims))):
            with _copied(taker, x, index == 0 and not x.is_contiguous()):
                if index < len(dims) - 1:
                    stack.enter_context(_copied(taker, x, True))
                else:
                    taker.made(result)


def _follow_resized(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Of a result that begins as large as the input (cuda/Im2Col.cu, Col2Im.cu)."""
    x: Tensor = args[0]
    grows = result.numel() > x.numel()
    with _copied(taker, x, grows):
        if not grows:
            taker.made(result)
        with _contiguous(taker, x):
            taker.made(result)


def _follow_loss(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """The loss of each element, then their mean or sum (ATen/native/Loss.cpp)."""
    x: Tensor = args[0]
    taker.made(result)
    if len(args) < 3 or args[2]:
        with _held(taker, "bytes", x.numel() * result.itemsize):
            _reduce(taker, x, range(x.dim()))


def _follow_softmax(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    taker.made(result)
    with _contiguous(taker, args[0]):
        pass


def _follow_softmax_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """The product of gradient and result, which has the gradient's order of dimensions, and a copy
    of it where this is another (cuda/SoftMax.cu)."""
    grad: Tensor = args[0]
    taker.made(result)
    is_other = not grad.is_contiguous() and is_dense(grad)
    with _copied(taker, args[1], True), _copied(taker, args[1], is_other):
        pass


# In 16 bits results of heads above this are added up in fp32 (cuda/mem_eff_attention,
# kNeedsOutputAccumulatorBuffer).
_ACCUMULATED = 128


def _follow_efficient_attention(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Seed and offset come first, where they are on the device
    (aten/src/ATen/native/transformers/cuda/attention.cu, _efficient_attention_forward)."""
    query, value = args[0], args[2]
    for tensor in (*result[2:4], *result[:2]):
        taker.made(tensor)
    widest = max(query.shape[3], value.shape[3])
    if query.itemsize < 4 and widest > _ACCUMULATED:
        with _held(taker, "bytes", 4 * result[0].numel()):
            pass


# The tiles of flash attention (torch's flash_api.cpp): queries by 128, channels of a head by 32 up
# to 192, else 256.
_FLASH_ROWS, _FLASH_CHANNELS, _FLASH_WIDE = 128, 32, 192
_RANDOM_STATE = 16  # bytes: seed and offset, while it draws


def _flash_width(channels: int) -> int:
    return -(-channels // _FLASH_CHANNELS) * _FLASH_CHANNELS if channels <= _FLASH_WIDE else 256


def _follow_flash(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Where few blocks of queries leave processors idle, keys are split (mha_fwd): each part has
    sums and results of its own, in fp32, before seed and offset."""
    query, key, dropout = args[0], args[1], args[3] if len(args) > 3 else 0.0
    for tensor in result[:2]:
        taker.made(tensor)
    random = [t for t in result[2:] if isinstance(t, Tensor) and t.device == query.device]
    if dropout:
        for tensor in random:
            taker.made(tensor)
        with _held(taker, "bytes", _RANDOM_STATE):
            return
    batch, heads, rows, channels = query.shape
    sizes = (batch * heads, rows, key.shape[2], channels)
    with (
        _held(taker, "flash_split", *sizes, 1),
        _held(taker, "flash_split", *sizes, _flash_width(channels)),
    ):
        for tensor in random:
            taker.made(tensor)


def _follow_flash_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """Contiguous copies of gradient and result, row sums of their product, the queries' gradient in
    fp32, and gradients of keys and values for each head of queries, where there are fewer."""
    grad, query, _, _, out = args[:5]
    with ExitStack() as stack:
        for tensor in (grad, out):
            stack.enter_context(_copied(taker, tensor, not tensor.transpose(1, 2).is_contiguous()))
        for tensor in result:
            taker.made(tensor)
        batch, heads, rows, channels = query.shape
        rows = 4 * batch * heads * -(-rows // _FLASH_ROWS) * _FLASH_ROWS
        stack.enter_context(_held(taker, "bytes", rows))
        stack.enter_context(_held(taker, "bytes", rows * _flash_width(channels)))
        _hold_expanded(stack, taker, query, result[1:3])


def _hold_expanded(
    stack: ExitStack, taker: Taker, query: Tensor, gradients: Sequence[Tensor | None]
) -> None:
    """Gradients as for as many heads as the queries have, where keys and values have fewer."""
    for gradient in gradients:
        if gradient is not None and gradient.shape[1] != query.shape[1]:
            num_bytes = gradient.numel() // gradient.shape[1] * query.shape[1] * gradient.itemsize
            stack.enter_context(_held(taker, "bytes", num_bytes))


def _follow_efficient_backward(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """As `planner.step.attention` has it, for any heads and channels."""
    grad, query, key, value = args[:4]
    (batch, heads, rows, channels), widest = query.shape, max(query.shape[3], value.shape[3])
    is_half = query.dtype != torch.float32
    scratch = backward_scratch((batch, heads, rows, value.shape[3]), is_half)
    with ExitStack() as stack:
        stack.enter_context(_copied(taker, grad, not grad.transpose(1, 2).is_contiguous()))
        for tensor in result:
            taker.made(tensor)
        _hold_expanded(stack, taker, query, result[1:3])
        made = [taker.take(num_bytes) for num_bytes in scratch[:2] if num_bytes]
        delta = taker.take(scratch.delta)
        del made
        if widest <= BLOCK_ROWS:
            workspace = taker.take(scratch.workspace)
            del delta, workspace
            return
        sizes = (batch * heads, rows, key.shape[2], channels, value.shape[3], query.itemsize)
        with _held(taker, "attention_blocks", *sizes):
            pass


def _follow_safe_softmax(taker: Taker, args: tuple[Any, ...], result: Any) -> None:
    """What is -inf, which rows are nothing else, and a scalar (ATen/native/SoftMax.cpp)."""
    x, dim = args[:2]
    taker.made(result)
    rows = x.numel() // max(1, x.shape[dim])
    with _held(taker, "bytes", x.numel()), _held(taker, "bytes", rows), _held(taker, "bytes", 4):
        pass


FOLLOWED: dict[Any, Follow] = {
    aten._scaled_dot_product_efficient_attention.default: _follow_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: _follow_efficient_backward,
    aten._scaled_dot_product_flash_attention.default: _follow_flash,
    aten._scaled_dot_product_flash_attention_backward.default: _follow_flash_backward,
    aten._safe_softmax.default: _follow_safe_softmax,
    aten.native_dropout.default: _follow_dropout,
    aten.embedding.default: _follow_embedding,
    aten.embedding_dense_backward.default: _follow_embedding_backward,
    aten.max_pool2d_with_indices.default: _follow_max_pool,
    aten.max_pool2d_with_indices_backward.default: _follow_max_pool_backward,
    aten.max_pool3d_with_indices.default: _follow_max_pool,
    aten.max_pool3d_with_indices_backward.default: _follow_max_pool_backward,
    aten.sum.default: _follow_sum(None),
    aten.sum.dim_IntList: _follow_sum(1),
    aten.mean.default: _follow_sum(None),
    aten.mean.dim: _follow_sum(1),
    aten.linalg_vector_norm.default: _follow_sum(2),
    aten.native_layer_norm.default: _follow_layer_norm,
    aten.native_layer_norm_backward.default: _follow_layer_norm_backward,
    aten.native_batch_norm.default: _follow_batch_norm,
    aten.native_batch_norm_backward.default: _follow_batch_norm_backward,
    aten.native_group_norm.default: _follow_group_norm,
    aten.native_group_norm_backward.default: _follow_group_norm_backward,
    aten.convolution.default: _follow_convolution,
    aten.convolution_backward.default: _follow_convolution_backward,
    aten.roll.default: _follow_roll,
    aten.im2col.default: _follow_resized,
    aten.col2im.default: _follow_resized,
    aten.mse_loss.default: _follow_loss,
    aten.smooth_l1_loss.default: _follow_loss,
    aten._softmax.default: _follow_softmax,
    aten._log_softmax.default: _follow_softmax,
    aten._softmax_backward_data.default: _follow_softmax_backward,
    aten.index_put.default: _follow_index_put,
    aten.index_put_.default: _follow_index_put,
}
