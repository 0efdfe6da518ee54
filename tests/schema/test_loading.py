"""A loader's setting, in the words of torch."""

from __future__ import annotations

import pytest

from planner.core.schema.loading import LoaderSetting

torch_data = pytest.importorskip("torch.utils.data")


def test_its_arguments_are_a_data_loader_s() -> None:
    for setting in (
        LoaderSetting(workers=1, prefetch_factor=3, persistent_workers=False, pin_memory=False),
        LoaderSetting(workers=0, batch_size=3, pin_memory=False),
    ):
        given = setting.arguments
        made = torch_data.DataLoader(range(8), **given)
        assert {name: getattr(made, name) for name in given} == given
