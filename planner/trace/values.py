"""What is known of fake tensors without any data: constants, and two kinds of assumption.

A fake tensor has a shape and no values. Where a model reads one (`.item()`, `if t.any():`), a trace
can go on if the value does not depend on data:

- a constant: made of Python numbers (`torch.arange(2, n)`), a small buffer, or computed from those;
- a random number of one element, taken at the middle of its range;
- whether all is finite (`torch.isfinite(x).all()`), taken as yes.

The last two are assumptions, and the ledger's notes state those that were read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from planner.trace.trees import tensors_in

aten = torch.ops.aten

MIDDLE = "a random number that the model reads has the middle value of its range"
FINITE = "all values are finite where the model checks that"

SMALL = 1 << 16  # elements: up to here a tensor's values are written down

_FILLED = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    "empty": 0, "empty_like": 0, "new_empty": 0,
}  # fmt: skip
_FILLED_BY = {"full": 1, "full_like": 1, "new_full": 2}
# What may be done to a tensor of equal elements on one of them, and yields equal elements again.
_ELEMENTWISE = {
    "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "div", "neg", "abs", "logical_and",
    "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "isnan",
    "isinf", "_to_copy",
}  # fmt: skip
_REDUCED = {"all", "any", "amax", "amin"}
_RESHAPED = {"_unsafe_view", "repeat", "clone"}


@dataclass(frozen=True)
class Known:
    """A fake tensor's values: `value` has its shape, or no dimension where all elements are equal.
    `assumptions` are those that they rest on."""

    value: Tensor
    assumptions: frozenset[str] = frozenset()

    def with_shape(self, shape: torch.Size) -> Tensor:
        """All values, written down."""
        return self.value if self.value.shape == shape else self.value.expand(shape).clone()


class Values:
    """The known values of fake tensors, followed from operation to operation.

    Each is kept on the tensor that has it. Views of a known tensor are views of its values, so that
    writing through one is seen by all; a write that is not known makes all of its storage unknown.
    """

    def __init__(self) -> None:
        self.assumed: set[str] = set()  # the assumptions that a value that was read rests on
        self._written: dict[
            int, int
        ] = {}  # storage -> how often it was written with unknown values

    def of(self, tensor: Tensor) -> Known | None:
        """What is known of `tensor`; a real one's values are known where they are few."""
        if not isinstance(tensor, FakeTensor):
            is_plain = type(tensor) is Tensor and not tensor.is_meta and tensor.numel() <= SMALL
            return Known(tensor) if is_plain else None
        found: tuple[Known, int] | None = getattr(tensor, "_planner_known", None)
        if found is None or found[1] != self._writes(tensor):
            return None
        return found[0]

    def read(self, tensor: Tensor) -> float | int | bool | None:
        """The value of a tensor of one element, or None where it depends on data."""
        known = self.of(tensor)
        if known is None:
            return None
        self.assumed |= known.assumptions
        with unset_fake_temporarily():
            number: float | int | bool = known.value.item()
        return number

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """`tensor` is fake, and its values are those of `value`: a buffer as it was built."""
        if value.numel() <= SMALL:
            self._set(tensor, Known(value))

    def forget_values(self, tensors: list[Tensor]) -> None:
        """What their storages hold from here on is data."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            self._written[address] = self._written.get(address, 0) + 1

    def release(self, address: int) -> None:
        """The storage at `address` is gone; another may come to lie there."""
        self._written.pop(address, None)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes what is known of `result`, which `func` has just made."""
        found = self._found(func, args, kwargs, result)
        if found is not None:
            for fake, known in zip(tensors_in(result), found, strict=True):
                self._set(fake, known)
        elif func._schema.is_mutable:
            self.forget_values(_written_by(func, args, kwargs))

    def run_known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation whose shape depends on values (`nonzero`), if it is known."""
        inputs = tensors_in((args, kwargs))
        mode = detect_fake_mode(inputs)
        found = self._evaluated(func, args, kwargs, inputs)
        if mode is None or found is None:
            return None
        fakes = [mode.from_tensor(known.value) for known in found]
        for fake, known in zip(fakes, found, strict=True):
            self._set(fake, known)
        return fakes[0] if len(func._schema.returns) == 1 else tuple(fakes)

    def _found(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[Known] | None:
        """What is known of each tensor of `result`, or None."""
        name = func._overloadpacket.__name__
        fill = args[_FILLED_BY[name]] if name in _FILLED_BY else _FILLED.get(name)
        if isinstance(fill, bool | int | float):
            return [_filled(result, fill)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._random(func, args, kwargs, result)
        inputs = tensors_in((args, kwargs))
        outcome = _outcome_if_finite(name, args)
        if outcome is not None and self.of(inputs[0]) is None:
            assumed = {FINITE} if inputs[0].is_floating_point() else ()
            return [_filled(result, outcome, frozenset(assumed))]
        if _is_large(result) and not inputs:
            return None
        return self._evaluated(func, args, kwargs, inputs, result)

    def _evaluated(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        result: Any = None,
    ) -> list[Known] | None:
        """By running `func` on the values of `inputs`, its tensors, if all are known."""
        known = [k for k in map(self.of, inputs) if k is not None]
        if len(known) < len(inputs):
            return None
        if _is_large((inputs, result)):
            values = _equal_elements(func, args, kwargs, [k.value for k in known])
        else:
            shaped = [k.with_shape(t.shape) for k, t in zip(known, inputs, strict=True)]
            values = _run(func, args, kwargs, shaped)
        if values is None:
            return None
        assumptions = frozenset[str]().union(*(k.assumptions for k in known))
        return [Known(value, assumptions) for value in values]

    def _random(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[Known] | None:
        """A single number, at the middle of its range."""
        middle = _MIDDLES.get(func._overloadpacket.__name__)
        if middle is None or not isinstance(result, Tensor) or result.numel() != 1:
            return None
        names = (argument.name for argument in func._schema.arguments)
        value = middle(dict(zip(names, args, strict=False)) | kwargs)
        if func._schema.is_mutable:  # views of it know nothing of what is written
            self.forget_values([result])
        return [_filled(result, value, frozenset({MIDDLE}))]

    def _writes(self, tensor: Tensor) -> int:
        return self._written.get(tensor.untyped_storage()._cdata, 0)

    def _set(self, tensor: Tensor, known: Known) -> None:
        tensor._planner_known = (known, self._writes(tensor))  # type: ignore[attr-defined]


def _run(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Tensor]
) -> list[Tensor] | None:
    """The tensors that `func` makes with `values` in place of its own tensors, in their order."""
    rest = iter(values)
    with suppress(RuntimeError, IndexError), unset_fake_temporarily():
        args, kwargs = tree_map_only(Tensor, lambda _: next(rest), (args, kwargs))
        return tensors_in(func(*args, **kwargs))
    return None


def _equal_elements(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Tensor]
) -> list[Tensor] | None:
    """The same for tensors that are too large to write down, each of equal elements: of one."""
    if any(value.numel() != 1 for value in values):
        return None
    name, packet = func._overloadpacket.__name__, func._overloadpacket
    with unset_fake_temporarily():
        values = [value.reshape(()) for value in values]
    if func.is_view or name in _RESHAPED:
        return values
    if name in _REDUCED:
        return _run(packet, tuple(values), {}, values)
    return _run(func, args, kwargs, values) if name in _ELEMENTWISE else None


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    return tensors_in([g for a, g in named if a.alias_info is not None and a.alias_info.is_write])


def _filled(like: Tensor, value: float, assumptions: frozenset[str] = frozenset()) -> Known:
    with unset_fake_temporarily():
        shape = like.shape if like.numel() <= SMALL else ()
        return Known(torch.full(shape, value, dtype=like.dtype), assumptions)


def _is_large(tree: Any) -> bool:
    return any(t.numel() > SMALL for t in tensors_in(tree))


def _outcome_if_finite(name: str, args: tuple[Any, ...]) -> bool | None:
    """What a comparison yields of finite numbers whichever they are, or None. `isfinite(x)` is
    `(x == x) * (x.abs() != inf)`."""
    if name in ("isnan", "isinf"):
        return False
    if name not in ("eq", "ne") or len(args) < 2:
        return None
    with_itself = isinstance(args[0], Tensor) and args[0] is args[1]
    if with_itself:
        return name == "eq"
    return name == "ne" if isinstance(args[1], float) and args[1] == math.inf else None


def _middle_of_integers(given: dict[str, Any]) -> float:
    low = given.get("low", given.get("from", 0)) or 0
    high = given.get("high", given.get("to"))
    return (low + high - 1) // 2 if high is not None else 0


_MIDDLES: dict[str, Callable[[dict[str, Any]], float]] = {
    "rand": lambda given: 0.5,
    "rand_like": lambda given: 0.5,
    "uniform_": lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2,
    "randn": lambda given: 0.0,
    "randn_like": lambda given: 0.0,
    "normal_": lambda given: given.get("mean", 0.0),
    "randint": _middle_of_integers,
    "randint_like": _middle_of_integers,
    "random_": _middle_of_integers,
}
