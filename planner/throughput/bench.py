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
from typing import TYPE_CHECKING

from planner.ledger.ledger import OperationKind

if TYPE_CHECKING:
    import torch

_TILE = 7  # the window's side in tokens, as in most published models
_HEAD_DIM = 32  # of every published Swin
_ROUNDS = 40  # at most, in the time there is
_TRIAL_SECONDS = 0.7  # of one trial's samples at most: a dozen and a half of them stay under 20 s
# A backward of attention is five matmuls where its forward is two, as the ledger counts them.
_ATTENTION_STEP = 3.5
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


def clock_of(device_type: str) -> Callable[[], float]:
    """What tells the seconds of a short call: on a CPU the time of the calling thread, where its
    clock is fine enough, else the time that passes."""
    fine = time.get_clock_info("thread_time").resolution <= _COARSEST_SECONDS
    return time.thread_time if device_type == "cpu" and fine else time.perf_counter


class Bench:
    """Timings on one device; every method returns rates or seconds."""

    def __init__(self, device: torch.device, workload: Workload) -> None:
        self.device = device
        self.work = workload
        self.clock = clock_of(device.type)

    def matmul_flops(self) -> dict[str, float]:
        """FLOP/s of [rows, C] @ [C, 4C] by dtype; tf32 and fp16 where the device is a GPU."""
        return self._rates({dtype: self._matmul(dtype) for dtype in self._dtypes()})

    def kind_shares(self, widest: str, moving: Mapping[str, float]) -> dict[OperationKind, float]:
        """What conv and attention reach of the matmul rate (of the dtype `widest`), and `moving`
        rates of that of a copy: each held against what is timed in turns with it."""
        dtype = "float32" if self.device.type == "cpu" or widest == "tf32" else widest
        conv_dtype = "tf32" if "tf32" in self._dtypes() else "float32"
        matrix = self._rates(
            {
                "conv": self._conv(),
                "attention": self._attention(dtype),
                "matmul": self._matmul(dtype),
                "matmul of conv": self._matmul(conv_dtype),
            }
        )
        return {
            "matmul": 1.0,
            "conv": min(1.0, matrix["conv"] / matrix["matmul of conv"]),
            "attention": min(1.0, matrix["attention"] / matrix["matmul"]),
            # A cache may make them look faster than a copy.
            "pointwise": min(1.0, moving["pointwise"] / moving["copy"]),
            "reduction": min(1.0, moving["reduction"] / moving["copy"]),
            "copy": min(1.0, moving["partition"] / moving["copy"]),
        }

    def moving_rates(self) -> dict[str, float]:
        """Bytes/s, read and written, of a copy that no cache holds, of GELU, of LayerNorm over
        C = 96, and of a window partition."""
        import torch

        images, side = self.work.images, self.work.side
        source = torch.ones(self.work.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        x = torch.randn(images, side, side, 96, device=self.device)
        moved = 2.0 * x.numel() * x.element_size()
        tiles = x.view(images, side // _TILE, _TILE, side // _TILE, _TILE, 96)
        functional = torch.nn.functional
        return self._rates(
            {
                "copy": Trial(lambda: target.copy_(source), 2.0 * self.work.copy_bytes),
                "pointwise": Trial(lambda: functional.gelu(x), moved),
                "reduction": Trial(lambda: functional.layer_norm(x, (96,)), moved),
                "partition": Trial(lambda: tiles.permute(0, 1, 3, 2, 4, 5).contiguous(), moved),
            }
        )

    def host_seconds(self) -> dict[str, float]:
        """The host's time per operation in a chain of small layers, by phase. On a GPU the device
        is idle meanwhile, so what is measured is the host."""
        import torch

        layers: list[torch.nn.Module] = []
        for _ in range(self.work.host_layers):
            layers += [torch.nn.Linear(64, 64), torch.nn.GELU()]
        model = torch.nn.Sequential(*layers).to(self.device)
        x = torch.randn(8, 64, device=self.device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def forward() -> torch.Tensor:
            output = model(x)
            assert isinstance(output, torch.Tensor)
            return output.sum()

        def forward_backward() -> None:
            forward().backward()

        forward_backward()  # the optimizer steps on gradients
        took = self._least(
            {
                "forward": Trial(forward),
                "both": Trial(forward_backward),
                "optimizer": Trial(optimizer.step),
            }
        )
        operations = len(layers) + 1
        # A Linear's backward is two matmuls, a sum and two accumulations, a GELU's one: 6 a pair.
        both = took["both"]
        backward = max(both - took["forward"], 0.1 * both) / (3 * len(layers))
        return {
            "forward": took["forward"] / operations,
            "backward": backward,
            # foreach AdamW: 12 multi-tensor operations a step, each a few launches.
            "optimizer": took["optimizer"] / 12,
            "zero_grad": backward,
        }

    def launch_seconds(self) -> float:
        """The host's time for one small kernel without autograd."""
        import torch

        x = torch.zeros(32, device=self.device)

        def many() -> None:
            for _ in range(100):
                x.add_(1.0)

        with torch.no_grad():
            return self._least({"launch": Trial(many)})["launch"] / 100

    def graphed_kernel_seconds(self) -> float:
        """The device's time for one small kernel inside a CUDA graph."""
        import torch

        x = torch.zeros(32, device=self.device)
        x.add_(1.0)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            for _ in range(200):
                x.add_(1.0)
        return self._least({"replay": Trial(graph.replay)})["replay"] / 200

    def _dtypes(self) -> tuple[str, ...]:
        if self.device.type != "cuda":
            return ("float32", "bfloat16")
        tf32 = ("tf32",) if self._has_tf32() else ()
        return ("float32", "bfloat16", "float16", *tf32)

    def _has_tf32(self) -> bool:
        import torch

        nvidia = torch.version.cuda is not None
        return nvidia and torch.cuda.get_device_capability(self.device) >= (8, 0)

    def _matmul(self, dtype: str) -> Trial:
        import torch

        rows, channels = self.work.rows, self.work.channels
        kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
        a = torch.randn(rows, channels, device=self.device).to(kind)
        b = torch.randn(channels, 4 * channels, device=self.device).to(kind)
        out = torch.empty(rows, 4 * channels, device=self.device, dtype=kind)
        precision = {"float32": "highest", "tf32": "high"}.get(dtype)
        flops = 2.0 * rows * channels * 4 * channels
        return Trial(lambda: torch.mm(a, b, out=out), flops, precision)

    def _conv(self) -> Trial:
        """A 4 × 4 patch embedding of 3 channels into 96, on images of (4 · side)² pixels."""
        import torch

        images, side = self.work.images, self.work.side
        x = torch.randn(images, 3, 4 * side, 4 * side, device=self.device)
        weight = torch.randn(96, 3, 4, 4, device=self.device)
        return Trial(
            lambda: torch.nn.functional.conv2d(x, weight, stride=4),
            2.0 * images * side * side * 96 * 48,
        )

    def _attention(self, dtype: str) -> Trial:
        """Fused window attention with a position bias, forward and backward: 4·N²·head_dim FLOPs a
        head, and 2.5 times as many.

        The bias needs a gradient, as a Swin's does: for one that needs none torch may take another
        kernel (cuDNN's on Hopper and Blackwell, check_attn_mask_shape in
        aten/src/ATen/native/transformers/sdp_utils_cpp.h).
        """
        import torch

        windows, heads, tokens = self.work.images * (self.work.side // _TILE) ** 2, 3, _TILE**2
        kind = getattr(torch, dtype)
        q, k, v = (
            torch.randn(windows, heads, tokens, _HEAD_DIM, device=self.device, dtype=kind)
            for _ in range(3)
        )
        padded = torch.zeros(1, heads, tokens, 56, device=self.device, dtype=kind)
        inputs = (q, k, v, padded)
        for tensor in inputs:
            tensor.requires_grad_()
        ahead = torch.ones_like(q)
        attend = torch.nn.functional.scaled_dot_product_attention

        def step() -> object:
            out = attend(q, k, v, attn_mask=padded[..., :tokens])
            return torch.autograd.grad(out, inputs, ahead)

        flops = 4.0 * windows * heads * tokens * tokens * _HEAD_DIM
        return Trial(step, _ATTENTION_STEP * flops)

    def _rates(self, trials: Mapping[str, Trial]) -> dict[str, float]:
        """The work of each trial per second."""
        return {name: trials[name].work / s for name, s in self._least(trials).items()}

    def _least(self, trials: Mapping[str, Trial]) -> dict[str, float]:
        """The least seconds of each call once warm, over samples of several calls each."""
        deadline = time.perf_counter() + _TRIAL_SECONDS * len(trials)
        return best_of_rounds({n: self._sampler(t) for n, t in trials.items()}, deadline)

    def _sampler(self, trial: Trial) -> Callable[[], float]:
        self._sample(trial, 1)
        once = max(self._sample(trial, 1), 1e-7)
        count = max(1, int(self.work.sample_seconds / once))
        return lambda: max(self._sample(trial, count) / count, 1e-12)

    def _sample(self, trial: Trial, count: int) -> float:
        import torch

        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(trial.precision or before)
        try:
            self._wait()
            start = self.clock()
            for _ in range(count):
                trial.call()
            self._wait()
            return self.clock() - start
        finally:
            torch.set_float32_matmul_precision(before)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
