"""The work that a benchmark's shares are of, against numbers written out by hand."""

from __future__ import annotations

import importlib.util
import math

import pytest

from planner.benches.cases import GUIDE_SHAPE, Wanted, all_cases
from planner.benches.on_shapes import count_work
from planner.schema.bench import BenchCase

LIBRARIES = ("native", "timm", "torchvision", "transformers", "microsoft")


def guide_case(path: str = "eager") -> BenchCase:
    wanted = Wanted(("native",), versions=(1,), paths=(path,), shifts=(False,))  # type: ignore[arg-type]
    (case,) = all_cases(wanted).cases
    return case


def test_the_guides_attention_is_six_tenths_of_a_gflop_in_fifteen_operations() -> None:
    """2 × 3136 tokens of 96 channels: q k v 3·96, the projection 96; scores and their product with
    the values 49 · 32 for each of 3 heads. A multiply-add is two."""
    tokens, channels, window = 2 * 56 * 56, 96, 49
    matmul = 2 * tokens * channels * 4 * channels
    attention = 2 * 2 * tokens * window * channels
    assert GUIDE_SHAPE.feature_map == (56, 56)
    fused = count_work(guide_case("sdpa")).forward.flops
    assert fused == pytest.approx(matmul + attention, rel=0.002)  # and what sums the bias up
    work = count_work(guide_case())
    assert 0.57e9 < work.forward.flops < 0.60e9
    assert work.forward.operations == 15
    assert 0.1e9 < work.forward.moved_bytes + work.backward.moved_bytes < 0.25e9


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_does_the_same_products(library: str) -> None:
    cases = all_cases(Wanted((library,), paths=("eager",)))  # type: ignore[arg-type]
    for case in cases.cases:
        work = count_work(case)
        assert work.forward.flops == pytest.approx(0.59e9, rel=0.02)
        assert work.backward.flops == pytest.approx(2 * work.forward.flops, rel=0.02)


def test_a_compiled_path_moves_less_and_computes_the_same() -> None:
    plain, compiled = count_work(guide_case()), count_work(guide_case("compiled-eager"))
    assert compiled.forward.flops == plain.forward.flops
    assert compiled.forward.moved_bytes < plain.forward.moved_bytes


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shifted", [False, True])
def test_the_peak_holds_the_output_and_three_projections(library: str, shifted: bool) -> None:
    """At least q, k and v, which are 3 × the feature map, and at most some ten of it."""
    wanted = Wanted((library,), paths=("eager",), versions=(1,), shifts=(shifted,))  # type: ignore[arg-type]
    (case,) = all_cases(wanted).cases
    feature_map = 4 * case.batch_size * math.prod(case.feature_map) * case.channels
    assert 3 * feature_map < count_work(case).peak_bytes < 20 * feature_map


def test_no_torch_is_needed_to_count() -> None:
    import subprocess
    import sys

    assert importlib.util.find_spec("torch") is not None
    code = (
        "import sys; from tests.benches.test_on_shapes import count_work, guide_case; "
        "count_work(guide_case()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
