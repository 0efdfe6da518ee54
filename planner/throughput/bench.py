"""Timings on the device at hand: rates of matrix work and of memory, seconds of the host.

Every trial is timed in several rounds that take all of its group in turn, and the least counts:
what disturbs for a while disturbs all alike, and not one dtype. On a CPU time is that of the
calling thread, which does its share of what is spread over threads and waits for no other process.
Legend: B images, C channels, H tokens a side, M window side, N = M² tokens of a window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer
from torch.utils.benchmark import timer as synchronized

from planner.ledger.ledger import OperationKind
from planner.machine.hardware.gpu import cpu_name
from planner.throughput.efficiency import (
    BACKWARD_MATMUL_SHARE,
    MEASURED_HOST_SPREAD,
    WIDE_UNCERTAINTY,
)
from planner.throughput.prediction import MEASURED_UNCERTAINTY, DeviceRates, host_of_chain

_TILE = 7  # the window's side in tokens, as in most published models
_HEAD_DIM = 32  # of every published Swin
_ROUNDS = 40  # at most, in the time there is
_TRIAL_SECONDS = 0.7  # of one trial's samples at most: a dozen and a half of them stay under 20 s
# A backward of attention is five matmuls where its forward is two, as the ledger counts them.
_ATTENTION_STEP = 3.5
_OF_KERNELS = (
    "kernel_seconds", "graph_kernel_seconds", "launch_seconds", "compiled_launch_seconds",
    "graph_seconds",
)  # fmt: skip
# A thread's clock coarser than this cannot time a sample.
_COARSEST_SECONDS = 1e-3


@dataclass(frozen=True)
class Workload:
    """How much to measure with. Matmuls are [rows, C] × [C, 4C], as in a Swin's MLP; `images`
    feature maps of `side`² tokens × `channels` go through the rest. `sample_seconds` is how long
    one sample lasts at least."""

    rows: int
    channels: int
    copy_bytes: int
    images: int
    side: int
    host_layers: int
    sample_seconds: float


# What is copied or normalised leaves a B200's L2 cache (126 MiB); all of it fits an 8 GiB card.
CUDA_WORKLOAD = Workload(
    rows=65536, channels=512, copy_bytes=512 * 1024**2, images=128, side=56, host_layers=64,
    sample_seconds=0.03,
)  # fmt: skip
# Samples so short that some find all threads at work: where one is kept waiting by other processes,
# those that wait for it spin, on their own time.
CPU_WORKLOAD = Workload(
    rows=1024, channels=256, copy_bytes=64 * 1024**2, images=4, side=56, host_layers=16,
    sample_seconds=0.001,
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A call to time, and what it does in FLOPs, bytes or operations. `precision` is that of fp32
    matmuls meanwhile, where it matters."""

    call: Callable[[], object]
    work: float = 1.0
    precision: str | None = None


def best_of_rounds(
    samples: Mapping[str, Callable[[], float]], deadline: float = math.inf, rounds: int = _ROUNDS
) -> dict[str, float]:
    """The least of each sample over rounds that take one of all in turn; one round at least, and no
    further one after `deadline` (an instant of `time.perf_counter`)."""
    least = dict.fromkeys(samples, math.inf)
    for _ in range(rounds):
        for name, sample in samples.items():
            least[name] = min(least[name], sample())
        if time.perf_counter() > deadline:
            break
    return least


class Bench:
    """Timings on one device; every method returns rates or seconds."""

    def __init__(self, device: torch.device, workload: Workload) -> None:
        self.device = device
        self.work = workload
        if device.type == "cuda":
            torch.cuda.set_device(device)  # torch's timer waits for this one

    def matmul_flops(self) -> dict[str, float]:
        """FLOP/s of [rows, C] @ [C, 4C] by dtype; tf32 and fp16 where the device is a GPU."""
        return self._rates({dtype: self._matmul(dtype) for dtype in self._dtypes()})

    def kind_shares(self, widest: str, moving: Mapping[str, float]) -> dict[OperationKind, float]:
        """What conv and attention reach of the matmul rate (of the dtype `widest`), and `moving`
        rates of that of a copy: each held against what is timed in turns with it. At most 1: a
        cache may make some look faster than a copy."""
        dtype = "float32" if self.device.type == "cpu" or widest == "tf32" else widest
        matrix = self._rates({
            "conv": self._conv(),
            "attention": self._attention(dtype),
            "matmul": self._matmul(dtype),
            "matmul of conv": self._matmul("tf32" if "tf32" in self._dtypes() else "float32"),
        })  # fmt: skip
        return {
            "matmul": 1.0,
            "conv": min(1.0, matrix["conv"] / matrix["matmul of conv"]),
            "attention": min(1.0, matrix["attention"] / matrix["matmul"]),
            "pointwise": min(1.0, moving["pointwise"] / moving["copy"]),
            "reduction": min(1.0, moving["reduction"] / moving["copy"]),
            "copy": min(1.0, moving["partition"] / moving["copy"]),
        }

    def moving_rates(self) -> dict[str, float]:
        """Bytes/s, read and written, of a copy that no cache holds, of GELU, of LayerNorm over
        C = 96, and of a window partition."""
        images, side = self.work.images, self.work.side
        source = torch.ones(self.work.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        x = self._randn(images, side, side, 96)
        moved = 2.0 * x.numel() * x.element_size()
        tiles = x.view(images, side // _TILE, _TILE, side // _TILE, _TILE, 96)
        return self._rates({
            "copy": Trial(lambda: target.copy_(source), 2.0 * self.work.copy_bytes),
            "pointwise": Trial(lambda: functional.gelu(x), moved),
            "reduction": Trial(lambda: functional.layer_norm(x, (96,)), moved),
            "partition": Trial(lambda: tiles.permute(0, 1, 3, 2, 4, 5).contiguous(), moved),
        })  # fmt: skip

    def host_seconds(self) -> dict[str, float]:
        """The host's time per operation in a chain of small layers, by phase. On a GPU the device
        is idle meanwhile, so what is measured is the host."""
        pairs = [(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(self.work.host_layers)]
        model = torch.nn.Sequential(*(layer for pair in pairs for layer in pair)).to(self.device)
        x = self._randn(8, 64)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        model(x).sum().backward()  # the optimizer steps on gradients
        took = self._least({
            "forward": Trial(lambda: model(x).sum()),
            "both": Trial(lambda: model(x).sum().backward()),
            "optimizer": Trial(optimizer.step),
        })  # fmt: skip
        # A Linear's backward is two matmuls, a sum and two accumulations, a GELU's one: 6 a pair.
        both = took["both"]
        backward = max(both - took["forward"], 0.1 * both) / (6 * len(pairs))
        return {
            "forward": took["forward"] / (2 * len(pairs) + 1),
            "backward": backward,
            # foreach AdamW: 12 multi-tensor operations a step, each a few launches.
            "optimizer": took["optimizer"] / 12,
            "zero_grad": backward,
        }

    def kernel_seconds(self) -> dict[str, Any]:
        """The fields of `DeviceRates` for what a small kernel costs: of a GPU the host's time
        without autograd, and the device's in a CUDA graph. Outside of one the next kernel is
        fetched as well: the assumed difference is kept. A CPU computes where it issues: its start
        is in `host_seconds`, and there is no launch to save."""
        if self.device.type == "cpu":
            return dict.fromkeys(_OF_KERNELS, 0.0)
        x, graph, count = torch.zeros(32, device=self.device), torch.cuda.CUDAGraph(), 200

        @torch.no_grad()
        def many() -> None:
            for _ in range(count):
                x.add_(1.0)

        many()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph):
            many()
        took = self._least({"launch": Trial(many), "replay": Trial(graph.replay)})
        launched, graphed = took["launch"] / count, took["replay"] / count
        apart = DeviceRates.kernel_seconds - DeviceRates.graph_kernel_seconds
        return dict(zip(_OF_KERNELS, (graphed + apart, graphed, launched), strict=False))

    def _dtypes(self) -> tuple[str, ...]:
        if self.device.type != "cuda":
            return ("float32", "bfloat16")
        capability = torch.cuda.get_device_capability(self.device)
        tf32 = ("tf32",) if torch.version.cuda is not None and capability >= (8, 0) else ()
        return ("float32", "bfloat16", "float16", *tf32)

    def _randn(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(getattr(torch, dtype))

    def _matmul(self, dtype: str) -> Trial:
        rows, channels = self.work.rows, self.work.channels
        kind = "float32" if dtype == "tf32" else dtype
        a = self._randn(rows, channels, dtype=kind)
        b = self._randn(channels, 4 * channels, dtype=kind)
        out = a.new_empty(rows, 4 * channels)
        precision = {"float32": "highest", "tf32": "high"}.get(dtype)
        return Trial(lambda: torch.mm(a, b, out=out), 8.0 * rows * channels**2, precision)

    def _conv(self) -> Trial:
        """A 4 × 4 patch embedding of 3 channels into 96, on images of (4 · side)² pixels."""
        images, side = self.work.images, self.work.side
        x, weight = self._randn(images, 3, 4 * side, 4 * side), self._randn(96, 3, 4, 4)
        flops = 2.0 * images * side * side * 96 * 48
        return Trial(lambda: functional.conv2d(x, weight, stride=4), flops)

    def _attention(self, dtype: str) -> Trial:
        """Fused window attention with a position bias, forward and backward: 4·N²·head_dim FLOPs a
        head, and 2.5 times as many.

        The bias needs a gradient, as a Swin's does: for one that needs none torch may take another
        kernel (cuDNN's on Hopper and Blackwell, check_attn_mask_shape in
        aten/src/ATen/native/transformers/sdp_utils_cpp.h).
        """
        windows, heads, tokens = self.work.images * (self.work.side // _TILE) ** 2, 3, _TILE**2
        shapes = [(windows, heads, tokens, _HEAD_DIM)] * 3 + [(1, heads, tokens, 56)]
        inputs = [self._randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]
        q, k, v, padded = inputs
        ahead = torch.ones_like(q)
        attend = functional.scaled_dot_product_attention

        def step() -> object:
            out = attend(q, k, v, attn_mask=padded[..., :tokens])
            return torch.autograd.grad(out, inputs, ahead)

        flops = 4.0 * windows * heads * tokens * tokens * _HEAD_DIM
        return Trial(step, _ATTENTION_STEP * flops)

    def _rates(self, trials: Mapping[str, Trial]) -> dict[str, float]:
        """The work of each trial per second."""
        return {name: trials[name].work / s for name, s in self._least(trials).items()}

    def _least(self, trials: Mapping[str, Trial]) -> dict[str, float]:
        """The least seconds of each call once warm, over samples of several calls each. The
        precision of fp32 matmuls is left as it was."""
        before = torch.get_float32_matmul_precision()
        deadline = time.perf_counter() + _TRIAL_SECONDS * len(trials)
        try:
            samplers = {n: self._sampler(trial, before) for n, trial in trials.items()}
            return best_of_rounds(samplers, deadline)
        finally:
            torch.set_float32_matmul_precision(before)

    def _sampler(self, trial: Trial, precision: str) -> Callable[[], float]:
        """By torch's own timer, which warms each sample up and waits for a GPU."""
        is_fine = time.get_clock_info("thread_time").resolution <= _COARSEST_SECONDS
        own = self.device.type == "cpu" and is_fine
        timer = Timer(
            "call()", f"torch.set_float32_matmul_precision({trial.precision or precision!r})",
            timer=time.thread_time if own else synchronized, globals={"call": trial.call},
            num_threads=torch.get_num_threads(),
        )  # fmt: skip
        count = max(1, int(self.work.sample_seconds / max(timer.timeit(1).mean, 1e-7)))
        return lambda: timer.timeit(count).mean


def measure_rates(
    device: str | torch.device = "cuda", workload: Workload | None = None
) -> DeviceRates:
    """The rates of `device` ("cuda", "cuda:1" or "cpu"), measured now, in under 20 s.

    What it allocates (3.33 GiB on an emulated GPU) is given back to torch, not to the driver.
    """
    where = torch.device(device)
    is_gpu = where.type == "cuda"
    name = torch.cuda.get_device_name(where) if is_gpu else cpu_name()  # as its driver says it
    bench = Bench(where, workload or (CUDA_WORKLOAD if is_gpu else CPU_WORKLOAD))
    matmul_flops = bench.matmul_flops()
    moving = bench.moving_rates()
    widest = max(matmul_flops, key=lambda dtype: matmul_flops[dtype])
    host = bench.host_seconds()
    # Of an H100 they made compiled steps 22% too fast and eager ones 33% too slow.
    known_to = WIDE_UNCERTAINTY if is_gpu else MEASURED_UNCERTAINTY
    return DeviceRates(
        name=name,
        basis=f"measured on {name}, torch {torch.__version__}, {datetime.now(UTC).date()}",
        matmul_flops=matmul_flops,
        bandwidth=moving["copy"],
        kind_share=bench.kind_shares(widest, moving),
        host_seconds=host_of_chain(host["forward"], host["backward"]) if is_gpu else host,
        host_spread=MEASURED_HOST_SPREAD,
        asynchronous=is_gpu,
        uncertainty=known_to,
        other_uncertainty=known_to,
        # Measured forwards: backward's products are shaped otherwise, on a GPU to their cost.
        backward_matmul_share=BACKWARD_MATMUL_SHARE if is_gpu else 1.0,
        compiled_bandwidth=moving["copy"] if is_gpu else None,  # an H200's kernels reach a copy's
        **bench.kernel_seconds(),
    )
