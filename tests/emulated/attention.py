"""`F.scaled_dot_product_attention` of many shapes, forward and backward: the kernel that runs and
the bytes that it takes, on a device and in a trace.

Legend: B batch, H heads of queries, K heads of keys and values, N queries, M keys, D channels of a
head, V those of a value.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from search.probe.worker.worker import end


@dataclass(frozen=True)
class Case:
    """Queries [B, H, N, D], keys [B, K, M, D] and values [B, K, M, V]; no batch where `batch` is 0.
    `mask` is "", "bool", "float" or "trained"; `grad` whether gradients are wanted."""

    dtype: str = "bfloat16"
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    queries: int = 49
    keys: int = 49
    channels: int = 32
    value_channels: int = 32
    mask: str = ""
    causal: bool = False
    gqa: bool = False
    grad: bool = True
    dropout: float = 0.0


class Outcome(NamedTuple):
    """The fused kernel ("" for the plain formula), and bytes over those of the arguments."""

    kernel: str
    saved: int
    forward_peak: int
    backward_peak: int


def grid() -> Iterator[Case]:
    """What decides, in all combinations that torch accepts."""
    for dtype, (channels, value_channels), (key_heads, gqa), mask, (queries, keys) in (
        itertools.product(
            ("float32", "float16", "bfloat16"),
            ((18, 18), (20, 20), (32, 32), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128),
             (200, 200), (256, 256), (320, 320), (64, 32), (32, 64), (64, 128), (192, 128)),
            ((4, False), (4, True), (2, True), (1, False), (1, True)),
            ("", "causal", "bool", "float", "trained"),
            ((49, 49), (128, 128), (130, 77)),
        )
    ):  # fmt: skip
        for grad, batch in ((True, 2), (False, 2), (True, 0)):
            if batch == 0 and (gqa or key_heads != 4):
                continue
            yield Case(
                dtype=dtype, batch=batch, key_heads=key_heads, queries=queries, keys=keys,
                channels=channels, value_channels=value_channels, gqa=gqa, grad=grad,
                mask="" if mask == "causal" else mask, causal=mask == "causal",
            )  # fmt: skip


def arguments(case: Case, device: str) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys and values, and the mask."""
    dtype = getattr(torch, case.dtype)
    outer = (case.batch,) if case.batch else ()
    shapes = (
        (case.heads, case.queries, case.channels),
        (case.key_heads, case.keys, case.channels),
        (case.key_heads, case.keys, case.value_channels),
    )
    made = [
        torch.zeros(*outer, *s, dtype=dtype, device=device, requires_grad=case.grad) for s in shapes
    ]
    if not case.mask:
        return made, None
    of_mask = torch.bool if case.mask == "bool" else dtype
    mask = torch.zeros(case.queries, case.keys, dtype=of_mask, device=device)
    return made, mask.requires_grad_(case.mask == "trained")


def attend(case: Case, made: list[Tensor], mask: Tensor | None) -> Tensor:
    query, key, value = made
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=case.dropout,
        is_causal=case.causal,
        enable_gqa=case.gqa,
    )


def kernel_of(result: Tensor) -> str:
    """The first node of a fused kernel behind `result`."""
    todo: list[Any] = [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            name: str = node.name()
            if name.startswith("ScaledDotProduct"):
                return name.removeprefix("ScaledDotProduct").removesuffix("AttentionBackward0")
            todo += [following for following, _ in node.next_functions]
    return ""


def on_device(case: Case) -> Outcome:
    """What torch does on the GPU of this process."""
    made, mask = arguments(case, "cuda")
    gradient = torch.zeros_like(attend(case, made, mask))

    def requested(which: str) -> int:
        found: int = torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
        torch.cuda.reset_peak_memory_stats()
        return found - before

    before = 0
    before = requested("current")
    result = attend(case, made, mask)
    kernel, forward = kernel_of(result), requested("peak")
    saved = requested("current")
    if result.grad_fn is not None:
        result.backward(gradient)
    return Outcome(kernel, saved, forward, requested("peak"))


def main() -> None:
    """Cases as JSON on standard input, outcomes as JSON on standard output. Without cuDNN's
    attention, which Hopper would ask first."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    cases = [Case(**values) for values in json.load(sys.stdin)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):  # workspaces of both threads
        warm = torch.zeros(8, 8, dtype=dtype, device="cuda", requires_grad=True)
        (warm @ warm).sum().backward()
    print(json.dumps([on_device(case) for case in cases]))
    end()  # without Python's own end, in which a thread of torch's may still ask for its lock


def as_json(cases: list[Case]) -> str:
    return json.dumps([asdict(case) for case in cases])


if __name__ == "__main__":
    main()
