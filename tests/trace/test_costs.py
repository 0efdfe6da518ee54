"""FLOPs of what a trace meets, each figure derived here (a multiply-add is two).

Legend: B batch, C channels, H x W positions, S queries, T keys, D channels of a head.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from planner.trace.costs import cost_of  # noqa: E402

aten = torch.ops.aten


class Flops(TorchDispatchMode):
    """FLOPs by name of operation, as `cost_of` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        work = cost_of(func, args, kwargs or {}, result, "")
        if work is not None:
            name = work.name.removeprefix("aten.")
            self.by_name[name] = self.by_name.get(name, 0) + work.flops
        return result


def forward_and_backward(y: Any, *inputs: Tensor) -> dict[str, int]:
    with Flops() as flops:
        out = y(*inputs)
        out.backward(torch.empty_like(out))
    return flops.by_name


def on_meta(*shape: int, grad: bool = True) -> Tensor:
    return torch.empty(*shape, device="meta", requires_grad=grad)


CONVOLUTIONS = {
    # B 2, 96 channels, 14 x 14, each channel its own 7 x 7 filter: 2 * 2 * 14 * 14 * 96 * 49
    "depthwise": ((2, 96, 14, 14), (96, 1, 7, 7), {"padding": 3, "groups": 96}, 3_687_936),
    # 4 groups of 8 -> 16 channels, 3 x 3, stride 2: 8 x 8 -> 4 x 4; 2 * 2 * 4 * 4 * 64 * 8 * 9
    "grouped": ((2, 32, 8, 8), (64, 8, 3, 3), {"padding": 1, "stride": 2, "groups": 4}, 294_912),
    # 3 -> 96 channels, 2 x 4 x 4 patches of 4 x 8 x 8: 2 * 2 * (2 * 2 * 2) * 96 * 3 * 32
    "3-D": ((2, 3, 4, 8, 8), (96, 3, 2, 4, 4), {"stride": (2, 4, 4)}, 294_912),
    # 1-D, dilated: 16 - 2 * 2 = 12 positions; 2 * 2 * 12 * 6 * 5 * 3
    "1-D": ((2, 5, 16), (6, 5, 3), {"dilation": 2}, 4_320),
    # B 2, 8 -> 16 channels in 4 groups, 2 x 2, stride 2: 5 x 5 -> 10 x 10. Each of 25 inputs a
    # channel meets 16 / 4 filters of 4: 2 * 2 * 25 * 8 * (16 / 4) * 4
    "transposed": ((2, 8, 5, 5), (8, 4, 2, 2), {"stride": 2, "groups": 4}, 12_800),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_goes_backward_at_twice_the_cost_of_forward(kind: str) -> None:
    shape, filters, options, forward = CONVOLUTIONS[kind]
    convolve = [F.conv1d, F.conv2d, F.conv3d][len(shape) - 3]
    if kind == "transposed":
        convolve = F.conv_transpose2d
    flops = forward_and_backward(
        lambda x, w: convolve(x, w, **options), on_meta(*shape), on_meta(*filters)
    )
    assert flops == {"convolution": forward, "convolution_backward": 2 * forward}


def test_only_the_gradients_asked_for_are_computed() -> None:
    """A stem's images need no gradient; a frozen filter needs none either."""
    forward = 2 * 2 * 64 * 4 * 3 * 9
    for x_grad, w_grad in ((False, True), (True, False)):
        flops = forward_and_backward(
            lambda x, w: F.conv2d(x, w, padding=1),
            on_meta(2, 3, 8, 8, grad=x_grad),
            on_meta(4, 3, 3, 3, grad=w_grad),
        )
        assert flops == {"convolution": forward, "convolution_backward": forward}


def meta(*shape: int) -> Tensor:
    return on_meta(*shape, grad=False)


PRODUCTS = {
    "mm": ((meta(3, 4), meta(4, 5)), 2 * 3 * 4 * 5),
    "addmm": ((meta(5), meta(3, 4), meta(4, 5)), 2 * 3 * 4 * 5),
    "bmm": ((meta(7, 3, 4), meta(7, 4, 5)), 2 * 7 * 3 * 4 * 5),
    "baddbmm": ((meta(7, 3, 5), meta(7, 3, 4), meta(7, 4, 5)), 2 * 7 * 3 * 4 * 5),
    "addbmm": ((meta(3, 5), meta(7, 3, 4), meta(7, 4, 5)), 2 * 7 * 3 * 4 * 5),
    "mv": ((meta(3, 4), meta(4)), 2 * 3 * 4),
    "addmv": ((meta(3), meta(3, 4), meta(4)), 2 * 3 * 4),
    "dot": ((meta(4), meta(4)), 2 * 4),
    "_addmm_activation": ((meta(5), meta(3, 4), meta(4, 5)), 2 * 3 * 4 * 5),
}


def test_a_product_multiplies_and_adds_once_for_each_pair() -> None:
    for name, (args, flops) in PRODUCTS.items():
        func = getattr(aten, name).default
        work = cost_of(func, args, {}, func(*args), "")
        assert work is not None
        assert (work.kind, work.flops) == ("matmul", flops), name


def attended(heads: int, key_heads: int, is_causal: bool = False) -> dict[str, int]:
    """B 2, S 6 queries, T 8 keys, D 16."""
    q, k, v = (on_meta(2, h, n, 16) for h, n in ((heads, 6), (key_heads, 8), (key_heads, 8)))
    q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    return forward_and_backward(
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0],
        q,
        k,
        v,
    )


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_fused_attention_makes_two_products_and_five_backward(key_heads: int) -> None:
    """Scores and values; then scores again, and a gradient each of scores, values, queries and
    keys. With fewer heads of keys each is met by the queries of its group: the work is the same."""
    product = 2 * 2 * 4 * 6 * 8 * 16
    flops = attended(4, key_heads)
    assert flops["_scaled_dot_product_flash_attention"] == 2 * product
    assert flops["_scaled_dot_product_flash_attention_backward"] == 5 * product


def test_a_causal_kernel_passes_over_what_lies_beyond_the_diagonal() -> None:
    """Query i of 6 sees keys 0 to i: 1 + 2 + … + 6 = 21 scores of 48."""
    product = 2 * 2 * 4 * 21 * 16
    flops = attended(4, 4, is_causal=True)
    assert flops["_scaled_dot_product_flash_attention"] == 2 * product
    assert flops["_scaled_dot_product_flash_attention_backward"] == 5 * product
