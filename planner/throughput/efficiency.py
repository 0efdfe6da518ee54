"""What kernels reach of a datasheet's figures, fitted to measurements.

`tests/benchmarks/fit_rates.py` prints the rows, the fit and the errors of the rows held out; the
rows stand in `tests/truth/public.jsonl`, `tests/truth/h200` and `tests/truth/h100`. Those of HBM
are of an A100, an H200 and an H100; those of GDDR of an RTX 3090, and of an RTX 4090 and 5090 for
the forward only.
"""

from __future__ import annotations

from types import MappingProxyType

from planner.machine.hardware.gpu import Gpu

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
