"""precision fp8: the trace runs the real converted module, so it must do what that does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

from planner import estimate  # noqa: E402
from planner.core.errors import UnsupportedError  # noqa: E402
from planner.core.schema import SwinConfig, TrainSetting  # noqa: E402
from planner.estimation.estimate import choose  # noqa: E402
from planner.estimation.ledgers import is_on_shapes  # noqa: E402
from planner.ledger.ledger import Ledger  # noqa: E402
from planner.libraries.limits import multiplies_in_8_bits  # noqa: E402
from planner.machine.hardware import find_gpu  # noqa: E402
from planner.throughput.prediction import rates_for  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.trainers.emission import emit_setting  # noqa: E402

# One stage of 64 channels, so that all four layers of a block are converted, and 10 classes.
SMALL = SwinConfig(
    library="native", image_size=(56, 56), depths=(1,), num_heads=(2,), embed_dim=64,
    num_classes=10, drop_path_rate=0.0,
)  # fmt: skip
FP8 = {"precision": "fp8", "batch_size": 16, "attention": "eager"}


def ledger_of(**changes: object) -> Ledger:
    config, setting = choose(SMALL, None, None, {**FP8, **changes})
    return trace_estimate(config, setting)


def test_linear_layers_multiply_in_8_bits_and_the_rest_as_in_bf16() -> None:
    ledger = ledger_of()
    products = [o for _, o in ledger.operations() if o.kind == "matmul"]
    of_8_bits = [o for o in products if o.name == "aten._scaled_mm"]
    assert len(of_8_bits) == 3 * 4  # forward, input's and weight's gradient of four layers
    # Gradients of 5 exponent bits meet what has 4; the rate is that of 8 bits either way.
    assert {o.dtype for o in of_8_bits} == {"float8_e4m3fn", "float8_e5m2"}
    assert {o.dtype for o in products} - {o.dtype for o in of_8_bits} == {"bfloat16"}
    tokens = 16 * 14 * 14
    assert max(o.flops for o in of_8_bits) == 2 * tokens * 64 * 256
    assert "4 of 5 linear layers multiply in 8 bits, by torchao" in ledger.notes


def test_what_products_of_8_bits_cannot_have_is_refused() -> None:
    for changes, said in (
        ({"batch_size": 24}, "batch_size is 24"),
        ({"lora_rank": 2}, "lora_rank is 2"),
        ({"world_size": 2, "parallelism": "ddp"}, "parallelism is ddp"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            choose(SMALL, None, None, {**FP8, **changes})


def test_a_card_without_units_of_8_bits_is_refused_before_any_trace() -> None:
    for gpu in ("a100-sxm-80gb", "mi300x"):
        with pytest.raises(UnsupportedError, match="fp8 needs an NVIDIA GPU of compute capability"):
            estimate(SMALL, gpu=gpu, **FP8)


def test_8_bits_are_traced_and_timed_at_twice_bf16() -> None:
    assert not is_on_shapes(SMALL, TrainSetting(precision="fp8", batch_size=16))
    assert is_on_shapes(SMALL, TrainSetting())
    rates = rates_for(find_gpu("h100-sxm-80gb"))
    of_8_bits = rates.matmul_rate("float8_e5m2", "fp8")
    assert of_8_bits == 2 * rates.matmul_rate("bfloat16", "fp8")
    assert "float8" not in rates_for(find_gpu("a100-sxm-80gb")).matmul_flops


def test_the_script_converts_the_layers_that_the_estimate_does() -> None:
    text = emit_setting(SMALL, TrainSetting(**FP8), "pytorch").text
    scope: dict[str, object] = {"nn": torch.nn}
    start = text.index("    def multiplies_in_8_bits(")
    lines = text[start:].partition("\n\n")[0].splitlines()
    exec("\n".join(line[4:] for line in lines), scope)
    chosen = scope["multiplies_in_8_bits"]
    assert callable(chosen)
    for out in (10, 32, 64, 72, 96, 1000):
        for inside in (16, 64, 512):
            layer = torch.nn.Linear(inside, out, device="meta")
            assert chosen(layer, "") == multiplies_in_8_bits(out, inside)
    with pytest.raises(UnsupportedError, match="no linear layers to 8 bits"):
        emit_setting(SMALL, TrainSetting(**FP8), "deepspeed")
