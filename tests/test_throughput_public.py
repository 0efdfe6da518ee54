"""The time model against measurements that others published, for want of a GPU of our own.

timm's training table for an RTX 3090: AMP (fp16), NCHW, torch 1.12, CUDA 11.3, SGD, images/s
(results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv of its repository). The share of the peak
that GeForce cards reach was fitted to these rows, so this is no proof for other cards.
"""

from __future__ import annotations

import statistics

import pytest

from planner.hardware import find_gpu
from planner.libraries.registry import find_library
from planner.schema import TrainSetting
from planner.throughput import predict_step, rates_for

shapes = pytest.importorskip("planner.libraries.timm.shapes")

# (model, batch) -> images per second
RTX_3090 = {
    ("swin_tiny_patch4_window7_224", 256): 646.76,
    ("swin_small_patch4_window7_224", 192): 399.67,
    ("swin_base_patch4_window7_224", 128): 279.66,
    ("swin_large_patch4_window7_224", 64): 153.79,
    ("swin_base_patch4_window12_384", 32): 74.03,
    ("swin_s3_tiny_224", 256): 586.39,
    ("swin_s3_base_224", 96): 223.36,
}


@pytest.fixture(scope="module")
def predicted() -> dict[tuple[str, int], float]:
    from planner.step.training import record_training

    rates = rates_for(find_gpu("rtx-3090"))
    published = find_library("timm").published
    found = {}
    for name, batch in RTX_3090:
        config = next(c for n, c in published.items() if n.partition(".")[0] == name)
        setting = TrainSetting(
            precision="fp16", batch_size=batch, attention="eager", optimizer="sgd"
        )

        def build(device, config=config, setting=setting):  # type: ignore[no-untyped-def]
            return shapes.SwinTransformer(device, config, setting)

        ledger = record_training(build, config, setting)
        found[name, batch] = predict_step(ledger.operations(), rates, setting).images_per_second
    return found


def test_images_per_second_are_near_the_published(predicted: dict[tuple[str, int], float]) -> None:
    errors = [abs(predicted[row] / measured - 1) for row, measured in RTX_3090.items()]
    assert statistics.median(errors) < 0.10
    assert max(errors) < 0.20


def test_models_rank_as_measured(predicted: dict[tuple[str, int], float]) -> None:
    assert sorted(RTX_3090, key=predicted.__getitem__) == sorted(RTX_3090, key=RTX_3090.__getitem__)
