"""Every library's real attention, by itself: right, and with the bytes that shapes say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planner.benches import worker
from planner.benches.attention import TOLERANCES, Subject, WindowAttention
from planner.benches.order import Order
from planner.environment.bench import clock_of
from planner.libraries.registry import find_library
from planner.schema.bench import BenchCase
from search.probe.worker.meter import CpuMeter
from tests.benches.cases import small_case

LIBRARIES = ("native", "timm", "torchvision", "transformers")


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """A worker sets what fp32 is done in, for its own process."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    torch.backends.cudnn.benchmark = benchmark


def cases(library: str, **fields: Any) -> list[BenchCase]:
    """Both versions, shifted and not, on each path but the compiled ones."""
    found = []
    for version in (1, 2):
        for shifted in (False, True):
            plain = small_case(library=library, version=version, shifted=shifted, **fields)
            for path in find_library(library).attentions(plain.model):
                found.append(plain.model_copy(update={"path": path}))
    return found


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_path_agrees_with_float64(library: str, precision: str) -> None:
    """At a map that the window does not divide, too, where the library pads it."""
    for case in cases(library, precision=precision, feature_map=(9, 8)):
        subject = Subject(case, "cpu")
        difference = subject.difference(*subject.first())
        assert difference < TOLERANCES[case.precision], case


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_attention_is_that_of_the_librarys_block(library: str) -> None:
    """Version 1: norm, attention, residual connection; then an MLP that gives nothing."""
    for shifted in (False, True):
        case = small_case(library=library, shifted=shifted)
        attention = WindowAttention(case)
        block: Any = attention.block
        for name, parameter in block.named_parameters():
            if "mlp" in name or name.startswith(("intermediate", "output")):
                torch.nn.init.zeros_(parameter)
        x = torch.randn(1, 8, 8, 8)
        norm = block.layernorm_before if library == "transformers" else block.norm1
        expected = x + attention(norm(x))
        if library == "native":
            found = block(x, attention.grid)
        elif library == "transformers":
            found = block(x.view(1, 64, 8), (8, 8))[0].view(1, 8, 8, 8)
        else:
            found = block(x)
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_path_without_its_bias_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as a fresh table is, it would pass for rounding in bf16: it is spread first."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def forgetful(q: Any, k: Any, v: Any, attn_mask: Any = None, **others: Any) -> Any:
        return attend(q, k, v, **others)

    subject = Subject(small_case(library="timm", path="sdpa", precision="bf16"), "cpu")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forgetful)
    difference = subject.difference(*subject.first())
    assert difference > TOLERANCES["bf16"]


def test_what_is_saved_is_what_autograd_keeps() -> None:
    """Eager version 1, fp32: the partitioned input, q, k and v (one storage, and q scaled), the
    probabilities and the output of attention; not the weights and not the input itself."""
    subject = Subject(small_case(library="timm"), "cpu")
    subject.first()
    tokens = 4 * 8 * 8 * 8  # bytes of one feature map
    probabilities = 4 * (2 * 4 * 16 * 16)  # heads × windows × tokens²
    saved = subject.saved_bytes()
    assert 5 * tokens + probabilities <= saved <= 7 * tokens + 2 * probabilities


def judge(case: BenchCase) -> Any:
    order = Order(
        cases=(case,), device="cpu", deadline_seconds=60, median_precision=1, max_measure_seconds=1
    )
    return worker.judge(case, order, CpuMeter(clock_of("cpu")), lambda phase: None)


def test_a_case_is_timed_in_both_directions() -> None:
    found = judge(small_case())
    assert found.status == "measured"
    assert found.forward.certain
    assert found.forward.low <= found.forward.median <= found.forward.high
    assert found.both.samples >= 6
    assert found.peak_bytes is None  # the CPU's allocator does not tell it
    assert found.compile_seconds is None


def test_a_wrong_result_keeps_its_time_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCES, "fp32", 1e-12)
    found = judge(small_case())
    assert found.status == "disagrees"
    assert "float64" in found.message
    assert found.both is not None


def test_what_the_device_lacks_is_unsupported() -> None:
    found = judge(small_case(precision="tf32"))
    assert found.status == "unsupported"
    assert "tf32" in found.message


def test_no_memory_is_told_from_another_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> None:
        monkeypatch.setattr(worker, "set_precision", lambda request: raise_(RuntimeError(text)))

    def raise_(error: Exception) -> None:
        raise error

    fail("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    assert judge(small_case()).status == "out_of_memory"
    fail("mat1 and mat2 shapes cannot be multiplied")
    found = judge(small_case())
    assert (found.status, found.message[:12]) == ("failed", "RuntimeError")
