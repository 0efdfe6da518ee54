"""Times window attention by itself: the attention of a Swin block, forward and backward.

    python examples/window_attention.py [--device cpu] [--precision bf16] [--compile]

Roll, partition into windows, projections, attention, and the way back, of [2, 56, 56, 96] with
windows of 7 × 7 and 3 heads: written out here with explicit scores and with torch's fused
attention, and as torchvision and timm have it where they are installed. Each is first held to
itself in float64: what differs by more than its precision rounds is not timed.

Legend: B images, H × W feature map, C channels, M window side, N = M² tokens of a window.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Compare, Timer

B, H, C, M, HEADS = 2, 56, 96, 7, 3
# Of the norm of what float64 gives: ten times what a product rounds to and more.
TOLERANCES = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 4e-2}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class WindowAttention(nn.Module):
    """[B, H, W, C] to the same, shifted by half a window where `shift` is not 0."""

    def __init__(self, shift: int, fused: bool) -> None:
        super().__init__()
        self.shift, self.fused = shift, fused
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.bias = nn.Parameter(torch.randn(HEADS, M * M, M * M))
        regions = torch.zeros(1, H, H, 1)  # who may attend to whom once the map is rolled
        for number in range(9 if shift else 0):
            rows, columns = (
                (slice(0, -M), slice(-M, -shift), slice(-shift, None))[i] for i in divmod(number, 3)
            )
            regions[:, rows, columns] = number
        tokens = self.windows(regions).squeeze(-1)  # [windows, N]
        apart = tokens.unsqueeze(1) != tokens.unsqueeze(2)
        self.register_buffer("mask", torch.zeros(apart.shape).masked_fill(apart, -100.0))

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        """[B, H, W, C] to [B · windows, N, C]."""
        b, h, w, c = x.shape
        x = x.view(b, h // M, M, w // M, M, c)
        return x.transpose(2, 3).reshape(-1, M * M, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        qkv = self.qkv(self.windows(x)).view(-1, M * M, 3, HEADS, c // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B · windows, heads, N, C / heads]
        added = (self.bias + self.mask.unsqueeze(1)).repeat(b, 1, 1, 1)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=added.to(q.dtype))
        else:
            scores = q @ k.transpose(-2, -1) * (c // HEADS) ** -0.5
            y = (scores + added).softmax(-1).to(v.dtype) @ v
        y = self.out(y.transpose(1, 2).reshape(-1, M * M, c))
        y = y.view(b, h // M, w // M, M, M, c).transpose(2, 3).reshape(b, h, w, c)
        return y.roll((self.shift, self.shift), (1, 2)) if self.shift else y


def subjects() -> Iterator[tuple[str, str, nn.Module]]:
    """Library, kind of window, and the attention of its block."""
    for shift in (0, M // 2):
        kind = "shifted" if shift else "plain"
        yield "explicit", kind, WindowAttention(shift, fused=False)
        yield "fused", kind, WindowAttention(shift, fused=True)
        if find_spec("torchvision"):
            from torchvision.models.swin_transformer import ShiftedWindowAttention

            yield "torchvision", kind, ShiftedWindowAttention(C, [M, M], [shift, shift], HEADS)
        if find_spec("timm"):
            from timm.models.swin_transformer import SwinTransformerBlock

            block = SwinTransformerBlock(C, (H, H), HEADS, window_size=M, shift_size=shift)
            block.forward = block._attn
            yield "timm", kind, block


def step(call: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Forward and backward; the output."""
    with nullcontext() if dtype is None else torch.autocast(x.device.type, dtype):
        out = call(x)
    out.sum().backward()
    return out.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=TOLERANCES, default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0, help="at least, of each")
    given = parser.parse_args()
    dtype, timings = DTYPES.get(given.precision), []
    torch.manual_seed(0)
    x = torch.randn(B, H, H, C, device=given.device, requires_grad=True)
    for library, kind, module in subjects():
        module = module.to(given.device)
        expected = step(deepcopy(module).double(), x.detach().double(), None)
        call = torch.compile(module) if given.compile else module
        off = float((step(call, x, dtype).double() - expected).norm() / expected.norm())
        if not off <= TOLERANCES[given.precision]:
            print(f"{library}, {kind}: off by {off:.2g} of what float64 gives: not timed.")
            continue
        timer = Timer(
            "step(call, x, dtype)", globals={"step": step, "call": call, "x": x, "dtype": dtype},
            label=f"window attention, {given.device}, {given.precision}", sub_label=library,
            description=kind, num_threads=torch.get_num_threads(),
        )  # fmt: skip
        timings.append(timer.blocked_autorange(min_run_time=given.seconds))
    Compare(timings).print()


if __name__ == "__main__":
    main()
