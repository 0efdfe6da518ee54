"""Every library's real attention, by itself: right before it is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from planner.core.errors import PlannerError
from search.tuning.benches import attention as benched
from search.tuning.benches.attention import TOLERANCES, Subject, WindowAttention, time_case
from search.tuning.benches.cases import PATHS, Case, cases_of, one_stage

LIBRARIES = ("native", "timm", "torchvision", "transformers")


def small_cases(
    library: Any, feature_map: tuple[int, int], paths: Sequence[str] = PATHS[:2],
    precision: str = "fp32",
) -> Iterator[Case]:  # fmt: skip
    """One image, windows of 4: version 1, then 2; plain, then shifted."""
    for version in (1, 2):
        model = one_stage(library, version, feature_map, 8, 2, 4)
        yield from cases_of("small", model, 1, paths, (precision,))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_path_agrees_with_float64(library: str, precision: str) -> None:
    """At a map that the window does not divide, too, where the library pads it."""
    for case in small_cases(library, (9, 8), precision=precision):
        assert Subject(case, "cpu").difference() < TOLERANCES[precision], case


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_attention_is_that_of_the_librarys_block(library: str) -> None:
    """Version 1: norm, attention, residual connection; then an MLP that gives nothing."""
    for shifted in (False, True):
        case = next(c for c in small_cases(library, (8, 8)) if c.shifted == shifted)
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

    subject = Subject(next(small_cases("timm", (8, 8), ("sdpa",), "bf16")), "cpu")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forgetful)
    difference = subject.difference()
    assert difference > TOLERANCES["bf16"]


def test_both_passes_are_timed_and_a_wrong_result_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(small_cases("native", (8, 8)))
    monkeypatch.setattr(benched, "set_precision", lambda request: None)
    forward, both = time_case(case, "cpu", 0.05, "here")
    assert 0 < forward.median < both.median
    monkeypatch.setitem(TOLERANCES, "fp32", 1e-12)
    with pytest.raises(PlannerError, match=r"WRONG.*float64"):
        time_case(case, "cpu", 0.05, "here")
