"""Random small Swins and settings: on shapes they are the real modules, event by event."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from planner.core.errors import UnsupportedError
from planner.core.schema import SwinConfig
from planner.libraries.registry import find_library
from tests.libraries.steps import assert_equal_to_trace, needs, setting_of

LIBRARIES = ("timm", "torchvision", "transformers")
IN_PARTS = ("blocks:1", "blocks:every-2", "selective")
RATES = st.sampled_from([0.0, 0.1])


@st.composite
def configs(draw: st.DrawFn, library: str) -> SwinConfig:
    """One or two stages of one or two blocks, of a few dozen tokens or hundreds."""
    stages = draw(st.integers(1, 2))
    heads = draw(st.integers(1, 3))
    return SwinConfig.model_validate(
        {
            "library": library,
            "version": draw(st.sampled_from([1, 2])),
            "image_size": (draw(st.integers(16, 60)), draw(st.integers(16, 60))),
            "patch_size": draw(st.sampled_from([2, 4])),
            "in_channels": draw(st.sampled_from([1, 3])),
            "num_classes": draw(st.sampled_from([2, 1000])),
            "embed_dim": heads * draw(st.sampled_from([8, 16])),
            "num_heads": tuple(heads << stage for stage in range(stages)),
            "depths": tuple(draw(st.integers(1, 2)) for _ in range(stages)),
            "window_size": draw(st.integers(2, 8)),
            "mlp_ratio": draw(st.sampled_from([2.0, 4.0])),
            "qkv_bias": draw(st.booleans()),
            "drop_rate": draw(RATES),
            "attn_drop_rate": draw(RATES),
            "drop_path_rate": draw(RATES),
        }
    )


AS_DRAWN = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # to make a failure smaller would take a trace for every attempt
    suppress_health_check=list(HealthCheck),
)
INSTALLED = pytest.mark.parametrize(
    "library", [pytest.param(name, marks=needs(name)) for name in LIBRARIES]
)


@INSTALLED
@settings(AS_DRAWN, max_examples=1)
@given(data=st.data())
def test_random_models(library: str, data: st.DataObject) -> None:
    assert_a_random_model_is_equal(library, data)


@pytest.mark.release
@INSTALLED
@settings(AS_DRAWN, max_examples=25)
@given(data=st.data())
def test_many_random_models(library: str, data: st.DataObject) -> None:
    assert_a_random_model_is_equal(library, data)


def assert_a_random_model_is_equal(library: str, data: st.DataObject) -> None:
    config = data.draw(configs(library), "config")
    spec = find_library(library)
    setting = setting_of(
        {
            "batch_size": data.draw(st.integers(1, 3), "batch"),
            "precision": data.draw(st.sampled_from(["fp32", "bf16", "fp16", "pure-bf16"])),
            "attention": data.draw(st.sampled_from(spec.attentions(config))),
            "checkpointing": data.draw(st.sampled_from((*spec.checkpointings(config), *IN_PARTS))),
        }
    )
    try:
        spec.check(config)
    except UnsupportedError:
        assume(False)
    assert_equal_to_trace(config, setting)
