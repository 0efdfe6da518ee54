"""What kernels reach of a datasheet's figures, fitted to measurements.

First the fitted shares, then functions that choose them for a GPU, then what was not fitted, and
last `DeviceRates`, which the prediction reads, and `rates_for`, which makes it for a GPU.

`tests/benchmarks/fit_rates.py` prints the rows, the fit and the errors of the held-out rows. The
rows stand in `tests/truth/public.jsonl`, `tests/truth/h200` and `tests/truth/h100`. The HBM rows
come from an A100, an H200 and an H100; the GDDR rows from an RTX 3090, and, for the forward only,
from an RTX 4090 and a 5090.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.record import Phase
from planner.ledger.ledger import Computed, OperationKind
from planner.machine.hardware.gpu import ASSUMED_LINK, Gpu
from planner.throughput.result import COLLECTIVE_WAIT, HOST_WAIT

# The share of the bandwidth that element-wise kernels on large tensors reach at most. Copies and
# additions by themselves reach 0.89 on an H100 and an H200 (tests/truth/h100/kernels.jsonl); the
# share of GDDR is fitted.
BANDWIDTH_SHARE = MappingProxyType({"HBM": 0.89, "GDDR": 0.92})
# Most kernels of an eager step do more than that. On HBM whole eager steps take as long as if each
# multiprocessor moved this many bytes per clock. Fitted, by architecture, to an A100 80 GB and to
# both Hoppers, of which one has 1.43 times the other's bandwidth. Where the architecture or the
# clock is unknown, an eager step reaches UNKNOWN_BANDWIDTH_SHARE of the bandwidth.
EAGER_BYTES_PER_CLOCK = MappingProxyType({"Hopper": 8.2, "Ampere": 7.1})
UNKNOWN_BANDWIDTH_SHARE = 0.50
# The share of that bandwidth which softmax, LayerNorm, their backwards and sums over rows reach.
REDUCTION_SHARE = 0.65
# The share of the bandwidth that all kernels written by torch.compile reach: what a copy reaches on
# an NVIDIA H200 (torch 2.11.0, 2026-11-26). With it the predictions of compiled steps of Swins from
# batch 256 on, there and on an H100, are 6% off at most (tests/test_truth.py).
COMPILED_BANDWIDTH_SHARE = 0.87
# The share of an eager step's bandwidth that batched matmuls in 16 bits reach, as eager attention
# runs them: rows of 49 or 197 numbers are aligned to no wide load. It is what the steps of Swin-T
# and Swin-B spend on an H100 (tests/truth/h100/profiles.jsonl).
BATCHED_MATMUL_SHARE = 0.6
# The share of the peak FLOP/s that fp32 matmuls on the CUDA cores reach, by architecture.
FP32_MATMUL_SHARE = MappingProxyType({"Hopper": 0.87, "": 1.0})
# The share of its forward rate that a matmul reaches in backward, where it sums over all tokens or
# reads a transposed matrix.
BACKWARD_MATMUL_SHARE = 0.70

# Fitted, 2026-11-26, to three quarters of the rates of timm's models at 224 px under fp16 autocast
# that huggingface/pytorch-image-models @aa4b5850 publishes in results/: steps on an RTX 3090 (torch
# 1.12), forwards on that, an RTX 4090 (torch 2.4) and 5090 (2.9). `python -m
# tests.benchmarks.model_rates` prints them. The share of the matmul rate that dense convolutions
# reach, and fused attention by whichever kernel, over windows too. On Hopper convolutions reach
# less: 0.5 in steps of ResNets and a VGG-16 on an H100, and more on an H200.
CONVOLUTION_SHARE = MappingProxyType({"Hopper": 0.6, "": 0.74})
ATTENTION_SHARE = 0.54
# FLOPs per clock and multiprocessor of the one fused-attention kernel that takes a bias, for 16-bit
# heads of 32 numbers: for windows that fit into one tile of 64 tokens, and for larger ones, where
# the padding of the last tile counts too. The first is what the steps of a Swin-T spend on an
# NVIDIA H100 (torch 2.11.0, 2026-11-27, tests/truth/h100/profiles.jsonl), the second was measured
# on an H200 (tests/truth/h200/kernels.jsonl). fp32's share of both is that of whole steps of Swin-T
# there.
WINDOW_TILE = 64
ONE_TILE_FLOPS, MORE_TILES_FLOPS = 150.0, 165.0
FP32_ATTENTION = 0.5
# Attention of other models on Hopper, in 16 bits. FlashAttention and cuDNN reach
# LONG_ATTENTION_SHARE of the matmul rate once a sequence has many tokens, and half of that at
# HALFWAY_TOKENS: fitted to kernels of an H100, and to the steps of a ViT-B/16 there, whose 197
# tokens get 123 TFLOP/s. The kernel that takes a bias does BIASED_FLOPS per clock and
# multiprocessor: 90 with heads of 32 numbers, 184 with heads of 64
# (tests/truth/h100/profiles.jsonl).
LONG_ATTENTION_SHARE, HALFWAY_TOKENS, BIASED_FLOPS = 0.5, 440.0, 130.0
# The share of the bandwidth that dense convolutions of few channels reach: matrix units run them
# channels last, and tensors in another layout are copied before and after.
CONVOLUTION_BANDWIDTH_SHARE = 0.50
# The same share where every tensor is channels last, and nothing is copied. On GDDR and Hopper the
# fitted rates ask for no other share. On older HBM that share would predict a ResNet-50 0.70 times
# as fast on an A100, and 0.60 times on a V100, as NVIDIA publishes it; with this one it is 0.81 and
# 0.69 times.
CHANNELS_LAST_SHARE = MappingProxyType({"HBM": 1.0, "GDDR": 0.50, "Hopper": 0.50})
# Bytes per clock and multiprocessor of a training batch norm in 16 bits, counting each byte that it
# reads or writes once. One block of threads works on one channel, so that fewer channels than
# multiprocessors leave some idle. An RTX 3090's steps ask for 1.95, and kernels of an H200 for 2.1
# (tests/truth/h200/kernels.jsonl). In fp32 on Hopper it moves BATCH_NORM_FP32 times as much, and at
# most BATCH_NORM_MAX_SHARE of the bandwidth. Channels last, other kernels spread over rows.
# BATCH_NORM_SHARE is for cards whose clock is unknown.
BATCH_NORM_BYTES = 1.95
BATCH_NORM_FP32, BATCH_NORM_MAX_SHARE = 3.2, 0.76
BATCH_NORM_SHARE = 0.345
# The share of a reduction's rate that pooling and its backward reach: between what VGG-16 and a
# PoolFormer have on an H100 (0.25, tests/truth/h100/profiles.jsonl) and what the published rates
# ask for (0.5).
POOLING_SHARE = 0.4
# The share of the CUDA cores' FLOP/s that grouped (and depthwise) convolutions reach, in any dtype,
# when they do one multiply-add per element that they move; the share grows with a power of that
# number. HBM's share is that of ConvNeXts on an A100 (MzeroMiko/VMamba @9fd253f analyze/tp.log,
# torch 2.2, which asks cuDNN for deterministic algorithms). On Hopper their time grows only with
# what they move, however wide a group is: fitted to an H200's steps (tests/truth/h200/rows.jsonl,
# torch 2.11, cuDNN 9.19).
GROUPED_SHARE = MappingProxyType({"HBM": 0.011, "GDDR": 0.040, "Hopper": 0.0035})
GROUPED_POWER = MappingProxyType({"HBM": 0.47, "GDDR": 0.47, "Hopper": 1.0})

# The share of the link to the host that copies from and to pinned memory reach. Quoted: 77 to 83%
# of PCIe 3.0 x16 (P100, mpicbg-scicomp/gearshifft pull request 82; RTX 2080 Ti, issue 22 of
# usadellab/Helixer), 80% of 4.0 (A100, issue 42 of NVIDIA/nvbandwidth), 88% of 5.0 (H100, NVIDIA's
# article on nvbandwidth). The host's own memory and processor can make it far less.
LINK_SHARE = 0.80

# Share of the peak that the best shape of a large bf16 matmul reaches. Quoted: "Maximum Achievable
# Matmul FLOPS", stas00/ml-engineering, torch 2.5-2.7 (A100 SXM 86.9%, PCIe 81.1%, GH200 83.6%, H100
# SXM 80.3%, B200 77.6%, MI250X 76.7%, MI300X 60.1%). Other cards are taken to reach an A100 PCIe's
# share, but for those whose tensor rate is cut to 2 x FP32 (GeForce): their clocks exceed the
# advertised boost and little bandwidth feeds them. A further share for Swin's shapes was fitted and
# came out as 1, so there is none.
_BEST_MATMUL_SHARE = MappingProxyType(
    {"a100-sxm": 0.869, "gh200": 0.836, "Hopper": 0.803, "b200": 0.776, "CDNA2": 0.767,
     "CDNA3": 0.601}
)  # fmt: skip
_OTHER_MATMUL_SHARE = 0.811
_CUT_RATE_MATMUL_SHARE = 1.0

# How far a predicted step time may be off, either way, as a share of it. A card with published
# training rows has the worst error over all its rows, rounded up to the next 5%; so have the two
# cards that we measured. All others have the wide one, a judgement: rows of only the forward narrow
# nothing.
WIDE_UNCERTAINTY = 0.35
MEASURED_CARDS = MappingProxyType(
    {"a100-sxm-80gb": 0.10, "rtx-3090": 0.15, "h100-sxm-80gb": 0.15, "h200-sxm-141gb": 0.15}
)
# The measured cards that have rows with fused attention.
FUSED_CARDS = frozenset(("h100-sxm-80gb", "h200-sxm-141gb"))
# How many times as long, or as short, an unmeasured host may take. With this, 7 of 120 eager steps
# of Swins on an H200 and an H100 have a rate outside their range.
HOST_SPREAD = 1.4
# The uncertainty of a model that is no Swin, by kind of operation: a step has their mean, weighted
# by seconds. Fitted with the shares above, so that it holds nine of ten rows, and rounded up to the
# next 5%. No kind has less than matmuls, and fused attention, whose backward nobody timed, has the
# wide one. What copies reach depends most on their layout. Kinds that entered no fit have a width
# that holds all published steps (tests/benchmarks/model_rates.jsonl): convolutions in fp32
# (ResNet-50 on V100s), grouped convolutions that are channels last (timm's on an RTX 3090, a
# RegNetX 2.6 times as slow as predicted) and dense ones (there, and on older HBM NVIDIA's on an
# A100 and V100s).
KIND_UNCERTAINTY = MappingProxyType(
    {"matmul": 0.10, "conv": 0.15, "grouped conv": 0.15, "attention": WIDE_UNCERTAINTY,
     "pointwise": 0.20, "reduction": 0.15, "copy": 1.0, "conv fp32": 0.60,
     "grouped conv channels_last": 2.0}
)  # fmt: skip
CHANNELS_LAST_UNCERTAINTY = MappingProxyType({"HBM": 1.2, "GDDR": 0.25, "Hopper": 0.15})
MAX_UNCERTAINTY = 0.90  # the slowest is a tenth as fast as predicted


def memory_kind(gpu: Gpu) -> str:
    """GDDR or HBM, of which kernels reach a smaller share."""
    return "GDDR" if gpu.memory_type.startswith("GDDR") else "HBM"


def clocks_per_second(gpu: Gpu) -> float | None:
    """Clocks per second, summed over all multiprocessors; None where the card's are unknown."""
    return None if gpu.boost_mhz is None else gpu.num_sms * gpu.boost_mhz * 1e6


def bandwidth_share(gpu: Gpu) -> float:
    """The share of the bandwidth that an eager step reaches on large tensors."""
    max_share = BANDWIDTH_SHARE[memory_kind(gpu)]
    if memory_kind(gpu) == "GDDR":
        return max_share
    bytes_per_clock, clocks = EAGER_BYTES_PER_CLOCK.get(gpu.architecture), clocks_per_second(gpu)
    if bytes_per_clock is None or clocks is None:
        return UNKNOWN_BANDWIDTH_SHARE
    return min(max_share, bytes_per_clock * clocks / gpu.bandwidth)


def window_attention_flops(gpu: Gpu, tokens: int) -> dict[str, float] | None:
    """FLOP/s of fused attention over windows of `tokens`, by dtype; None where the card's
    multiprocessors or their clock are unknown."""
    clocks = clocks_per_second(gpu)
    if clocks is None:
        return None
    padded_tokens = -(-tokens // WINDOW_TILE) * WINDOW_TILE
    flops_per_clock = ONE_TILE_FLOPS if padded_tokens == WINDOW_TILE else MORE_TILES_FLOPS
    half = flops_per_clock * clocks * (tokens / padded_tokens) ** 2
    return {"float32": half * FP32_ATTENTION, "bfloat16": half, "float16": half}


def biased_flops(gpu: Gpu) -> float | None:
    """FLOP/s of fused attention with a bias, in 16 bits; None where all kernels have one share."""
    clocks = clocks_per_second(gpu)
    return None if gpu.architecture != "Hopper" or clocks is None else BIASED_FLOPS * clocks


def batch_norm_share(gpu: Gpu) -> float:
    """The share of an eager step's bandwidth that a batch norm with channels for all
    multiprocessors reaches."""
    clocks = clocks_per_second(gpu)
    if clocks is None:
        return BATCH_NORM_SHARE
    return min(REDUCTION_SHARE, clocks * BATCH_NORM_BYTES / (gpu.bandwidth * bandwidth_share(gpu)))


def convolution_share(gpu: Gpu) -> float:
    return CONVOLUTION_SHARE.get(gpu.architecture, CONVOLUTION_SHARE[""])


def grouped_kind(gpu: Gpu) -> str:
    """The key of the shares for grouped convolutions."""
    return gpu.architecture if gpu.architecture in GROUPED_SHARE else memory_kind(gpu)


def tensor_matmul_share(gpu: Gpu) -> float:
    """The share of the peak FLOP/s that matmuls on matrix units (tf32, bf16, fp16) reach."""
    for key, share in _BEST_MATMUL_SHARE.items():
        if gpu.name.startswith(key) or gpu.architecture == key:
            return share
    cut_rate = gpu.fp16_flops is not None and gpu.fp16_flops < 2.5 * gpu.fp32_flops
    return _CUT_RATE_MATMUL_SHARE if cut_rate else _OTHER_MATMUL_SHARE


def fp32_matmul_share(gpu: Gpu) -> float:
    """The share of the peak FLOP/s that fp32 matmuls reach; AMD runs them on matrix units too."""
    if gpu.vendor != "NVIDIA":
        return tensor_matmul_share(gpu)
    return FP32_MATMUL_SHARE.get(gpu.architecture, FP32_MATMUL_SHARE[""])


# What follows was not fitted.

MATRIX_KINDS = frozenset(("matmul", "conv", "grouped conv", "attention"))
_BATCHED = frozenset(("aten.bmm", "aten.baddbmm"))

# The share of the matmul rate that convolutions and fused attention reach, and the share of the
# bandwidth that each other kind of operation reaches.
_KIND_SHARE: Mapping[OperationKind, float] = MappingProxyType(
    {"matmul": 1.0, "conv": CONVOLUTION_SHARE[""], "grouped conv": 1.0,
     "attention": ATTENTION_SHARE, "pointwise": 1.0,
     "reduction": REDUCTION_SHARE, "copy": 1.0, "transfer": 1.0}
)  # fmt: skip
# Start and drain of one kernel on the device, and of one inside a CUDA graph.
_KERNEL_SECONDS = 3e-6
_GRAPH_KERNEL_SECONDS = 1.5e-6
# Host seconds per operation. "forward": Python modules, dispatcher and autograd's recording;
# "backward": autograd's engine; "recomputed": a forward operation that backward runs again, whose
# saved tensors each pass two hooks in Python; "backward launch": each further launch of a backward
# operation; "list": each launch over a list of weights (foreach, fused), whose elements Python
# looks at. Chosen 2026-11-30 by the processor seconds of 79 steps of Swins and 13 other models on
# the emulated GPU, where kernels do nothing (`python -m tests.truth.host --law`), and by 120 steps
# on an NVIDIA H200 and an H100, times 2.6: that lies between the hosts of these two, by their
# measured chains of small layers.
HOST_SECONDS: Mapping[str, float] = MappingProxyType(
    {"forward": 31e-6, "backward": 23e-6, "optimizer": 26e-6, "zero_grad": 12e-6,
     "recomputed": 112e-6, "backward launch": 150e-6, "list": 187e-6}
)  # fmt: skip
_LAUNCH_SECONDS = 9.6e-6
# Host seconds per launch from the wrapper of compiled code, and per replay of a CUDA graph.
_COMPILED_LAUNCH_SECONDS = 6e-6
_GRAPH_SECONDS = 30e-6
# Host seconds per call of a compiled block, and per backward through it (guards, AOTAutograd's
# wrapper).
# Measured: 64 and 67 us with its one kernel (torch 2.13, one thread of an AMD EPYC, 2026-11-22).
_REGION_SECONDS = 60e-6


@dataclass(frozen=True)
class DeviceRates:
    """What a device achieves, and `basis`: how that is known.

    `matmul_flops` is the FLOP/s that a large matmul reaches, by dtype ("float32", "tf32",
    "bfloat16", "float16", "float8"). `bandwidth` is the bytes/s of a copy (read + written).
    `kind_share` scales the matmul rate of conv and attention, and the bandwidth of pointwise,
    reduction and copy. A matmul in backward reaches `backward_matmul_share` of its rate.
    `batch_norm_share`, `convolution_bandwidth_share` and `channels_last_share` are shares of the
    bandwidth. `grouped_share` is a share of fp32's matmul rate; it grows with the power
    `grouped_power` of the multiply-adds per element. `num_sms` is the number of multiprocessors,
    where known.
    `link_bandwidth` is bytes/s between device and pinned host memory, either way. `attention_flops`
    is the FLOP/s of fused attention, by dtype; `biased_flops` that of the kernel that takes a bias,
    where the rate of the other kernels depends on the length of a sequence. `compiled_bandwidth` is
    the bytes/s of all kernels that torch.compile writes, reductions too, where it was measured.
    `host_seconds` is the host's cost of an operation, by phase and by case (HOST_SECONDS);
    `host_spread` says how many times as long or as short it may be. `asynchronous`: the host runs
    ahead (CUDA); otherwise the host computes (CPU) and both times add up.
    `uncertainty` is relative: 0.35 means that the time may be off by 35% either way. It holds for
    eager steps in fp32 or 16 bits with eager attention, as most are measured, and with fused
    attention where `knows_fused`; `other_uncertainty` holds for all others.
    `kind_uncertainty`, where set, gives it by kind of operation in place of `uncertainty`: by the
    kind, or by the kind and a setting's precision or memory format ("conv fp32").
    """

    name: str
    basis: str
    matmul_flops: Mapping[str, float]
    bandwidth: float
    kind_share: Mapping[OperationKind, float] = field(default_factory=lambda: dict(_KIND_SHARE))
    kernel_seconds: float = _KERNEL_SECONDS
    graph_kernel_seconds: float = _GRAPH_KERNEL_SECONDS
    host_seconds: Mapping[str, float] = field(default_factory=lambda: dict(HOST_SECONDS))
    host_spread: float = HOST_SPREAD
    launch_seconds: float = _LAUNCH_SECONDS
    compiled_launch_seconds: float = _COMPILED_LAUNCH_SECONDS
    graph_seconds: float = _GRAPH_SECONDS
    region_seconds: float = _REGION_SECONDS
    asynchronous: bool = True
    uncertainty: float = WIDE_UNCERTAINTY
    other_uncertainty: float = WIDE_UNCERTAINTY
    kind_uncertainty: Mapping[str, float] | None = None
    backward_matmul_share: float = 1.0
    batched_matmul_share: float = 1.0
    pooling_share: float = 1.0
    batch_norm_share: float | None = None
    convolution_bandwidth_share: float = 1.0
    channels_last_share: float = 1.0
    num_sms: int | None = None
    grouped_share: float | None = None
    grouped_power: float = GROUPED_POWER["HBM"]
    link_bandwidth: float = LINK_SHARE * ASSUMED_LINK
    attention_flops: Mapping[str, float] | None = None
    biased_flops: float | None = None
    compiled_bandwidth: float | None = None
    knows_fused: bool = False

    def matmul_rate(self, dtype: str, precision: str) -> float:
        """FLOP/s of a matmul on `dtype`. A dtype without matrix units runs at fp32's rate."""
        if dtype == "float32" and precision == "tf32" and "tf32" in self.matmul_flops:
            return self.matmul_flops["tf32"]
        dtype = "float8" if dtype.startswith("float8") else dtype
        return self.matmul_flops.get(dtype, self.matmul_flops["float32"])

    def matrix_rate(self, phase: Phase, operation: Computed, precision: str) -> float:
        """FLOP/s of a matmul, convolution or attention in `phase` under a setting's `precision`."""
        if operation.kind == "grouped conv":
            return self._grouped_rate(phase, operation, precision)
        if operation.kind == "attention" and self.attention_flops is not None:
            return self.attention_flops[operation.dtype]
        if operation.kind == "attention" and self.biased_flops and operation.dtype != "float32":
            return self._attention_rate(operation)
        if operation.kind == "conv" and precision != "fp32":
            precision = "tf32"  # cuDNN's default, which only a setting of fp32 turns off
        rate = self.matmul_rate(operation.dtype, precision) * self.kind_share[operation.kind]
        is_slower = phase == "backward" and operation.kind == "matmul"
        return rate * self.backward_matmul_share if is_slower else rate

    def _attention_rate(self, operation: Computed) -> float:
        """FLOP/s of fused attention in 16 bits, by its kernel and the tokens of a sequence: these
        are twice its FLOPs per byte."""
        assert self.biased_flops is not None
        if "efficient" in operation.name:
            return self.biased_flops
        tokens = max(1.0, 2 * operation.flops / max(operation.num_bytes, 1))
        long_rate = self.matmul_rate(operation.dtype, "") * LONG_ATTENTION_SHARE
        return long_rate * tokens / (tokens + HALFWAY_TOKENS)

    def _grouped_rate(self, phase: Phase, operation: Computed, precision: str) -> float:
        """FLOP/s of a grouped convolution, by its multiply-adds per element that it moves: at most
        a dense convolution's rate, and just that where no share is known."""
        dense = self.matrix_rate(phase, operation._replace(kind="conv"), precision)
        if self.grouped_share is None:
            return dense
        element_bytes = 4 if operation.dtype == "float32" else 2
        multiply_adds = operation.flops / 2 / max(operation.num_bytes / element_bytes, 1)
        rate = self.matmul_flops["float32"] * self.grouped_share
        return min(dense, rate * float(multiply_adds**self.grouped_power))

    def moving_rate(self, operation: Computed, memory_format: str = "contiguous") -> float:
        """Bytes/s at which `operation` reads and writes its tensors, if that is what bounds it."""
        if operation.kind == "conv":
            is_last = memory_format == "channels_last"
            share = self.channels_last_share if is_last else self.convolution_bandwidth_share
            return self.bandwidth * share
        if operation.kind in MATRIX_KINDS:
            is_batched = operation.name in _BATCHED and operation.dtype != "float32"
            return self.bandwidth * (self.batched_matmul_share if is_batched else 1.0)
        kind_rate = self.bandwidth * self.kind_share[operation.kind]
        if "pool" in operation.name:
            return kind_rate * self.pooling_share
        if self.batch_norm_share is None or "batch_norm" not in operation.name:
            return kind_rate
        busy_share = min(1.0, _num_channels(operation) / self.num_sms) if self.num_sms else 1.0
        share = self.batch_norm_share * busy_share
        if operation.dtype == "float32":
            share = min(BATCH_NORM_MAX_SHARE, BATCH_NORM_FP32 * share)
        channel_rate = self.bandwidth * share
        # Channels last, other kernels spread over rows: never slower (an H100's ResNet-50).
        return channel_rate if memory_format == "contiguous" else max(kind_rate, channel_rate)

    def uncertainty_of(
        self, setting: TrainSetting, seconds: Mapping[str, float], host: float = 0.0
    ) -> float:
        """The relative uncertainty of a step of `setting`, which spends `seconds` by kind of
        operation and `host` seconds on the host. A measurement narrows it only for settings like
        the measured ones. Where the step may wait for the host, the uncertainty is at least as wide
        as the host's range."""
        total = sum(seconds.values())
        device = total - seconds.get(HOST_WAIT, 0.0) - seconds.get(COLLECTIVE_WAIT, 0.0)
        width = self._device_uncertainty(setting, seconds)
        if not self.asynchronous or not total:
            return width
        slow = max(total, self.host_spread * host)
        fast = min(total, max(device, host / self.host_spread))
        return max(width, 1 - total / slow, total / fast - 1)

    def _device_uncertainty(self, setting: TrainSetting, seconds: Mapping[str, float]) -> float:
        by_kind = self.kind_uncertainty
        is_measured = setting.compile == "off" and setting.precision not in ("tf32", "fp8")
        is_measured &= setting.offload == "none" and setting.offload_optimizer == "none"
        is_measured &= by_kind is not None or self.knows_fused or setting.attention == "eager"
        width = self.uncertainty if is_measured else self.other_uncertainty
        if by_kind is None:
            return width
        total = weighted = 0.0
        for kind, kind_seconds in seconds.items():
            special_keys = f"{kind} {setting.memory_format}", f"{kind} {setting.precision}"
            special = [by_kind[key] for key in special_keys if key in by_kind]
            usual = by_kind.get(kind, WIDE_UNCERTAINTY)
            weighted += kind_seconds * max(special, default=usual)
            total += kind_seconds
        mean = weighted / total if total else WIDE_UNCERTAINTY
        return max(min(mean, MAX_UNCERTAINTY), width)


def _num_channels(operation: Computed) -> float:
    """C, of a training batch norm of N elements and C channels, solved from its cost
    (`recording.costs`): N + 2 C FLOPs, and s N + t C bytes, where s is twice or three times the
    element's size and t is 24 or 28, for the weights and statistics of a channel."""
    passes, channel_bytes = (3, 28) if "backward" in operation.name else (2, 24)
    element_bytes = passes * (4 if operation.dtype == "float32" else 2)
    channels = float(operation.num_bytes - element_bytes * operation.flops)
    channels /= channel_bytes - 2 * element_bytes
    return max(abs(channels), 1.0)  # negative without running statistics (standardised weights)


def rates_for(gpu: Gpu, model: Model | None = None) -> DeviceRates:
    """What `gpu` should achieve: its datasheet's figures times the fitted shares. The published
    steps are those of Swins: for another `model` the uncertainty is wider."""
    is_swin = model is None or isinstance(model, SwinConfig)
    tensor = tensor_matmul_share(gpu)
    bandwidth = bandwidth_share(gpu)
    peaks = {"tf32": gpu.tf32_flops, "bfloat16": gpu.bf16_flops, "float16": gpu.fp16_flops,
             "float8": gpu.fp8_flops}  # fmt: skip
    flops = {dtype: peak * tensor for dtype, peak in peaks.items() if peak is not None}
    fp32 = gpu.fp32_flops * fp32_matmul_share(gpu)
    grouped = grouped_kind(gpu)
    units = "fp32 lanes" if gpu.fp16_flops == gpu.fp32_flops else "matrix units"
    reservation = "" if gpu.name in MEASURED_CARDS else ", none of them of this card"
    return DeviceRates(
        name=gpu.name,
        basis=(
            f"datasheet of {gpu.title}; assumes {bandwidth:.0%} of its bandwidth (fitted to "
            f"measurements{reservation}) and {tensor:.0%} of its {units}' FLOP/s (quoted)"
        ),
        matmul_flops={"float32": fp32, **flops},
        bandwidth=gpu.bandwidth * bandwidth,
        kind_share={**_KIND_SHARE, "conv": convolution_share(gpu)},
        uncertainty=MEASURED_CARDS.get(gpu.name, WIDE_UNCERTAINTY),
        compiled_bandwidth=gpu.bandwidth * max(bandwidth, COMPILED_BANDWIDTH_SHARE),
        knows_fused=gpu.name in FUSED_CARDS,
        kind_uncertainty=None
        if is_swin
        else {**KIND_UNCERTAINTY, "conv channels_last": CHANNELS_LAST_UNCERTAINTY[grouped]},
        backward_matmul_share=BACKWARD_MATMUL_SHARE,
        batched_matmul_share=BATCHED_MATMUL_SHARE,
        pooling_share=POOLING_SHARE,
        batch_norm_share=batch_norm_share(gpu),
        convolution_bandwidth_share=CONVOLUTION_BANDWIDTH_SHARE,
        channels_last_share=CHANNELS_LAST_SHARE[grouped],
        num_sms=gpu.num_sms,
        grouped_share=GROUPED_SHARE[grouped],
        grouped_power=GROUPED_POWER[grouped],
        link_bandwidth=gpu.link_bandwidth * LINK_SHARE,
        attention_flops=(
            window_attention_flops(gpu, max(model.windows) ** 2)
            if isinstance(model, SwinConfig)
            else None
        ),
        biased_flops=biased_flops(gpu),
    )
