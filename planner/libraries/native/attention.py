"""Native's window attention, versions 1 and 2. Legend as in `module.py`. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.core.schema import SwinConfig
from planner.libraries.maps import CPB_HIDDEN, BlockPlan
from planner.libraries.native.grid import WindowGrid

Attention = Literal["eager", "sdpa"]

MAX_LOGIT_SCALE = math.log(100.0)  # version 2: the temperature's ceiling, arXiv 2111.09883 §3.2
BIAS_CEILING = 16.0  # version 2: the position bias is 16 × sigmoid, the authors' configuration


class WindowAttention(nn.Module):
    """What the attention of both versions has."""

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__()
        self.num_heads = plan.heads
        self.dropout = config.attn_drop_rate
        self.attend = ATTENTION[attention]


class WindowAttentionV1(WindowAttention):
    """Scaled dot-product attention in windows, with a learned bias for each relative position."""

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__(config, plan, grid, attention)
        channels = plan.channels
        self.scale = (channels // plan.heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros(grid.num_positions, plan.heads)
        )
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.qkv = nn.Linear(channels, 3 * channels, bias=config.qkv_bias)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, grid: WindowGrid, mask: Tensor | None) -> Tensor:
        """[G, N, S, C] to the same."""
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        bias = spread_bias(self.relative_position_bias_table, grid)
        if mask is not None:
            bias = bias + mask
        x = self.attend(q, k, v, bias, self.scale, self.dropout if self.training else 0.0)
        out: Tensor = self.proj_drop(self.proj(x))
        return out


class WindowAttentionV2(WindowAttention):
    """Cosine attention in windows with a learned temperature and a continuous position bias."""

    k_bias: Tensor | None

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__(config, plan, grid, attention)
        channels = plan.channels
        self.logit_scale = nn.Parameter(torch.full((self.num_heads, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, CPB_HIDDEN),
            nn.ReLU(inplace=True),
            nn.Linear(CPB_HIDDEN, self.num_heads, bias=False),
        )
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        has_bias = config.qkv_bias
        self.q_bias = nn.Parameter(torch.zeros(channels)) if has_bias else None
        self.v_bias = nn.Parameter(torch.zeros(channels)) if has_bias else None
        self.register_buffer("k_bias", torch.zeros(channels) if has_bias else None, False)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, grid: WindowGrid, mask: Tensor | None) -> Tensor:
        """[G, N, S, C] to the same."""
        qkv_bias = None
        if self.q_bias is not None and self.k_bias is not None and self.v_bias is not None:
            qkv_bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = split_heads(F.linear(x, self.qkv.weight, qkv_bias), self.num_heads)
        q = q * (self.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp() * inverse_norm(q))
        k = k * inverse_norm(k)
        table = BIAS_CEILING * torch.sigmoid(self.cpb_mlp(grid.relative_coordinates))
        bias = spread_bias(table, grid)
        if mask is not None:
            bias = bias + mask
        x = self.attend(q, k, v, bias, 1.0, self.dropout if self.training else 0.0)
        out: Tensor = self.proj_drop(self.proj(x))
        return out


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[G, N, S, 3C] to q, k and v, each a view [G, S, h, N, d]."""
    groups, tokens, side_by_side, _ = qkv.shape
    q, k, v = qkv.view(groups, tokens, side_by_side, 3, num_heads, -1).unbind(3)
    return q.permute(0, 2, 3, 1, 4), k.permute(0, 2, 3, 1, 4), v.permute(0, 2, 3, 1, 4)


def spread_bias(table: Tensor, grid: WindowGrid) -> Tensor:
    """A bias for each relative position and head to one for each pair: [1, h, N, N]."""
    bias = table[grid.relative_position_index]
    bias = bias.view(grid.num_tokens, grid.num_tokens, -1)
    return bias.permute(2, 0, 1).contiguous().unsqueeze(0)


def inverse_norm(x: Tensor) -> Tensor:
    """1 / ‖x‖ over the last axis, [.., 1]; finite at 0, as in `F.normalize`."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return 1.0 / norm.clamp_min(1e-12)


def attend_eager(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout: float
) -> Tensor:
    """softmax(q kᵀ + bias) v, written out: q, k, v [G, S, h, N, d], bias [S, h, N, N] or
    [1, h, N, N], to [G, N, S, C]."""
    if scale != 1.0:
        q = q * scale
    scores = q @ k.transpose(-2, -1)
    scores = scores + bias
    weights = scores.softmax(dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    x = weights @ v
    return x.permute(0, 3, 1, 2, 4).flatten(3)


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout: float
) -> Tensor:
    """The same in one kernel where the device has it (a bias that learns leaves PyTorch the
    memory-efficient one). Windows side by side become heads: [G, S * h, N, d]."""
    groups, side_by_side, _, tokens, _ = q.shape
    q, k, v = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)
    bias = bias.flatten(0, 1).unsqueeze(0)
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return x.transpose(1, 2).reshape(groups, tokens, side_by_side, -1)


ATTENTION: dict[Attention, Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "eager": attend_eager,
    "sdpa": attend_fused,
}
