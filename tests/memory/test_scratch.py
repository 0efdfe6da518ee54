"""Laws of scratch, held to the requests that PyTorch's own CUDA code makes.

The figures were taken on an emulated GPU under torch 2.13.0+cu130 and 2.15.0+cu132 (the same on
both): `torch.cuda.memory._snapshot()` after the operation named.
"""

import pytest

from planner import estimate
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.units import MIB
from planner.estimation.estimate import estimate_ledger
from planner.ledger.ledger import Allocated, Computed, Event, Freed, Ledger, PhaseEnded
from planner.machine.hardware.gpu import find_gpu
from planner.machine.hardware.overheads import processors_of
from planner.memory.scratch import (
    ConvolutionWorkspace,
    Processors,
    convolution_workspace,
    scratch_bytes,
)
from planner.step.pointwise import plan_reduction

T4 = Processors(40, 1024, (7, 5))
RTX_3090 = Processors(82, 1536, (8, 6))
A100 = Processors(108, 2048, (8, 0))
H100 = Processors(132, 2048, (9, 0))


def test_a_gpu_of_the_catalogue_says_what_decides() -> None:
    for name, expected in {"t4": T4, "rtx-3090": RTX_3090, "h100-sxm-80gb": H100}.items():
        assert processors_of(find_gpu(name)) == expected


# [rows, columns].sum(0): 32 x 4 threads add up vectors of 4 columns, so 128 columns a block. Of
# [3136, 768] a thread has ceil(3136 / 4) = 784 values, 6 blocks lie side by side, and
# 82 * (1536 // 128) = 984 blocks fill the device: ceil(984 / 6) = 164 would share an output, but a
# thread keeps 16 values, so ceil(784 / 16) = 49 do. 4 B * 768 * 49 * 128 = 19,267,584.
SUMS = [
    ((3136, 768), (768, 1), (0,), (19_267_584, 24)),
    ((200704, 96), (96, 1), (0,), (12_091_392, 8)),
    ((196, 768), (768, 1), (0,), (0, 0)),
    ((1000, 1000), (1000, 1), (0, 1), (492, 4)),
    # The gradient of a convolution's bias, summed over all but channels: in channels_last these are
    # neighbours, in NCHW the elements of one are, but not all of them.
    ((64, 96, 56, 56), (96 * 3136, 3136, 56, 1), (0, 2, 3), (1152, 384)),
    ((64, 96, 56, 56), (96 * 3136, 1, 56 * 96, 96), (0, 2, 3), (12_091_392, 8)),
]


@pytest.mark.parametrize(("shape", "strides", "dims", "expected"), SUMS)
def test_sums(
    shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], expected: object
) -> None:
    found = plan_reduction(shape, strides, dims)
    laws = ("reduction", "semaphores")
    assert tuple(scratch_bytes(RTX_3090, law, found) for law in laws) == expected


def test_sums_that_are_not_shared() -> None:
    assert plan_reduction((1, 7), (7, 1), (0,)) is None
    found = plan_reduction((3136, 3072), (3072, 1), (0,))  # 24 blocks, and room for 12
    assert scratch_bytes(Processors(1, 1536, (8, 6)), "reduction", found) == 0


LAWS: list[tuple[Processors, dict[str, tuple[int, ...]], tuple[int, ...]]] = [
    # native_layer_norm_backward of [64, 56, 56, 96] in fp32: 200,704 rows are above 65,536, and
    # 96 // 32 = 3 below 82 // 2, so 6,272 blocks of 32 rows leave 96 sums each.
    (RTX_3090, {"norm_parts": (200704, 96, 4), "norm_replaced": (200704, 96, 4)}, (2_408_448, 384)),
    (RTX_3090, {"norm_reduction": (200704, 96), "norm_semaphores": (200704, 96)}, (1_204_224, 8)),
    (RTX_3090, {"norm_parts": (200704, 96, 2)}, (1_204_224,)),
    (RTX_3090, {"norm_parts": (65536, 96, 4), "norm_replaced": (65536, 96, 4)}, (0, 0)),
    (RTX_3090, {"norm_reduction": (65536, 96)}, (0,)),
    *(
        (device, {"sort": (keys, rows)}, (num_bytes,))
        for keys, rows, *expected in (
            (2401, 169, 3583, 3583, 3583),
            (4096, 4096, 72191, 72191, 71167),
            (331776, 5000, 5433855, 5402111, 5386751),
            (1_000_000, 5000, 16369151, 16271871, 16227839),
        )
        for devices, num_bytes in zip(((T4,), (RTX_3090, A100), (H100,)), expected, strict=True)
        for device in devices
    ),
]


@pytest.mark.parametrize(("device", "laws", "expected"), LAWS)
def test_what_an_operation_takes(
    device: Processors, laws: dict[str, tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    assert tuple(scratch_bytes(device, law, sizes) for law, sizes in laws.items()) == expected


# The range that an estimate has for cuDNN's convolutions. Imports no torch.

MODEL = FactoryModel(factory="my_models:build")
SETTING = TrainSetting(batch_size=2)


def convolution(path: str, num_bytes: int, name: str = "convolution") -> Computed:
    return Computed(f"aten.{name}", "conv", "float32", 10, num_bytes, 1, path)


def ledger_of(*forward: Computed, backward: tuple[Computed, ...] = ()) -> Ledger:
    """Two steps of `forward` and `backward`, each with one temporary of 4 MiB."""
    events: list[Event] = [PhaseEnded("build", 0)]
    for step in range(2):
        events += [Allocated(step, 4 * MIB, "aten.mm"), *forward, PhaseEnded("forward", step)]
        events += [*backward, Freed(step), PhaseEnded("backward", step)]
        events += [PhaseEnded("optimizer", step), PhaseEnded("zero_grad", step)]
    return Ledger(tuple(events), batch_size=2, num_parameters=0)


PAIR = (convolution("stem", 30 * MIB), convolution("block", 50 * MIB))
BACKWARD = (convolution("", 80 * MIB, "convolution_backward"),)


def test_the_largest_convolution_of_the_step_bounds_it() -> None:
    found = convolution_workspace(ledger_of(*PAIR, backward=BACKWARD), {})
    assert found == ConvolutionWorkspace(2, 80 * MIB)


def test_a_patch_embedding_alone_adds_nothing() -> None:
    assert convolution_workspace(ledger_of(PAIR[0], backward=BACKWARD), {}).high_bytes == 0
    assert convolution_workspace(ledger_of(), {}) == ConvolutionWorkspace(0, 0)


def test_the_cap_of_the_environment_is_in_mib() -> None:
    ledger = ledger_of(*PAIR)
    for given, high in {"20": 20, "64": 50, "": 50, "lots": 50}.items():
        capped = convolution_workspace(ledger, {"CUDNN_CONV_WSCAP_DBG": given})
        assert capped.high_bytes == high * MIB


def test_only_the_upper_end_of_the_range_moves() -> None:
    few, many = (estimate_ledger(MODEL, SETTING, ledger_of(*found)) for found in (PAIR[:1], PAIR))
    assert many.high_bytes - few.high_bytes == 50 * MIB
    assert many.low_bytes == few.low_bytes
    assert many.device_total_bytes == few.device_total_bytes


def test_swins_range_is_as_it_was() -> None:
    """Derived: 2% either way of what is reserved, and the two ends of a context."""
    swin = estimate("timm:swin_tiny_patch4_window7_224", batch_size=8)
    reserved = swin.peak_reserved_bytes
    assert swin.high_bytes == int(reserved * 1.02) + 667_000_000
