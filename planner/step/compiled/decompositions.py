"""What each watched operation becomes in AOTAutograd's graph under Inductor's decompositions.

One rule for one function of `planner.step`; the nodes and their order are those of torch 2.13
(torch/_decomp/decompositions.py, torch/_refs, torch/_inductor/decomposition.py). Opaque rules
stand for all that their function calls; the others come after what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from planner.step import (
    attention,
    autograd,
    masks,
    matmul,
    normalization,
    pointwise,
    pooling,
    slices,
    views,
)
from planner.step.compiled.graph import Value
from planner.step.compiled.recording import Locals, Rule, Tracer
from planner.step.strides import Shape, is_contiguous
from planner.step.tensor import Tensor

_REGIONS = 9  # of a shifted map: three along each side
_LOW = ("bfloat16", "float16")
RULES: dict[CodeType, tuple[Rule, bool]] = {}


def _rule(function: Any, opaque: bool = True) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[function.__code__] = (rule, opaque)
        return rule

    return register


def _pointwise(
    tracer: Tracer, op: str, *inputs: Value, shape: Shape | None = None, dtype: str = "",
    constant: object = None,
) -> Value:  # fmt: skip
    """An elementwise node, by default of its first input's shape and dtype."""
    shape = inputs[0].shape if shape is None else shape
    return tracer.add(op, inputs, shape, dtype or inputs[0].dtype, constant)


def _convert(tracer: Tracer, x: Value, dtype: str) -> Value:
    if x.dtype == dtype:
        return x
    return _pointwise(tracer, "convert_element_type", x, dtype=dtype, constant=dtype)


def _full(tracer: Tracer, shape: Shape, dtype: str) -> Value:
    return tracer.add("full", (), shape, dtype, "zero")


def _reduced(shape: Shape | None) -> Shape:
    assert shape is not None
    return (*shape[:-1], 1)


def _wide(dtype: str) -> str:
    """The dtype that a decomposition computes in (`elementwise_dtypes`' opmath)."""
    return "float32" if dtype in _LOW else dtype


@_rule(pointwise.unary)
def _unary(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x, op = tracer.value(early["x"]), early["label"].removeprefix("aten.")
    if op == "gelu":
        tracer.bind(result, _gelu(tracer, x))
        return
    tracer.bind(result, _pointwise(tracer, op, x, dtype=result.dtype, constant="number"))


def _gelu(tracer: Tracer, x: Value) -> Value:
    wide = _convert(tracer, x, _wide(x.dtype))
    half = _pointwise(tracer, "mul", wide, constant="half")
    erf_and_one = _erf_and_one(tracer, wide)
    return _convert(tracer, _pointwise(tracer, "mul", half, erf_and_one), x.dtype)


def _erf_and_one(tracer: Tracer, x: Value) -> Value:
    scaled = _pointwise(tracer, "mul", x, constant="sqrt half")
    return _pointwise(tracer, "add", _pointwise(tracer, "erf", scaled), constant="one")


def _gelu_backward(tracer: Tracer, grad: Value, x: Value) -> Value:
    wide_grad, wide = _convert(tracer, grad, _wide(x.dtype)), _convert(tracer, x, _wide(x.dtype))
    cdf = _pointwise(tracer, "mul", _erf_and_one(tracer, wide), constant="half")
    square = _pointwise(tracer, "mul", wide, wide)
    power = _pointwise(tracer, "exp", _pointwise(tracer, "mul", square, constant="minus half"))
    density = _pointwise(tracer, "mul", power, constant="density")
    slope = _pointwise(tracer, "add", cdf, _pointwise(tracer, "mul", wide, density))
    return _convert(tracer, _pointwise(tracer, "mul", wide_grad, slope), x.dtype)


def _threshold_backward(tracer: Tracer, grad: Value, result: Value) -> Value:
    mask = _pointwise(tracer, "le", result, dtype="bool")
    return _pointwise(tracer, "where", mask, _full(tracer, (), grad.dtype), grad, dtype=grad.dtype)


def _sigmoid_backward(tracer: Tracer, grad: Value, result: Value) -> Value:
    wide_grad = _convert(tracer, grad, _wide(grad.dtype))
    wide = _convert(tracer, result, _wide(result.dtype))
    slope = _pointwise(tracer, "mul", wide, _pointwise(tracer, "sub", wide, constant="one minus"))
    return _convert(tracer, _pointwise(tracer, "mul", wide_grad, slope), grad.dtype)


_BACKWARDS = {
    "aten.gelu_backward": _gelu_backward,
    "aten.threshold_backward": _threshold_backward,
    "aten.sigmoid_backward": _sigmoid_backward,
}


@_rule(pointwise.binary)
def _binary(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    a, b, label = tracer.value(early["a"]), tracer.value(early["b"]), early["label"]
    if label in _BACKWARDS:
        tracer.bind(result, _BACKWARDS[label](tracer, a, b))
        return
    op = label.removeprefix("aten.")
    tracer.bind(result, _pointwise(tracer, op, a, b, shape=result.shape, dtype=result.dtype))


@_rule(pointwise.to_dtype, opaque=False)
def _to_dtype(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    if result is not early["x"]:
        x = tracer.value(early["x"])
        tracer.bind(result, _convert(tracer, x, result.dtype))


@_rule(pointwise.clone)
def _clone(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = early["x"]
    value = tracer.value(x)
    if x.strides != result.strides:  # else `remove_noop_ops` takes it away
        value = _pointwise(tracer, "clone", value, constant=result.strides)
    tracer.bind(result, value)


@_rule(pointwise.relu_)
def _relu_(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    """Functionalised: what was rewritten is the tensor that x is a view of, x a view of that."""
    x = tracer.value(result)
    y = _pointwise(tracer, "relu", x)
    if x.op == "view":
        base = tracer.add("view", (y,), x.inputs[0].shape, x.dtype)
        y = tracer.add("view", (base,), x.shape, x.dtype)
    tracer.bind(result, y)


@_rule(pointwise._copy_slices_backward)
def _relu_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    node, grad = early["node"], tracer.value(early["grads"][0])
    y = tracer.value(node.saved[0].packed)
    if y.op == "view":
        y = tracer.add("view", y.inputs, y.shape, y.dtype)
    part = tracer.add("view", (grad,), node.data, grad.dtype)
    to_part = _threshold_backward(tracer, part, y)
    tracer.bind(result[0], tracer.add("view", (to_part,), result[0].shape, grad.dtype))


@_rule(pointwise.as_strided_backward)
@_rule(pointwise._viewed_backward)
def _viewed_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    grad = tracer.value(early["grads"][0])
    tracer.bind(result[0], tracer.add("view", (grad,), result[0].shape, grad.dtype))


@_rule(pointwise.sum_to)
def _sum_to(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = early["x"]
    if result is not x:
        value = _sum(tracer, tracer.value(x), result.shape, ("to", result.shape))
        tracer.bind(result, value)


def _sum(tracer: Tracer, x: Value, shape: Shape, constant: object) -> Value:
    """Low precision is summed in fp32."""
    total = tracer.add("sum", (x,), shape, _wide(x.dtype), constant)
    return _convert(tracer, total, x.dtype)


@_rule(pointwise.reduce_sum)
def _reduce_sum(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x, dims = tracer.value(early["x"]), (tuple(early["dims"]), early["keepdim"])
    if early["label"] == "aten.sum":
        tracer.bind(result, _sum(tracer, x, result.shape, dims))
    else:
        op = early["label"].removeprefix("aten.")
        tracer.bind(result, tracer.add(op, (x,), result.shape, x.dtype, dims))


@_rule(pointwise._expand_reduced)
def _expand_reduced(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    grad = tracer.value(early["grad"])
    kept = tuple(1 if stride == 0 else size for size, stride in
                 zip(result.shape, result.strides, strict=True))  # fmt: skip
    if not early["keepdim"]:
        grad = tracer.add("unsqueeze", (grad,), kept, grad.dtype)
    tracer.bind(result, tracer.add("expand", (grad,), result.shape, grad.dtype))


@_rule(pointwise.dropout, opaque=False)
def _dropout(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    """`native_dropout`, its random numbers Inductor's own. The mask is what backward needs."""
    if result is early["x"]:
        return
    x = tracer.value(early["x"])
    noise = _random(tracer, x.shape or (), x.dtype)
    mask = _pointwise(tracer, "gt", noise, dtype="bool")
    kept = _pointwise(tracer, "mul", mask, x, dtype=x.dtype)
    tracer.bind(result, _pointwise(tracer, "mul", kept, constant="number"))
    tracer.bind(late["mask"], mask)


def _random(tracer: Tracer, shape: Shape, dtype: str) -> Value:
    seeds = tracer.add("inductor_seeds", (), (1,), "int64")
    seed = tracer.add("inductor_lookup_seed", (seeds,), (), "int64", tracer.count("seeds"))
    return tracer.add("inductor_random", (seed,), shape, dtype)


@_rule(pointwise._dropout_backward)
def _dropout_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    mask, grad = tracer.value(early["node"].saved[0].packed), tracer.value(early["grads"][0])
    scaled = _pointwise(tracer, "mul", _convert(tracer, mask, grad.dtype), constant="number")
    tracer.bind(result[0], _pointwise(tracer, "mul", grad, scaled))


@_rule(pointwise.new_empty)
def _new_empty(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    """Filled in place right after: with Bernoulli's numbers, divided by their mean, by default."""
    label = early["label"]
    if label == "aten.rand":
        value = _random(tracer, result.shape, result.dtype)
    elif label == "aten.new_zeros":
        value = _filled_by_regions(tracer, result.shape, result.dtype)
    elif label:
        value = _full(tracer, result.shape, result.dtype)
    else:
        fresh = tracer.add("empty", (), result.shape, result.dtype)
        value = _pointwise(tracer, "div", _pointwise(tracer, "bernoulli", fresh), constant="rate")
    tracer.bind(result, value)


def _filled_by_regions(tracer: Tracer, shape: Shape, dtype: str) -> Value:
    """`img_mask[rows, columns] = number` for the regions of a shifted map, functionalised."""
    mask = _full(tracer, shape, dtype)
    for region in range(_REGIONS):
        # The extents of the regions do not matter: the mask is as large whatever they are.
        rows = tracer.add("slice", (mask,), shape, dtype, ("rows", region))
        part = tracer.add("slice", (rows,), shape, dtype, ("columns", region))
        number = tracer.add("full", (), (), dtype, region or "zero")
        copied = tracer.add("copy", (part, number), shape, dtype)
        rows = tracer.add("slice_scatter", (rows, copied), shape, dtype, ("columns", region))
        mask = tracer.add("slice_scatter", (mask, rows), shape, dtype, ("rows", region))
    return mask


@_rule(pointwise._clamp_backward)
def _clamp_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    x = tracer.value(early["node"].saved[0].packed)
    grad = tracer.value(early["grads"][0])
    mask = _pointwise(tracer, "ge", x, dtype="bool")
    zero = _full(tracer, (), grad.dtype)
    tracer.bind(result[0], _pointwise(tracer, "where", mask, grad, zero, dtype=grad.dtype))


@_rule(masks.masked_fill)
def _masked_fill(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x, mask = tracer.value(early["x"]), tracer.value(early["mask"])
    # -100 where windows differ, then 0 where they are the same.
    number = "zero" if tracer.count("fill") % 2 else "minus hundred"
    value = tracer.add("full", (), (), x.dtype, number)
    tracer.bind(result, _pointwise(tracer, "where", mask, value, x, dtype=x.dtype))


@_rule(slices.zero_part_)
def _zero_part(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = tracer.value(early["x"])
    part = (early["stop"] - early["start"],)
    zeros = _full(tracer, part, x.dtype)
    tracer.bind(result, tracer.add("slice_scatter", (x, zeros), x.shape, x.dtype))


@_rule(slices._copy_slices_backward)
def _zero_part_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    grad = tracer.value(early["grads"][0])
    start, stop = early["node"].data
    zeros = _full(tracer, (stop - start,), grad.dtype)
    scattered = tracer.add("slice_scatter", (grad, zeros), grad.shape, grad.dtype)
    tracer.bind(result[0], scattered)


def _view_rule(function: Any, op: str, *arguments: str) -> None:
    """A view of `x`, told apart by the named arguments."""

    def rule(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
        if result is early["x"]:
            return
        x = tracer.value(early["x"])
        constant = tuple(early[name] for name in arguments) if arguments else None
        tracer.bind(result, tracer.add(op, (x,), result.shape, x.dtype, constant))

    RULES[function.__code__] = (rule, True)


_view_rule(views.view, "view")
_view_rule(views.expand, "expand")
_view_rule(views.unsqueeze, "unsqueeze", "dim")
_view_rule(views.squeeze, "squeeze", "dim")


@_rule(views.permute)
def _permute(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    _bind_permuted(tracer, early["x"], tuple(d % len(result.shape) for d in early["dims"]), result)


@_rule(views.transpose)
def _transpose(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    _bind_permuted(tracer, early["x"], tuple(late["dims"]), result)


def _bind_permuted(tracer: Tracer, x: Tensor, dims: Shape, result: Tensor) -> None:
    value = tracer.value(x)
    tracer.bind(result, tracer.add("permute", (value,), result.shape, value.dtype, dims))


@_rule(views.alias)
@_rule(views._alias)
def _alias(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    """Another look at all of x; a part of it in the backward of a concatenation."""
    x = tracer.value(early["x"])
    if result.shape != x.shape:
        x = tracer.add("slice", (x,), result.shape, x.dtype, tracer.count("part"))
    tracer.bind(result, x)


@_rule(views.select)
def _select(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = tracer.value(early["x"])
    number = tracer.count("select")
    tracer.bind(result, tracer.add("select", (x,), result.shape, x.dtype, number))


@_rule(views.slice_)
def _slice(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = tracer.value(early["x"])
    where = (early["dim"], early["start"], early["stop"], early["step"])
    if result.shape != x.shape:
        x = tracer.add("slice", (x,), result.shape, x.dtype, where)
    tracer.bind(result, x)


def _bind_parts(tracer: Tracer, op: str, x: Tensor, parts: tuple[Tensor, ...]) -> None:
    value = tracer.value(x)
    whole = tracer.add(op, (value,), None, value.dtype)
    for number, part in enumerate(parts):
        tracer.bind(part, tracer.add("getitem", (whole,), part.shape, value.dtype, number))


@_rule(views.unbind)
def _unbind(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    _bind_parts(tracer, "unbind", early["x"], result)


@_rule(views.chunk)
def _chunk(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    _bind_parts(tracer, "split", early["x"], result)


@_rule(views.stack)
def _stack(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    """A concatenation along the first dimension, viewed."""
    parts = tuple(tracer.value(part) for part in early["parts"])
    shape = parts[0].shape or ()
    joined = tracer.add("cat", parts, (len(parts) * shape[0], *shape[1:]), result.dtype)
    tracer.bind(result, tracer.add("view", (joined,), result.shape, result.dtype))


@_rule(views.cat)
def _cat(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    parts = tuple(tracer.value(part) for part in early["parts"])
    tracer.bind(result, tracer.add("cat", parts, result.shape, result.dtype, early["dim"]))


@_rule(views.roll)
def _roll(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    """An indexing by shifted positions for each dimension; every other roll goes back."""
    x = tracer.value(early["x"])
    sign = tracer.count("roll") % 2
    for dim in range(1, early["dims"] + 1):
        size = result.shape[dim]
        row = tracer.add("iota", (), (size,), "int64", size)
        row = _pointwise(tracer, "add", row, constant=(size, sign))
        row = _pointwise(tracer, "fmod", row, constant=size)
        x = tracer.add("index", (x, row), result.shape, result.dtype, dim)
    tracer.bind(result, x)


@_rule(views._pad)
def _pad(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = tracer.value(early["x"])
    if result.shape != x.shape:
        x = tracer.add("constant_pad_nd", (x,), result.shape, result.dtype)
    tracer.bind(result, x)


@_rule(views.take_rows)
def _take_rows(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    inputs = (tracer.value(early["table"]), tracer.value(early["index"]))
    tracer.bind(result, tracer.add("index", inputs, result.shape, result.dtype))


@_rule(views._index_backward)
def _index_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    index, grad = tracer.value(early["node"].saved[0].packed), tracer.value(early["grads"][0])
    y = result[0]
    inputs = (_full(tracer, y.shape, y.dtype), index, grad)
    tracer.bind(y, tracer.add("index_put", inputs, y.shape, y.dtype))


@_rule(views._zeros_written_backward)
def _zeros_written(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    grad, y = tracer.value(early["grads"][0]), result[0]
    op = "select_scatter" if early["node"].name == "SelectBackward0" else "slice_scatter"
    inputs = (_full(tracer, y.shape, y.dtype), grad)
    tracer.bind(y, tracer.add(op, inputs, y.shape, y.dtype, tracer.count("scatter")))


@_rule(matmul._product)
def _product(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    a, b, bias = early["a"], early["b"], early["bias"]
    operands = (a, b) if bias is None else (bias, a, b)
    inputs = tuple(tracer.value(operand) for operand in operands)
    op = "mm" if bias is None else "addmm"
    tracer.bind(result, tracer.add(op, inputs, result.shape, result.dtype))


@_rule(matmul.bmm, opaque=False)
def _bmm(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    inputs = (tracer.value(late["a"]), tracer.value(late["b"]))
    tracer.bind(result, tracer.add("bmm", inputs, result.shape, result.dtype))


@_rule(matmul.conv2d, opaque=False)
def _conv2d(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    operands = [late["x"], late["weight"]] + [late["bias"]] * (late["bias"] is not None)
    inputs = tuple(tracer.value(operand) for operand in operands)
    tracer.bind(result, tracer.add("convolution", inputs, result.shape, result.dtype))


@_rule(matmul._conv_backward)
def _conv_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    """On a GPU the bias's gradient is a sum of its own."""
    node, grad = early["node"], tracer.value(early["grads"][0])
    saved = [tracer.value(saved.packed) for saved in node.saved]
    if result[2] is not None:
        tracer.bind(result[2], _sum(tracer, grad, result[2].shape, "over channels"))
    both = tracer.add("convolution_backward", (grad, *saved), None, grad.dtype)
    for number, y in enumerate(result[:2]):
        if y is not None:
            tracer.bind(y, tracer.add("getitem", (both,), y.shape, y.dtype, number))


@_rule(normalization.layer_norm, opaque=False)
def _layer_norm(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    tensor = late["x"]
    x, weight, bias = (tracer.value(late[name]) for name in ("x", "weight", "bias"))
    wide = _convert(tracer, x, "float32")
    if not is_contiguous(tensor.shape, tensor.strides):
        wide = _pointwise(tracer, "clone", wide, constant="contiguous")
    rows = _reduced(x.shape)
    both = tracer.add("var_mean", (wide,), None, "float32")
    variance = tracer.add("getitem", (both,), rows, "float32", 0)
    mean = tracer.add("getitem", (both,), rows, "float32", 1)
    rstd = _pointwise(tracer, "rsqrt", _pointwise(tracer, "add", variance, constant="epsilon"))
    normal = _normalized(tracer, wide, mean, rstd)
    y = _pointwise(tracer, "mul", normal, weight)
    y = _pointwise(tracer, "add", y, bias)
    tracer.bind(result, _convert(tracer, y, x.dtype))
    tracer.bind(late["mean"], mean)
    tracer.bind(late["rstd"], rstd)


def _normalized(tracer: Tracer, x: Value, mean: Value, rstd: Value) -> Value:
    return _pointwise(tracer, "mul", _pointwise(tracer, "sub", x, mean), rstd)


@_rule(normalization._layer_norm_backward)
def _layer_norm_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    grad = tracer.value(early["grads"][0])
    x, weight, _, mean, rstd = (tracer.value(s.packed) for s in early["node"].saved)
    wide_grad, wide = _convert(tracer, grad, "float32"), _convert(tracer, x, "float32")
    normal = _normalized(tracer, wide, mean, rstd)
    channels = _pointwise(tracer, "mul", wide_grad, weight, dtype="float32")
    scaled = _pointwise(tracer, "mul", channels, constant="channels")
    rows = _reduced(x.shape)
    total = tracer.add("sum", (channels,), rows, "float32", "row")
    along = _pointwise(tracer, "mul", channels, normal)
    projected = tracer.add("sum", (along,), rows, "float32", "row")
    part = _pointwise(tracer, "mul", normal, projected)
    inner = _pointwise(tracer, "sub", scaled, total)
    inner = _pointwise(tracer, "sub", inner, part)
    if result[0] is not None:
        per_channel = _pointwise(tracer, "div", rstd, constant="channels")
        y = _pointwise(tracer, "mul", per_channel, inner, shape=x.shape)
        tracer.bind(result[0], _convert(tracer, y, result[0].dtype))
    if result[1] is not None:
        product = _pointwise(tracer, "mul", wide_grad, normal)
        y = tracer.add("sum", (product,), result[1].shape, "float32", "rows")
        tracer.bind(result[1], _convert(tracer, y, result[1].dtype))
    if result[2] is not None:
        y = tracer.add("sum", (wide_grad,), result[2].shape, "float32", "rows")
        tracer.bind(result[2], _convert(tracer, y, result[2].dtype))


@_rule(normalization._softmax_of)
def _softmax(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = _convert(tracer, tracer.value(early["source"]), "float32")
    rows = _reduced(x.shape)
    shifted = _pointwise(tracer, "sub", x, tracer.add("amax", (x,), rows, "float32", "row"))
    power = _pointwise(tracer, "exp", shifted)
    total = tracer.add("sum", (power,), rows, "float32", "row")
    y = _pointwise(tracer, "div", power, total)
    tracer.bind(result, _convert(tracer, y, result.dtype))


@_rule(normalization._softmax_backward)
def _softmax_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    y = tracer.value(early["node"].saved[0].packed)
    wide_y = _convert(tracer, y, "float32")
    grad = _convert(tracer, tracer.value(early["grads"][0]), "float32")
    product = _pointwise(tracer, "mul", grad, wide_y)
    total = tracer.add("sum", (product,), _reduced(y.shape), "float32", "row")
    x = _pointwise(tracer, "fma", _pointwise(tracer, "neg", wide_y), total, product)
    tracer.bind(result[0], _convert(tracer, x, result[0].dtype))


@_rule(normalization.vector_norm)
def _vector_norm(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    x = _convert(tracer, tracer.value(early["x"]), "float32")
    square = _pointwise(tracer, "pow", x, constant="two")
    total = tracer.add("sum", (square,), _reduced(x.shape), "float32", "row")
    norm = _pointwise(tracer, "pow", total, constant="half")
    tracer.bind(result, _convert(tracer, norm, result.dtype))


@_rule(normalization._norm_backward)
def _norm_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    x, norm = (tracer.value(saved.packed) for saved in early["node"].saved)
    grad = tracer.value(early["grads"][0])
    ratio = _pointwise(tracer, "div", x, norm, dtype=norm.dtype)
    mask = _pointwise(tracer, "eq", norm, dtype="bool")
    zero = _full(tracer, (), norm.dtype)
    ratio = _pointwise(tracer, "where", mask, zero, ratio, shape=x.shape, dtype=norm.dtype)
    y = _pointwise(tracer, "mul", grad, ratio, shape=x.shape)
    tracer.bind(result[0], _convert(tracer, y, result[0].dtype))


@_rule(attention._efficient_attention)
def _efficient_attention(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    """Besides its result: logsumexp, and the two scalars of its random state."""
    inputs = tuple(tracer.value(early[name]) for name in ("q", "k", "v", "mask"))
    op = "_scaled_dot_product_efficient_attention"
    whole = tracer.add(op, inputs, None, result.dtype)
    logsumexp = late["logsumexp"]
    for number, y in enumerate((result, logsumexp)):
        tracer.bind(y, tracer.add("getitem", (whole,), y.shape, y.dtype, number))
    for number in (2, 3):
        tracer.add("getitem", (whole,), (), "int64", number)


@_rule(attention._attention_backward)
def _attention_backward(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    saved = [tracer.value(s.packed) for s in early["node"].saved]
    grad = tracer.value(early["grads"][0])
    whole = saved[4].inputs[0]
    state = [n for n in tracer.nodes if n.op == "getitem" and n.dtype == "int64"
             and n.inputs[0] is whole]  # fmt: skip
    op = "_scaled_dot_product_efficient_attention_backward"
    gradients = tracer.add(op, (grad, *saved, *state), None, grad.dtype)
    for number, y in enumerate(result):
        if y is not None:
            tracer.bind(y, tracer.add("getitem", (gradients,), y.shape, y.dtype, number))


@_rule(pooling.adaptive_avg_pool2d, opaque=False)
def _adaptive_avg_pool2d(tracer: Tracer, early: Locals, late: Locals, result: Tensor) -> None:
    if id(result) not in tracer.values:
        mean = tracer.nodes[-1]
        tracer.bind(result, tracer.add("as_strided", (mean,), result.shape, result.dtype))


@_rule(autograd.AccumulateGrad.accumulate)
def _accumulate(tracer: Tracer, early: Locals, late: Locals, result: Any) -> None:
    tracer.gradients[id(early["node"].cell)] = tracer.value(late["new"])
