"""channels_last lays out every parameter and buffer of four dimensions: version 2's table of
coordinates too, which then goes through its MLP as a batch where nothing of that is trained."""

from __future__ import annotations

import pytest

from planner.core.schema import SwinConfig
from tests.libraries.steps import assert_equal_to_trace, needs, needs_checkout, setting_of

LIBRARIES = [
    "native",
    *(pytest.param(name, marks=needs(name)) for name in ("timm", "torchvision", "transformers")),
    pytest.param("microsoft", marks=needs_checkout),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("version", [1, 2])
def test_channels_last_is_equal_frozen_and_validated(library: str, version: int) -> None:
    config = SwinConfig.model_validate(
        {
            "library": library, "version": version, "image_size": 56, "depths": (1, 1),
            "num_heads": (2, 4), "embed_dim": 32, "num_classes": 10,
        }
    )  # fmt: skip
    setting = {"memory_format": "channels_last", "frozen_stages": 1, "validation_batch_size": 2}
    assert_equal_to_trace(config, setting_of(setting))
