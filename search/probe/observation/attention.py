"""Fused window attention by itself: what it asks of the allocator, which kernel runs, how fast.

Legend: B images, nW windows of an image, h heads, N tokens of a window, d a head's width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.libraries.maps import feature_maps
from planner.step.attention import backward_scratch
from search.probe.observation.order import Order, Teller
from search.probe.observation.subject import Subject
from search.probe.observation.view import View, seen_kernels

_SAMPLES = 10
_TOLD_REQUESTS = 400


@dataclass(frozen=True)
class Attention:
    """Queries, keys, values [B·nW, h, N, d] and a bias [h, N, N], as in the first stage's blocks
    that are not shifted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor

    def __call__(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, attn_mask=self.bias.to(self.q.dtype).unsqueeze(0)
        )


def first_stage(order: Order, learned_bias: bool = True) -> Attention:
    """That of the observation's model and batch."""
    subject = Subject(order.observation, order.device)
    model, setting = subject.model, subject.setting
    subject.prepare()
    side = model.windows[0]
    height, width = feature_maps(model)[0]
    windows = setting.batch_size * -(-height // side) * -(-width // side)
    heads, tokens = model.num_heads[0], side * side
    dtype = getattr(torch, setting.autocast_dtype or "float32")
    shape = (windows, heads, tokens, model.embed_dim // heads)
    q, k, v = (
        torch.randn(shape, device=order.device, dtype=dtype).requires_grad_() for _ in range(3)
    )
    bias = torch.zeros(heads, tokens, tokens, device=order.device, requires_grad=learned_bias)
    return Attention(q, k, v, bias)


def see_attention_memory(order: Order, view: View, tell: Teller) -> None:
    """Every request for memory in a forward and a backward, beside what an estimate expects."""
    view.start()
    attend = first_stage(order)
    scratch = backward_scratch(tuple(attend.q.shape), attend.q.dtype != torch.float32)
    tell.see(
        query_bytes=attend.q.numel() * attend.q.element_size(),
        expected_delta_bytes=scratch.delta,
        expected_workspace_bytes=scratch.workspace,
    )
    output: list[Tensor] = []
    tell.see(forward_requests_bytes=view.requests(lambda: output.append(attend()))[:_TOLD_REQUESTS])
    gradient = torch.ones_like(output[0])

    def backward() -> None:
        torch.autograd.backward(output[0], gradient)

    requests = view.requests(backward)
    tell.see(backward_requests_bytes=requests[:_TOLD_REQUESTS])
    if view.is_cuda:
        tell.see(workspace_is_as_expected=scratch.workspace in requests)
    else:
        tell.miss("workspace_is_as_expected", "the CPU has no memory-efficient kernel")


def see_attention_kernels(order: Order, view: View, tell: Teller) -> None:
    """Which kernel a whole step computes attention with."""
    subject = Subject(order.observation, order.device)
    view.start()
    subject.prepare()
    training = subject.training()
    training.step()
    seen = seen_kernels(view, training.step)
    tell.see(attention=seen.of_attention(), num_kernels=len(seen.kernels))
    if not view.is_cuda:
        tell.miss("kernels", "the CPU has operators only")


def see_attention_rate(order: Order, view: View, tell: Teller) -> None:
    """Fused attention timed and named, with a bias that learns and with one that does not."""
    view.start()
    for name, learned in (("learned_bias", True), ("frozen_bias", False)):
        attend = first_stage(order, learned)
        gradient = torch.ones_like(attend())

        def both(attend: Attention = attend, gradient: Tensor = gradient) -> None:
            torch.autograd.backward(attend(), gradient)

        forward_seconds = _seconds(view, attend)
        both_seconds = _seconds(view, both)
        tell.see(
            **{
                name: {
                    "forward_seconds": forward_seconds,
                    "forward_backward_seconds": both_seconds,
                    **seen_kernels(view, both).of_attention(),
                }
            }
        )


def _seconds(view: View, call: Callable[[], object]) -> float:
    """The median of some calls, each waited for, once warm."""
    samples = []
    for _ in range(_SAMPLES + 2):
        view.synchronize()
        began = time.perf_counter()
        call()
        view.synchronize()
        samples.append(time.perf_counter() - began)
    return median(samples[2:])
