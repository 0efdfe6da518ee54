"""Seconds of single operations, forward and backward, one JSON line each:
`python -m tests.truth.kernels --record FILE`. Half a minute on a GPU.

Shapes are those of 64 images: [B·nW, h, N, d] for attention, [B, C, H, W] for convolutions,
[rows, K] × [K, N] for products. A time is the median of repeated runs by the device's own clock.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from search.probe.device import describe_device, versions

DEVICE = "cuda:0"
TOTAL = 0.02  # seconds of repeated runs
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
# Which bias is timed with which kernel, at which width of a head (0: at any other).
BIASES = {
    ("flash", 0): ("none",), ("cudnn", 0): ("none",), ("efficient", 0): ("none", "learned"),
    ("efficient", 32): ("none", "mask", "learned"), ("math", 32): ("learned",),
    ("math", 64): ("none",),
}  # fmt: skip
# What runs is a function of tensors; those at the front get gradients.
Case = tuple[dict[str, Any], Callable[[], tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]]]


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def attention_cases() -> Iterator[Case]:
    """Queries, keys and values of as many numbers as 64 images of a ViT-S have, whatever N."""
    for tokens in (16, 49, 64, 144, 196, 197, 256, 577, 1024, 4096):
        for width in (32, 64, 128):
            for backend in BACKENDS:
                for bias in BIASES.get((backend, width), BIASES.get((backend, 0), ())):
                    told = {"kernel": f"sdpa {backend}", "N": tokens, "d": width, "bias": bias}
                    yield told, lambda t=tokens, w=width, b=backend, i=bias: attention(t, w, b, i)


def attention(tokens: int, width: int, backend: str, bias: str) -> Any:
    heads = 384 // width
    batch = max(1, 64 * 196 // tokens)
    q, k, v = (made(batch, heads, tokens, width) for _ in range(3))
    rows = -(-tokens // 8) * 8  # the alignment that kernels ask of a mask
    full = made(1 if bias == "learned" else batch, heads, tokens, rows)[..., :tokens]
    mask = [] if bias == "none" else [full]

    def call(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            one = mask[0].expand(batch, -1, -1, -1) if mask else None
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=one)

    learned = mask if bias == "learned" else []
    return call, [q, k, v, *learned], [] if learned else mask


def convolution_cases() -> Iterator[Case]:
    shapes = [  # channels in, out, pixels, kernel, stride, groups
        *((c, c, s, 3, 1, 1) for c, s in ((64, 56), (128, 28), (256, 14), (512, 7))),
        *((c, 4 * c, s, 1, 1, 1) for c, s in ((64, 56), (256, 14))),
        *((4 * c, c, s, 1, 1, 1) for c, s in ((64, 56), (256, 14))),
        (3, 64, 224, 7, 2, 1), (3, 96, 224, 4, 4, 1), (3, 384, 224, 16, 16, 1),
        (3, 32, 224, 3, 2, 1),
        *((96 * n, 96 * n, 56 // n, k, 1, 96 * n) for n in (1, 2, 4, 8) for k in (3, 7)),
        *((c, c, s, 5, 1, c) for c, s in ((144, 56), (480, 14), (1152, 7))),
        *((c, c, s, 3, 2, c) for c, s in ((96, 112), (240, 28))),
        *((c, c, s, 3, 1, c // 16) for c, s in ((128, 56), (512, 14))),
    ]  # fmt: skip
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            for layout in (torch.contiguous_format, torch.channels_last):
                told = dict(
                    zip(("in", "out", "pixels", "k", "stride", "groups"), shape, strict=True)
                )
                yield (
                    {"kernel": "convolution", "dtype": str(dtype)[6:], "layout": str(layout)[6:],
                     **told},
                    partial(convolution, shape, dtype, layout),
                )  # fmt: skip


def convolution(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> Any:
    c_in, c_out, pixels, k, stride, groups = shape
    x = made(64, c_in, pixels, pixels, dtype=dtype).to(memory_format=layout)
    w = made(c_out, c_in // groups, k, k, dtype=dtype).to(memory_format=layout)
    padding = 0 if k == stride else k // 2

    def call(w: Tensor, x: Tensor) -> Tensor:
        return functional.conv2d(x, w, None, stride, padding, 1, groups)

    return (call, [w, x], []) if c_in > 3 else (call, [w], [x])


def matmul_cases() -> Iterator[Case]:
    shapes = [
        (200704, 96, 288), (200704, 96, 384), (200704, 384, 96), (50176, 192, 768),
        (12544, 384, 1536), (12544, 1536, 384), (3136, 768, 3072), (12608, 768, 3072),
        (12608, 768, 2304), (12608, 3072, 768), (64, 768, 1000), (8192, 8192, 8192),
    ]  # fmt: skip
    for rows, k, n in shapes:
        for name, dtype in (
            ("bfloat16", torch.bfloat16), ("float16", torch.float16),
            ("tf32", torch.float32), ("float32", torch.float32),
        ):  # fmt: skip
            told = {"kernel": "linear", "rows": rows, "K": k, "N": n, "dtype": name}
            yield told, lambda r=rows, k=k, n=n, d=dtype: (
                lambda x, w: functional.linear(x, w), [made(r, k, dtype=d), made(n, k, dtype=d)], []
            )  # fmt: skip


def pointwise_cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        name = {"dtype": str(dtype)[6:]}
        for rows, width in ((200704, 96), (200704, 384), (50176, 768), (12544, 1536), (2048, 384)):

            def given(r: int = rows, w: int = width, d: torch.dtype = dtype) -> Tensor:
                return made(r, w, dtype=d)

            weights = lambda w=width, d=dtype: [torch.ones(w, device=DEVICE, dtype=d) for _ in "wb"]  # noqa: E731
            told = {"rows": rows, "C": width, **name}
            yield {"kernel": "gelu", **told}, lambda g=given: (functional.gelu, [g()], [])
            yield {"kernel": "add", **told}, lambda g=given: (torch.add, [g(), g()], [])
            yield {"kernel": "clone", **told}, lambda g=given: (torch.clone, [g()], [])
            yield {"kernel": "to float32", **told}, lambda g=given: (
                lambda x: x.to(torch.float32 if x.dtype == torch.bfloat16 else torch.bfloat16),
                [g()], [],
            )  # fmt: skip
            yield {"kernel": "softmax", **told}, lambda g=given: (
                lambda x: x.softmax(-1), [g()], []
            )  # fmt: skip
            yield {"kernel": "layer_norm", **told}, lambda g=given, ws=weights, w=width: (
                lambda x, a, b: functional.layer_norm(x, (w,), a, b), [g(), *ws()], []
            )  # fmt: skip
        for tokens, heads, windows in ((49, 3, 4096), (49, 12, 1024), (196, 12, 64), (577, 12, 64)):
            told = {"rows": windows * heads * tokens, "C": tokens, **name}
            yield {"kernel": "softmax", **told}, lambda t=tokens, r=windows * heads, d=dtype: (
                lambda x: x.softmax(-1), [made(r, t, t, dtype=d)], []
            )  # fmt: skip
        for channels, pixels in ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7), (96, 56)):
            told = {"kernel": "batch_norm", "C": channels, "pixels": pixels, **name}

            def make(c: int = channels, p: int = pixels, d: torch.dtype = dtype) -> Any:
                w, b = (torch.ones(c, device=DEVICE) for _ in "wb")
                mean, var = torch.zeros(c, device=DEVICE), torch.ones(c, device=DEVICE)
                return (
                    lambda x, w, b: functional.batch_norm(x, mean, var, w, b, True),
                    [made(64, c, p, p, dtype=d), w, b], [],
                )  # fmt: skip

            yield told, make


KINDS = {
    "matmul": matmul_cases, "pointwise": pointwise_cases, "attention": attention_cases,
    "convolution": convolution_cases,
}  # fmt: skip


def seconds_of(call: Callable[[], object]) -> float:
    """The median of repeated runs."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    marks: list[Any] = []

    def timed(count: int) -> list[float]:
        marks[:] = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    few = median(timed(5))
    return median(timed(min(200, max(5, int(TOTAL / max(few, 1e-6))))))


def measure(case: Case) -> dict[str, Any]:
    told, make = case
    torch.backends.cuda.matmul.allow_tf32 = told.get("dtype") == "tf32"
    try:
        call, wanting, rest = make()
        for tensor in wanting:
            tensor.requires_grad_()
        with torch.no_grad():
            forward = seconds_of(lambda: call(*wanting, *rest))
        output = call(*wanting, *rest)
        gradient = torch.randn_like(output)
        backward = seconds_of(
            lambda: torch.autograd.grad(output, wanting, gradient, retain_graph=True)
        )
    except RuntimeError as error:
        return {**told, "fails": str(error).splitlines()[0]}
    return {**told, "forward_seconds": forward, "backward_seconds": backward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--of", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    date = datetime.now(UTC).isoformat(timespec="seconds")
    device = describe_device(DEVICE).model_dump(mode="json")
    head: dict[str, Any] = {"device": device, "versions": versions(), "date": date}
    big = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    head["copy_bytes_per_second"] = 2 * big.numel() / seconds_of(big.clone)
    del big
    with given.record.open("w") as file:
        print(json.dumps(head), file=file)
        for kind in given.of:
            for case in KINDS[kind]():
                print(json.dumps(measure(case)), file=file, flush=True)


if __name__ == "__main__":
    main()
