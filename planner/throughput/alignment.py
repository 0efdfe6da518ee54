"""Sides of matrix products that are no multiple of what matrix units load at once.

A row that begins off 16 bytes is read in smaller pieces (NVIDIA, Matrix Multiplication Background
User's Guide, tensor core requirements: multiples of 16 bytes), so 8 numbers of 16 bits, 4 of tf32,
16 of 8 bits. The guide's 128 bytes, with which an A100 is fastest, are not looked at. Only
contiguous sides count: the batch is one in no product of a Swin, since tokens are rows everywhere.
How much slower such a product runs is not published of any card: what is said is the share of the
step that such products take, and what padding would cost. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from planner.core.schema import SwinConfig, TrainSetting
from planner.ledger.ledger import Computed
from planner.throughput.fusing import Operation
from planner.throughput.prediction import DeviceRates, StepTime, device_seconds

# Numbers in 16 bytes, by precision. fp32 multiplies without matrix units; of fp8 the linear layers
# are in 8 bits and attention stays in 16.
_LINEAR_MULTIPLES: Mapping[str, int] = MappingProxyType(
    {"tf32": 4, "bf16": 8, "fp16": 8, "pure-bf16": 8, "fp8": 16}
)
_ATTENTION_MULTIPLES = {**_LINEAR_MULTIPLES, "fp8": 8}
# Below this share of a step nothing is said: no padding would show in its time.
WORTH_SAYING = 0.01

_Products = Literal["attention", "classifier", "linear"]


@dataclass(frozen=True)
class Misaligned:
    """A side of `size` numbers, no multiple of `multiple`. `step_share` of a step's predicted time
    is in products that may have it, and padding it would multiply their FLOPs by 1 + `padding`."""

    what: str
    size: int
    multiple: int
    step_share: float
    padding: float

    @property
    def text(self) -> str:
        return (
            f"{self.what}, no multiple of {self.multiple} (16 bytes): it slows matrix products "
            f"that take up to {self.step_share:.0%} of the step; "
            f"padded, they have {self.padding:.0%} more FLOPs"
        )


class _Side(NamedTuple):
    what: str
    size: int
    multiple: int
    products: _Products
    times: int  # how often a product has it


def misaligned(
    model: SwinConfig,
    setting: TrainSetting,
    operations: Iterable[Operation],
    rates: DeviceRates,
    time: StepTime,
) -> tuple[Misaligned, ...]:
    """What of `model` is off, where it is worth saying; the largest share of the step first.

    `operations` are those of the recorded step that takes `time`.
    """
    sides = [side for side in _sides(model, setting) if side.size % side.multiple]
    if not sides:
        return ()
    seconds = _seconds(model, setting, operations, rates)
    # However many micro-batches are recorded, matrix products run in nothing else.
    scale = time.kind_seconds.get("matmul", 0.0) / (sum(seconds.values()) or 1.0)
    found = []
    for what, size, multiple, products, times in sides:
        share = scale * seconds[products] / time.step_seconds
        padded = -(-size // multiple) * multiple
        if share >= WORTH_SAYING:
            found.append(Misaligned(what, size, multiple, share, (padded / size) ** times - 1))
    return tuple(sorted(found, key=lambda side: -side.step_share))


def _sides(model: SwinConfig, setting: TrainSetting) -> Iterator[_Side]:
    """The contiguous sides of a Swin's products. Fused attention has none: its kernels pad their
    own tiles, and their rate is fitted with that."""
    linear = _LINEAR_MULTIPLES.get(setting.precision)
    if linear is None:
        return
    if setting.attention != "sdpa":
        multiple = _ATTENTION_MULTIPLES[setting.precision]
        for window in sorted(set(model.windows)):
            size = window * window
            yield _Side(f"window {window} has {size} tokens", size, multiple, "attention", 2)
        heads = {model.stage_channels(i) // n for i, n in enumerate(model.num_heads)}
        for size in sorted(heads):
            yield _Side(f"a head has {size} channels", size, multiple, "attention", 1)
    size = model.embed_dim
    yield _Side(f"the first stage has {size} channels", size, linear, "linear", 2)
    size = model.num_classes
    yield _Side(f"the classifier has {size:,} classes", size, linear, "classifier", 1)


def _seconds(
    model: SwinConfig, setting: TrainSetting, operations: Iterable[Operation], rates: DeviceRates
) -> dict[_Products, float]:
    """Of the recorded step, by what the products are for."""
    last = model.stage_channels(model.num_stages - 1)
    of_classifier = 2 * setting.batch_size * last * model.num_classes
    seconds: dict[_Products, float] = dict.fromkeys(("attention", "classifier", "linear"), 0.0)
    alike = Counter((p, o._replace(path="")) for p, o in operations if o.kind == "matmul")
    for (phase, operation), count in alike.items():
        products = _products(operation, of_classifier)
        seconds[products] += count * device_seconds(phase, operation, rates, setting)
    return seconds


def _products(operation: Computed, of_classifier: int) -> _Products:
    if operation.name.endswith("bmm"):  # a Swin's only batched products
        return "attention"
    return "classifier" if operation.flops == of_classifier else "linear"
