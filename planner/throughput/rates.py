"""What kernels reach of a datasheet's figures, fitted to measurements.

`tests/benchmarks/fit_rates.py` prints the rows, the fit and the errors of the rows held out; the
rows stand in `tests/truth/public.jsonl`, `tests/truth/h200` and `tests/truth/h100`. Those of HBM
are of an A100, an H200 and an H100; those of GDDR of an RTX 3090, and of an RTX 4090 and 5090 for
the forward only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.ledger.ledger import Computed, OperationKind
from planner.machine.hardware.gpu import ASSUMED_LINK, Gpu
from planner.throughput.result import OTHERS, WAITING

# Of the bandwidth, by what moves large tensors element by element: at most so much. Copies and
# additions alone reach 0.89 on an H100 and an H200 (tests/truth/h100/kernels.jsonl); GDDR fitted.
BANDWIDTH_SHARE = MappingProxyType({"HBM": 0.89, "GDDR": 0.92})
# Whole eager steps on HBM, whose kernels mostly do more than that, move as if each multiprocessor
# moved so many bytes a clock: fitted, by architecture, to an A100 80 GB and to both Hoppers, of
# which the one has 1.43 times the other's bandwidth. On an architecture without one, or without a
# clock, of the bandwidth.
MOVED_BYTES = MappingProxyType({"Hopper": 8.2, "Ampere": 7.1})
UNKNOWN_BANDWIDTH_SHARE = 0.50
# Of that bandwidth: softmax, LayerNorm and their backwards, and sums over rows.
REDUCTION_SHARE = 0.65
# Of the bandwidth, by all kernels that torch.compile writes: what a copy reaches on an NVIDIA H200
# (torch 2.11.0, 2026-11-26), with which compiled steps of Swins from batch 256 on, there and on an
# H100, are 6% off at most (tests/test_truth.py).
COMPILED_BANDWIDTH_SHARE = 0.87
# Of the bandwidth that an eager step reaches, by batched matmuls of 16 bits, those of eager
# attention: rows of 49 or 197 numbers are aligned to no wide load. As the steps of Swin-T and
# Swin-B spend on an H100 (tests/truth/h100/profiles.jsonl).
BATCHED_MATMUL_SHARE = 0.6
# Of the peak FLOP/s, by fp32 matmuls on the CUDA cores, by architecture.
FP32_MATMUL_SHARE = MappingProxyType({"Hopper": 0.87, "": 1.0})
# Of what a matmul reaches in forward: backward's sum over all tokens, or read transposed.
BACKWARD_MATMUL_SHARE = 0.70

# Fitted, 2026-11-26, to three quarters of the rates of timm's models at 224 px under fp16 autocast
# that huggingface/pytorch-image-models @aa4b5850 publishes in results/: steps on an RTX 3090 (torch
# 1.12), forwards on that, an RTX 4090 (torch 2.4) and 5090 (2.9). `python -m
# tests.benchmarks.model_rates` prints them. Of the matmul rate: dense convolutions, and fused
# attention by whichever kernel, over windows too. On Hopper convolutions reach less: 0.5 in steps
# of ResNets and a VGG-16 on an H100, and more on an H200.
CONVOLUTION_SHARE = MappingProxyType({"Hopper": 0.6, "": 0.74})
ATTENTION_SHARE = 0.54
# FLOPs per cycle and multiprocessor, by the one kernel of fused attention that takes a bias, for
# 16-bit heads of 32 numbers: of windows that one tile of 64 tokens holds, and of larger ones, where
# what fills the last tile counts too. The former as the steps of a Swin-T spend on an NVIDIA H100
# (torch 2.11.0, 2026-11-27, tests/truth/h100/profiles.jsonl), the latter measured on an H200
# (tests/truth/h200/kernels.jsonl); in fp32 as whole steps of Swin-T there have it.
WINDOW_TILE = 64
ONE_TILE_FLOPS, MORE_TILES_FLOPS = 150.0, 165.0
FP32_ATTENTION = 0.5
# Of other models' attention on Hopper, in 16 bits: by FlashAttention and cuDNN, of the matmul rate,
# once a sequence has many tokens, and half of that at so many: kernels of an H100, and the steps of
# a ViT-B/16 there, whose 197 tokens get 123 TFLOP/s. By the kernel that takes a bias, FLOPs a clock
# of each multiprocessor: 90 where heads are of 32 numbers, 184 where of 64
# (tests/truth/h100/profiles.jsonl).
LONG_ATTENTION_SHARE, HALFWAY_TOKENS, BIASED_FLOPS = 0.5, 440.0, 130.0
# Of the bandwidth, by dense convolutions of few channels: on matrix units they run channels last,
# and what is laid out otherwise is copied before and after.
CONVOLUTION_BANDWIDTH_SHARE = 0.50
# The same where all is laid out channels last, and nothing is copied: on GDDR and Hopper the rates
# that were fitted ask for no other share. On older HBM they would make a ResNet-50 0.70 times as
# fast on an A100 and 0.60 on a V100 as NVIDIA publishes it; so it is 0.81 and 0.69.
CHANNELS_LAST_SHARE = MappingProxyType({"HBM": 1.0, "GDDR": 0.50, "Hopper": 0.50})
# Bytes a clock of each multiprocessor by batch norm of 16 bits that trains, of what it reads and
# writes once: one block of threads has one channel, so that fewer channels than multiprocessors
# leave some idle. An RTX 3090's steps ask for 1.95, and kernels of an H200 for 2.1
# (tests/truth/h200/kernels.jsonl); of fp32 on Hopper it is that many times as much, and that share
# of the bandwidth at most. Channels last, other kernels spread over rows. BATCH_NORM_SHARE is for
# cards whose clock is not known.
BATCH_NORM_BYTES = 1.95
BATCH_NORM_FP32, BATCH_NORM_MOST = 3.2, 0.76
BATCH_NORM_SHARE = 0.345
# Of what reductions reach, by pooling and its backward: between what VGG-16 and a PoolFormer have
# on an H100 (0.25, tests/truth/h100/profiles.jsonl) and what the published rates ask for (0.5).
POOLING_SHARE = 0.4
# Of the CUDA cores' FLOP/s, by convolutions in groups (depthwise ones too) of one multiply-add for
# each element that they move, in any dtype; they grow with a power of that number. HBM's share is
# that of ConvNeXts on an A100 (MzeroMiko/VMamba @9fd253f analyze/tp.log, torch 2.2, which asks
# cuDNN for deterministic algorithms). On Hopper their time grows with what they move alone, however
# wide a group: fitted to an H200's steps (tests/truth/h200/rows.jsonl, torch 2.11, cuDNN 9.19).
GROUPED_SHARE = MappingProxyType({"HBM": 0.011, "GDDR": 0.040, "Hopper": 0.0035})
GROUPED_POWER = MappingProxyType({"HBM": 0.47, "GDDR": 0.47, "Hopper": 1.0})

# Of the link to the host, by copies from and to pinned memory, either way. Quoted: 77 to 83% of
# PCIe 3.0 x16 (P100, mpicbg-scicomp/gearshifft pull request 82; RTX 2080 Ti, issue 22 of
# usadellab/Helixer), 80% of 4.0 (A100, issue 42 of NVIDIA/nvbandwidth), 88% of 5.0 (H100, NVIDIA's
# article on nvbandwidth). The host's own memory and processor can make it far less.
LINK_SHARE = 0.80

# Share of the peak that the best shape of a large bf16 matmul reaches. Quoted: "Maximum Achievable
# Matmul FLOPS", stas00/ml-engineering, torch 2.5-2.7 (A100 SXM 86.9%, PCIe 81.1%, GH200 83.6%,
# H100 SXM 80.3%, B200 77.6%, MI250X 76.7%, MI300X 60.1%). Others: taken as A100 PCIe's, but for
# cards whose tensor rate is cut to 2 x FP32 (GeForce): their clocks exceed the advertised boost and
# little bandwidth feeds them. A share of these for Swin's own shapes, left free, came out as 1: so
# there is none.
_BEST_MATMUL_SHARE = MappingProxyType(
    {"a100-sxm": 0.869, "gh200": 0.836, "Hopper": 0.803, "b200": 0.776, "CDNA2": 0.767,
     "CDNA3": 0.601}
)  # fmt: skip
_OTHER_MATMUL_SHARE = 0.811
_CUT_RATE_MATMUL_SHARE = 1.0

# Half-width of what a step's time may be off by, relative. A card with published rows that train
# has the worst error over all its rows, rounded up to the next 5%, as have the two that we
# measured; all others the wide one, a judgement: rows of only the forward narrow nothing.
WIDE_UNCERTAINTY = 0.35
MEASURED_CARDS = MappingProxyType(
    {"a100-sxm-80gb": 0.10, "rtx-3090": 0.15, "h100-sxm-80gb": 0.15, "h200-sxm-141gb": 0.15}
)
# Those of them whose rows have fused attention, too.
FUSED_CARDS = frozenset(("h100-sxm-80gb", "h200-sxm-141gb"))
# How many times as long, or as short, a host may take that nobody measured: of 120 eager steps of
# Swins on an H200 and an H100 9 have a rate out of their range so.
HOST_SPREAD = 1.4
# The same of another model than a Swin, by kind of operation: a step has their mean by its seconds.
# Fitted with the shares above, so that it holds nine of ten rows, and rounded up to the next 5%; no
# kind has less than matmuls, and fused attention, whose backward nobody timed, the wide one. What
# copies reach depends most on their layout. What entered no fit has its own, so that it holds all
# published steps (tests/benchmarks/model_rates.jsonl): convolutions in fp32 (ResNet-50 on V100s),
# and channels last those in groups (timm's on an RTX 3090, a RegNetX 2.6 times as slow as
# predicted) and dense ones (there, and on older HBM NVIDIA's on an A100 and V100s).
KIND_UNCERTAINTY = MappingProxyType(
    {"matmul": 0.10, "conv": 0.15, "grouped conv": 0.15, "attention": WIDE_UNCERTAINTY,
     "pointwise": 0.20, "reduction": 0.15, "copy": 1.0, "conv fp32": 0.60,
     "grouped conv channels_last": 2.0}
)  # fmt: skip
CHANNELS_LAST_UNCERTAINTY = MappingProxyType({"HBM": 1.2, "GDDR": 0.25, "Hopper": 0.15})
MOST_UNCERTAINTY = 0.90  # the slowest is a tenth as fast as predicted


def memory_kind(gpu: Gpu) -> str:
    """HBM or GDDR; the slower to be filled where it is not known."""
    return "GDDR" if gpu.memory_type.startswith("GDDR") else "HBM"


def clocks(gpu: Gpu) -> float | None:
    """Of all multiprocessors together, a second; None where the card's are not known."""
    if gpu.num_sms is None or gpu.boost_mhz is None:
        return None
    return gpu.num_sms * gpu.boost_mhz * 1e6


def moved_bytes(gpu: Gpu) -> float | None:
    """Bytes/s of an eager step by multiprocessors and their clock; None where no law is known."""
    each, clocked = MOVED_BYTES.get(gpu.architecture), clocks(gpu)
    return None if each is None or clocked is None else each * clocked


def bandwidth_share(gpu: Gpu) -> float:
    """Of the bandwidth, by what moves large tensors in an eager step."""
    most, moved = BANDWIDTH_SHARE[memory_kind(gpu)], moved_bytes(gpu)
    if memory_kind(gpu) == "GDDR":
        return most
    return UNKNOWN_BANDWIDTH_SHARE if moved is None else min(most, moved / gpu.bandwidth)


def window_attention_flops(gpu: Gpu, tokens: int) -> dict[str, float] | None:
    """FLOP/s of fused attention over windows of `tokens`, by dtype; None where the card's
    multiprocessors or their clock are not known."""
    clocked = clocks(gpu)
    if clocked is None:
        return None
    tile = -(-tokens // WINDOW_TILE) * WINDOW_TILE
    each = ONE_TILE_FLOPS if tile == WINDOW_TILE else MORE_TILES_FLOPS
    half = each * clocked * (tokens / tile) ** 2
    return {"float32": half * FP32_ATTENTION, "bfloat16": half, "float16": half}


def biased_flops(gpu: Gpu) -> float | None:
    """FLOP/s of fused attention with a bias, in 16 bits; None where all kernels have one share."""
    clocked = clocks(gpu)
    return None if gpu.architecture != "Hopper" or clocked is None else BIASED_FLOPS * clocked


def batch_norm_share(gpu: Gpu) -> float:
    """Of the bandwidth that is reached, by batch norm that has channels for all multiprocessors."""
    clocked = clocks(gpu)
    if clocked is None:
        return BATCH_NORM_SHARE
    return min(REDUCTION_SHARE, clocked * BATCH_NORM_BYTES / (gpu.bandwidth * bandwidth_share(gpu)))


def convolution_share(gpu: Gpu) -> float:
    return CONVOLUTION_SHARE.get(gpu.architecture, CONVOLUTION_SHARE[""])


def grouped_kind(gpu: Gpu) -> str:
    """By which of the shares it runs convolutions in groups."""
    return gpu.architecture if gpu.architecture in GROUPED_SHARE else memory_kind(gpu)


def tensor_matmul_share(gpu: Gpu) -> float:
    """Of the peak FLOP/s, by matmuls on matrix units (tf32, bf16, fp16)."""
    for key, share in _BEST_MATMUL_SHARE.items():
        if gpu.name.startswith(key) or gpu.architecture == key:
            return share
    cut_rate = gpu.fp16_flops is not None and gpu.fp16_flops < 2.5 * gpu.fp32_flops
    return _CUT_RATE_MATMUL_SHARE if cut_rate else _OTHER_MATMUL_SHARE


def fp32_matmul_share(gpu: Gpu) -> float:
    """Of the peak FLOP/s, by fp32 matmuls, which AMD's matrix units run too."""
    if gpu.vendor != "NVIDIA":
        return tensor_matmul_share(gpu)
    return FP32_MATMUL_SHARE.get(gpu.architecture, FP32_MATMUL_SHARE[""])


def kind_uncertainty(gpu: Gpu) -> dict[str, float]:
    """Of a step of another model than a Swin, by kind of operation, and by kind and what a setting
    has of precision or memory format where that decides."""
    of_convolutions = CHANNELS_LAST_UNCERTAINTY[grouped_kind(gpu)]
    return {**KIND_UNCERTAINTY, "conv channels_last": of_convolutions}


def uncertainty(gpu: Gpu) -> float:
    """How far the predicted time of a step on `gpu` may be off, relative."""
    return MEASURED_CARDS.get(gpu.name, WIDE_UNCERTAINTY)


# What follows was not fitted.

MATRIX_KINDS = frozenset(("matmul", "conv", "grouped conv", "attention"))
_BATCHED = frozenset(("aten.bmm", "aten.baddbmm"))

# Of the matmul rate, by convolutions and fused attention; of the bandwidth, by what moves tensors.
_KIND_SHARE: Mapping[OperationKind, float] = MappingProxyType(
    {"matmul": 1.0, "conv": CONVOLUTION_SHARE[""], "grouped conv": 1.0,
     "attention": ATTENTION_SHARE, "pointwise": 1.0,
     "reduction": REDUCTION_SHARE, "copy": 1.0, "transfer": 1.0}
)  # fmt: skip
# Start and drain of one kernel on the device, and of one inside a CUDA graph.
_KERNEL_SECONDS = 3e-6
_GRAPH_KERNEL_SECONDS = 1.5e-6
# What the host spends on an operation: Python modules, dispatcher and autograd's recording in the
# forward, autograd's engine in the backward; on a forward's that is recomputed there, whose saved
# tensors each pass two hooks in Python; on a further launch of one of backward's; on each launch
# over a list of weights (foreach, fused), whose elements it looks at in Python. Chosen 2026-11-30
# by the processor seconds of 79 steps of Swins and 13 other models on the emulated GPU, where
# kernels do nothing (`python -m tests.truth.host --law`), and by 120 steps on an NVIDIA H200 and an
# H100, times 2.6: between these two's hosts, by their own measured chains of small layers.
HOST_SECONDS: Mapping[str, float] = MappingProxyType(
    {"forward": 31e-6, "backward": 23e-6, "optimizer": 26e-6, "zero_grad": 12e-6,
     "recomputed": 104e-6, "backward launch": 150e-6, "list": 187e-6}
)  # fmt: skip
_LAUNCH_SECONDS = 9.6e-6
# Per launch of compiled code's wrapper; per replay of a graph.
_COMPILED_LAUNCH_SECONDS = 6e-6
_GRAPH_SECONDS = 30e-6
# Per call of a compiled block and per backward through it (guards, AOTAutograd's wrapper).
# Measured: 64 and 67 us with its one kernel (torch 2.13, one thread of an AMD EPYC, 2026-11-22).
_REGION_SECONDS = 60e-6


@dataclass(frozen=True)
class DeviceRates:
    """What a device achieves, and `basis`: how that is known.

    `matmul_flops` are FLOP/s a large matmul reaches by dtype ("float32", "tf32", "bfloat16",
    "float16", "float8"); `bandwidth` is bytes/s of a copy (read + written); `kind_share` scales the
    matmul rate of conv and attention, and the bandwidth of pointwise, reduction and copy. Matmuls
    reach `backward_matmul_share` of their rate in backward. Of the bandwidth are `batch_norm_share`
    and, of convolutions, `convolution_bandwidth_share` or `channels_last_share`; `grouped_share` is
    of fp32's matmul rate, growing with that power (`grouped_power`) of multiply-adds;
    `num_sms` are a GPU's multiprocessors, where known.
    `link_bandwidth` is bytes/s between device and pinned host memory, either way; `attention_flops`
    are FLOP/s of fused attention by dtype, `biased_flops` those of the kernel that takes a bias
    where others go by the length of a sequence, and `compiled_bandwidth` the bytes/s of kernels
    that torch.compile makes, reductions too, where they are known by themselves.
    `host_seconds` is the host's cost of an operation by phase, and by what else costs more;
    `host_spread` how many times as long or as short it may be. `asynchronous`: the host runs ahead
    (CUDA); otherwise it computes itself (CPU) and both times add up.
    `uncertainty` is relative: 0.35 means the time may be off by 35% either way. It holds for eager
    steps in fp32 or 16 bits with eager attention, as most are measured, and with fused attention
    where `knows_fused`; `other_uncertainty` for all others.
    `kind_uncertainty`, where it is given, says it by kind of operation in place of `uncertainty`.
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

    def matrix_rate(self, phase: str, operation: Computed, precision: str) -> float:
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
        """By the kernel and the tokens of a sequence, which are the FLOPs for each two bytes."""
        assert self.biased_flops is not None
        if "efficient" in operation.name:
            return self.biased_flops
        tokens = max(1.0, 2 * operation.flops / max(operation.num_bytes, 1))
        most = self.matmul_rate(operation.dtype, "") * LONG_ATTENTION_SHARE
        return most * tokens / (tokens + HALFWAY_TOKENS)

    def _grouped_rate(self, phase: str, operation: Computed, precision: str) -> float:
        """By the multiply-adds for each element that it moves; at most that of a dense convolution,
        which it is taken for where no more is known."""
        dense = self.matrix_rate(phase, operation._replace(kind="conv"), precision)
        if self.grouped_share is None:
            return dense
        num_bytes = 4 if operation.dtype == "float32" else 2
        multiply_adds = operation.flops / 2 / max(operation.num_bytes / num_bytes, 1)
        rate = self.matmul_flops["float32"] * self.grouped_share
        return min(dense, rate * float(multiply_adds**self.grouped_power))

    def moving_rate(self, operation: Computed, memory_format: str = "contiguous") -> float:
        """Bytes/s that an operation's tensors are read and written at, if that is what it takes."""
        if operation.kind == "conv":
            is_last = memory_format == "channels_last"
            share = self.channels_last_share if is_last else self.convolution_bandwidth_share
            return self.bandwidth * share
        if operation.kind in MATRIX_KINDS:
            is_batched = operation.name in _BATCHED and operation.dtype != "float32"
            return self.bandwidth * (self.batched_matmul_share if is_batched else 1.0)
        usual = self.bandwidth * self.kind_share[operation.kind]
        if "pool" in operation.name:
            return usual * self.pooling_share
        if self.batch_norm_share is None or "batch_norm" not in operation.name:
            return usual
        busy = min(1.0, _num_channels(operation) / self.num_sms) if self.num_sms else 1.0
        share = self.batch_norm_share * busy
        if operation.dtype == "float32":
            share = min(BATCH_NORM_MOST, BATCH_NORM_FP32 * share)
        by_channel = self.bandwidth * share
        # Channels last, other kernels spread over rows: never slower (an H100's ResNet-50).
        return by_channel if memory_format == "contiguous" else max(usual, by_channel)

    def uncertainty_of(
        self, setting: TrainSetting, seconds: Mapping[str, float], host: float = 0.0
    ) -> float:
        """Of a step of `setting` that spends `seconds` by kind of operation and `host` on the host,
        relative: what was measured narrows it only for its like. Where the host may be what a step
        waits for, it is at least as wide as the host's own range."""
        took = sum(seconds.values())
        device = took - seconds.get(WAITING, 0.0) - seconds.get(OTHERS, 0.0)
        known = self._uncertainty_of(setting, seconds)
        if not self.asynchronous or not took:
            return known
        slow = max(took, self.host_spread * host)
        fast = min(took, max(device, host / self.host_spread))
        return max(known, 1 - took / slow, took / fast - 1)

    def _uncertainty_of(self, setting: TrainSetting, seconds: Mapping[str, float]) -> float:
        by_kind = self.kind_uncertainty
        knows = by_kind is not None or self.knows_fused or setting.attention == "eager"
        alike = setting.compile == "off" and knows
        alike = alike and setting.precision not in ("tf32", "fp8") and setting.offload == "none"
        alike = alike and setting.offload_optimizer == "none"
        total = sum(seconds.values())
        if by_kind is None:
            return self.uncertainty if alike else self.other_uncertainty
        known = 0.0
        for kind, share in seconds.items():
            special = [
                by_kind.get(f"{kind} {of}") for of in (setting.memory_format, setting.precision)
            ]
            usual = by_kind.get(kind, WIDE_UNCERTAINTY)
            known += share * max((found for found in special if found is not None), default=usual)
        found = known / total if total else WIDE_UNCERTAINTY
        found = min(found, MOST_UNCERTAINTY)
        return max(found, self.uncertainty if alike else self.other_uncertainty)


def _num_channels(operation: Computed) -> float:
    """Of a batch norm of N elements and C channels that trains, by its cost (`recording.costs`):
    N + 2 C FLOPs; b N bytes two or three times, and 24 C or 28 C of weights and statistics."""
    times, statistics = (3, 28) if "backward" in operation.name else (2, 24)
    each = times * (4 if operation.dtype == "float32" else 2)
    found = (operation.num_bytes - each * operation.flops) / (statistics - 2 * each)
    return max(abs(found), 1.0)  # without running statistics (standardised weights) it is negative


def rates_for(gpu: Gpu, model: Model | None = None) -> DeviceRates:
    """What `gpu` should achieve: its datasheet's figures times the fitted shares; for another
    `model` than a Swin, which the published steps are of, known less well."""
    is_held = model is None or isinstance(model, SwinConfig)
    tensor = tensor_matmul_share(gpu)
    bandwidth = bandwidth_share(gpu)
    peaks = {"tf32": gpu.tf32_flops, "bfloat16": gpu.bf16_flops, "float16": gpu.fp16_flops,
             "float8": gpu.fp8_flops}  # fmt: skip
    flops = {dtype: peak * tensor for dtype, peak in peaks.items() if peak is not None}
    fp32 = gpu.fp32_flops * fp32_matmul_share(gpu)
    grouped = grouped_kind(gpu)
    units = "fp32 lanes" if gpu.fp16_flops == gpu.fp32_flops else "matrix units"
    held = "" if gpu.name in MEASURED_CARDS else ", none of them of this card"
    return DeviceRates(
        name=gpu.name,
        basis=(
            f"datasheet of {gpu.title}; assumes {bandwidth:.0%} of its bandwidth (fitted to "
            f"measurements{held}) and {tensor:.0%} of its {units}' FLOP/s (quoted)"
        ),
        matmul_flops={"float32": fp32, **flops},
        bandwidth=gpu.bandwidth * bandwidth,
        kind_share={**_KIND_SHARE, "conv": convolution_share(gpu)},
        uncertainty=uncertainty(gpu),
        compiled_bandwidth=gpu.bandwidth * max(bandwidth, COMPILED_BANDWIDTH_SHARE),
        knows_fused=gpu.name in FUSED_CARDS,
        kind_uncertainty=None if is_held else kind_uncertainty(gpu),
        backward_matmul_share=BACKWARD_MATMUL_SHARE,
        batched_matmul_share=BATCHED_MATMUL_SHARE,
        pooling_share=POOLING_SHARE,
        batch_norm_share=batch_norm_share(gpu),
        convolution_bandwidth_share=CONVOLUTION_BANDWIDTH_SHARE,
        channels_last_share=CHANNELS_LAST_SHARE[grouped],
        num_sms=gpu.num_sms,
        grouped_share=GROUPED_SHARE[grouped],
        grouped_power=GROUPED_POWER[grouped],
        link_bandwidth=(gpu.link_bandwidth or ASSUMED_LINK) * LINK_SHARE,
        attention_flops=(
            window_attention_flops(gpu, max(model.windows) ** 2)
            if isinstance(model, SwinConfig)
            else None
        ),
        biased_flops=biased_flops(gpu),
    )
