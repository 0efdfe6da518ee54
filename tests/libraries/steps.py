"""A library's Swin on shapes laid beside its real module."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.microsoft.spec import CHECKOUT_VARIABLE, named_checkout
from planner.libraries.names import find_library
from tests.equality import assert_as_torch

Changes = dict[str, Any]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where one of `packages` is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def require(library: str) -> None:
    """Skips where the library's real module is not here."""
    if library == "microsoft":
        if named_checkout() is None:
            pytest.skip(f"the real module needs a checkout: set {CHECKOUT_VARIABLE} to one")
    elif library != "native" and find_spec(library) is None:
        pytest.skip(f"not installed: {library}")


def assert_equal_to_torch(config: SwinConfig, setting: TrainSetting) -> None:
    """Its peaks with those of the real module under torch's own CUDA code."""
    assert_as_torch(config, find_library(config.library).resolve(config, setting))


def setting_of(changes: Changes) -> TrainSetting:
    """A small batch in bf16, changed."""
    return TrainSetting(**{"batch_size": 2, "precision": "bf16", **changes})


def name_of(value: object) -> str:
    """A test's name from what it changes."""
    if isinstance(value, dict):
        return " ".join(f"{key}={value[key]}" for key in value).replace(" ", "-") or "plain"
    return str(value)
