"""The range that an estimate has for cuDNN's convolutions. Imports no torch."""

from __future__ import annotations

from typing import Any

from planner import estimate
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.units import MIB
from planner.estimation.estimate import estimate_ledger
from planner.ledger.ledger import Allocated, Computed, Event, Freed, Ledger, Marked
from planner.memory.convolution_workspace import ConvolutionWorkspace, convolution_workspace

MODEL = FactoryModel(factory="my_models:build")
SETTING = TrainSetting(batch_size=2)


def convolution(path: str, num_bytes: int, name: str = "convolution") -> Computed:
    return Computed(f"aten.{name}", "conv", "float32", 10, num_bytes, 1, path)


def ledger_of(*forward: Computed, backward: tuple[Computed, ...] = ()) -> Ledger:
    """Two steps of `forward` and `backward`, each with one temporary of 4 MiB."""
    events: list[Event] = [Marked("build", 0)]
    for step in range(2):
        events += [Allocated(step, 4 * MIB, "aten.mm"), *forward, Marked("forward", step)]
        events += [*backward, Freed(step), Marked("backward", step)]
        events += [Marked("optimizer", step), Marked("zero_grad", step)]
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


def test_a_fit_is_no_longer_sure_where_convolutions_may_take_the_rest() -> None:
    def fits(*forward: Computed) -> Any:
        ledger = ledger_of(*forward)
        least = estimate_ledger(MODEL, SETTING, ledger_of(PAIR[0]))
        return estimate_ledger(MODEL, SETTING, ledger, memory_bytes=least.high_bytes)

    assert fits(PAIR[0]).fits_surely
    assert fits(*PAIR).fits
    assert not fits(*PAIR).fits_surely


def test_swins_range_is_as_it_was() -> None:
    """Derived: 2% either way of what is reserved, and the two ends of a context."""
    swin = estimate("timm:swin_tiny_patch4_window7_224", batch_size=8)
    reserved = swin.peak_reserved_bytes
    assert swin.high_bytes == int(reserved * 1.02) + 667_000_000
