"""What the device at hand achieves: measured in seconds, kept in the user's cache, read back.

`measure_rates` needs torch, which it imports itself; keeping and reading need none.
Legend: B images, C channels, H tokens a side, M window side, N = M² tokens of a window.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from planner.hardware.processor import cpu_name
from planner.step.ledger import OperationKind
from planner.throughput import MEASURED_UNCERTAINTY, DeviceRates

if TYPE_CHECKING:
    import torch

RATES_FORMAT = 1

_TILE = 7  # the window's side in tokens, as in most published models
_HEAD_DIM = 32  # of every published Swin
_SAMPLES = 5
_DEADLINE_SECONDS = 0.7  # of one quantity's samples: a dozen of them stay under 20 s


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
CPU_WORKLOAD = Workload(
    rows=1024, channels=256, copy_bytes=64 * 1024**2, images=4, side=56, host_layers=16,
    sample_seconds=0.03,
)  # fmt: skip


def measure_rates(
    device: str | torch.device = "cuda", workload: Workload | None = None
) -> DeviceRates:
    """The rates of `device` ("cuda", "cuda:1" or "cpu"), measured now, in under 20 s.

    What it allocates (under 2 GiB on a GPU) is given back to the allocator, not to the driver.
    """
    import torch

    where = torch.device(device)
    bench = _Bench(where, workload or (CUDA_WORKLOAD if where.type == "cuda" else CPU_WORKLOAD))
    matmul_flops = bench.matmul_flops()
    bandwidth = bench.copy_bandwidth()
    widest = max(matmul_flops, key=lambda dtype: matmul_flops[dtype])
    rates = DeviceRates(
        name=device_name(where),
        basis="",
        matmul_flops=matmul_flops,
        bandwidth=bandwidth,
        kind_share=bench.kind_shares(matmul_flops, bandwidth, widest),
        host_seconds=bench.host_seconds(),
        asynchronous=where.type == "cuda",
        uncertainty=MEASURED_UNCERTAINTY,
    )
    if where.type == "cuda":
        graphed = bench.graphed_kernel_seconds()
        # Outside a graph the next kernel is fetched as well: the assumed difference is kept.
        apart = rates.kernel_seconds - rates.graph_kernel_seconds
        rates = replace(
            rates, graph_kernel_seconds=graphed, kernel_seconds=graphed + apart,
            launch_seconds=bench.launch_seconds(),
        )  # fmt: skip
    else:
        # A CPU computes where it issues: its start is in `host_seconds` already, and there is no
        # launch to save.
        rates = replace(
            rates, kernel_seconds=0.0, graph_kernel_seconds=0.0, launch_seconds=0.0,
            compiled_launch_seconds=0.0, graph_seconds=0.0,
        )  # fmt: skip
    day = datetime.now(UTC).date().isoformat()
    return replace(rates, basis=f"measured on {rates.name}, torch {torch.__version__}, {day}")


def save_rates(rates: DeviceRates, torch_version: str | None = None) -> Path:
    """Keep `rates` for `load_rates`: one JSON file per device and torch version. Raises OSError
    where the cache cannot be written."""
    path = rates_path(rates.name, torch_version)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"format": RATES_FORMAT, "rates": asdict(rates)}
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        json.dump(data, file, indent=1)
    Path(file.name).replace(path)
    return path


def load_rates(name: str, torch_version: str | None = None) -> DeviceRates | None:
    """The rates kept for the device called `name` (`device_name`) under this torch version; None
    where none were measured, or what was kept is of another format or damaged."""
    try:
        data = json.loads(rates_path(name, torch_version).read_text(encoding="utf-8"))
        if data["format"] != RATES_FORMAT:
            return None
        return DeviceRates(**data["rates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rates_path(name: str, torch_version: str | None = None) -> Path:
    """The file that holds the rates of a device under a torch version (this one by default)."""
    key = re.sub(r"[^a-z0-9.+]+", "-", f"{name} torch {torch_version or _torch()}".casefold())
    return cache_directory() / "rates" / f"{key.strip('-')}.json"


def cache_directory() -> Path:
    """Where this user's programs keep what can be made again."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "planner"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "planner" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "planner"
    return Path.home() / ".cache" / "planner"


def device_name(device: str | torch.device) -> str:
    """What the driver calls a GPU; for the CPU its model and the threads it computes on."""
    import torch

    where = torch.device(device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return cpu_name()


class _Bench:
    """Timings on one device; every method returns rates or seconds."""

    def __init__(self, device: torch.device, workload: Workload) -> None:
        self.device = device
        self.work = workload

    def matmul_flops(self) -> dict[str, float]:
        """FLOP/s of [rows, C] @ [C, 4C] by dtype; tf32 and fp16 where the device is a GPU."""
        flops = {"float32": self._fp32_flops("highest"), "bfloat16": self._flops("bfloat16")}
        if self.device.type == "cuda":
            flops["float16"] = self._flops("float16")
            if self._has_tf32():
                flops["tf32"] = self._fp32_flops("high")
        return flops

    def copy_bandwidth(self) -> float:
        """Bytes/s, read and written, of a copy that no cache holds."""
        import torch

        source = torch.ones(self.work.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        seconds = self._seconds(lambda: target.copy_(source))
        return 2 * self.work.copy_bytes / seconds

    def kind_shares(
        self, matmul_flops: Mapping[str, float], bandwidth: float, widest: str
    ) -> dict[OperationKind, float]:
        """What conv and attention reach of the matmul rate, the others of the bandwidth."""
        dtype = "float32" if self.device.type == "cpu" or widest == "tf32" else widest
        conv_dtype = "tf32" if "tf32" in matmul_flops else "float32"
        return {
            "matmul": 1.0,
            "conv": min(1.0, self._conv_flops() / matmul_flops[conv_dtype]),
            "attention": min(1.0, self._attention_flops(dtype) / matmul_flops[dtype]),
            **{
                kind: min(1.0, rate / bandwidth)  # a cache may make them look faster than a copy
                for kind, rate in self._moving_rates().items()
            },
        }

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

        ahead = self._seconds(forward)
        both = self._seconds(forward_backward)
        stepping = self._seconds(optimizer.step)
        operations = len(layers) + 1
        # A Linear's backward is two matmuls, a sum and two accumulations, a GELU's one: 6 a pair.
        backward = max(both - ahead, 0.1 * both) / (3 * len(layers))
        # foreach AdamW: 12 multi-tensor operations a step, each a few launches.
        optimizer_seconds = stepping / 12
        return {
            "forward": ahead / operations,
            "backward": backward,
            "optimizer": optimizer_seconds,
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
            return self._seconds(many) / 100

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
        return self._seconds(graph.replay) / 200

    def _fp32_flops(self, precision: str) -> float:
        import torch

        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return self._flops("float32")
        finally:
            torch.set_float32_matmul_precision(before)

    def _flops(self, dtype: str) -> float:
        import torch

        rows, channels = self.work.rows, self.work.channels
        a = torch.randn(rows, channels, device=self.device).to(getattr(torch, dtype))
        b = torch.randn(channels, 4 * channels, device=self.device).to(getattr(torch, dtype))
        out = torch.empty(rows, 4 * channels, device=self.device, dtype=a.dtype)
        seconds = self._seconds(lambda: torch.mm(a, b, out=out))
        return 2 * rows * channels * 4 * channels / seconds

    def _conv_flops(self) -> float:
        """A 4 × 4 patch embedding of 3 channels into 96, on images of (4 · side)² pixels."""
        import torch

        side = self.work.side
        x = torch.randn(self.work.images, 3, 4 * side, 4 * side, device=self.device)
        weight = torch.randn(96, 3, 4, 4, device=self.device)
        seconds = self._seconds(lambda: torch.nn.functional.conv2d(x, weight, stride=4))
        return 2 * self.work.images * side * side * 96 * 48 / seconds

    def _attention_flops(self, dtype: str) -> float:
        """Forward of fused window attention with a position bias: 4·N²·head_dim FLOPs a head."""
        import torch

        windows, heads, tokens = self.work.images * (self.work.side // _TILE) ** 2, 3, _TILE**2
        kind = getattr(torch, dtype)
        q, k, v = (
            torch.randn(windows, heads, tokens, _HEAD_DIM, device=self.device).to(kind)
            for _ in range(3)
        )
        bias = torch.zeros(1, heads, tokens, 56, device=self.device).to(kind)[..., :tokens]
        attend = torch.nn.functional.scaled_dot_product_attention
        seconds = self._seconds(lambda: attend(q, k, v, attn_mask=bias))
        return 4 * windows * heads * tokens * tokens * _HEAD_DIM / seconds

    def _moving_rates(self) -> dict[OperationKind, float]:
        """Bytes/s of GELU, of LayerNorm over C = 96, and of a window partition."""
        import torch

        images, side = self.work.images, self.work.side
        x = torch.randn(images, side, side, 96, device=self.device)
        moved = 2 * x.numel() * x.element_size()
        tiles = x.view(images, side // _TILE, _TILE, side // _TILE, _TILE, 96)
        calls: dict[OperationKind, Callable[[], object]] = {
            "pointwise": lambda: torch.nn.functional.gelu(x),
            "reduction": lambda: torch.nn.functional.layer_norm(x, (96,)),
            "copy": lambda: tiles.permute(0, 1, 3, 2, 4, 5).contiguous(),
        }
        return {kind: moved / self._seconds(call) for kind, call in calls.items()}

    def _has_tf32(self) -> bool:
        import torch

        nvidia = torch.version.cuda is not None
        return nvidia and torch.cuda.get_device_capability(self.device) >= (8, 0)

    def _seconds(self, call: Callable[[], object]) -> float:
        """The least time of `call` once warm, in seconds, over samples of several calls each:
        whatever disturbs a sample only adds to it."""
        self._sample(call, 1)
        once = max(self._sample(call, 1), 1e-7)
        count = max(1, int(self.work.sample_seconds / once))
        deadline = time.perf_counter() + _DEADLINE_SECONDS
        best = self._sample(call, count)
        for _ in range(_SAMPLES - 1):
            if time.perf_counter() > deadline:
                break
            best = min(best, self._sample(call, count))
        return best / count

    def _sample(self, call: Callable[[], object], count: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
