"""A small Swin, as many tests say it; a library's Swin for a setting that a test wrote by hand,
resolved first, as a command does; and what it means that a step on shapes is the real module's:
torch's own CUDA code, on an emulated GPU, allocates and reserves as much at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest

from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.units import MIB
from planner.estimation.arguments import Target
from planner.estimation.estimate import estimate_ledger
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Event, Freed, Ledger, Tagged
from planner.libraries.microsoft.spec import CHECKOUT_VARIABLE, named_checkout
from planner.libraries.names import find_library
from planner.machine.hardware import Gpu, find_gpu
from planner.recording.recordings import RecordingServer, recorder

if TYPE_CHECKING:
    from torch import nn

    from planner.libraries.spec import BuildOnShapes


TINY_FIELDS: dict[str, Any] = {
    "image_size": 56, "depths": [2, 2], "num_heads": [1, 2], "embed_dim": 32, "num_classes": 10,
}  # fmt: skip
TINY = SwinConfig.model_validate(TINY_FIELDS)


def build_real(model: SwinConfig, setting: TrainSetting) -> nn.Module:
    """The library's own module, with the levers of `setting`."""
    import torch

    from planner.training.assembly import prepare_module, step_setting

    spec = find_library(model.library)
    resolved = spec.resolve(model, setting)
    as_float = resolved.model_copy(update={"precision": "fp32"})
    module, how = spec.build(model, resolved), step_setting(model, as_float)
    return prepare_module(module, how, torch.device("cpu"), move=lambda module, *_: module)


def on_shapes(model: SwinConfig, setting: TrainSetting) -> BuildOnShapes:
    """What builds it on shapes."""
    spec = find_library(model.library)
    return spec.on_shapes(model, spec.resolve(model, setting))


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


CARD = "a100-sxm-80gb"
SEGMENT = 2 * MIB  # blocks of one size may be taken in another order of addresses


def torch_peaks(
    recorder: RecordingServer, model: Model, setting: TrainSetting, gpu: Gpu | None = None
) -> tuple[int, int]:
    """Bytes allocated and reserved of a steady step that nothing watches, in a process of its own.
    Raises PlannerError."""
    found = recorder.ask(dict, "tests.steps:measured_peaks", model, setting, gpu)
    return found["allocated"], found["reserved"]


def measured_peaks(model: Model, setting: TrainSetting) -> dict[str, int]:
    """In the warm process."""
    from torch.cuda import memory

    from planner.recording import step

    training = step._build(model, step.add_recipe(model, setting))
    with step._collector_off():
        for _ in range(step.steps_until_steady(setting)):
            training.step()
            step.finish_collectives()
        memory.reset_peak_memory_stats()
        training.step()
    return {"allocated": memory.max_memory_allocated(), "reserved": memory.max_memory_reserved()}


def assert_as_torch(config: SwinConfig, setting: ResolvedSetting, error: float = 0.0) -> None:
    """Allocated to the byte, reserved but for a segment; or both within a share of `error`."""
    gpu = find_gpu(CARD)
    found = estimate_ledger(config, setting, step_ledger(config, setting, gpu=gpu), Target(gpu))
    allocated, reserved = torch_peaks(recorder, config, setting, gpu)
    off = found.peak_allocated_bytes - allocated, found.peak_reserved_bytes - reserved
    assert abs(off[0]) <= error * allocated, off
    assert abs(off[1]) <= max(SEGMENT, error * reserved), off


def recorded(model: Model, setting: TrainSetting) -> Ledger:
    """The real module's step, as torch's own CUDA code makes it. Raises PlannerError."""
    return recorder.record(model, ResolvedSetting(setting), find_gpu(CARD))


def in_canonical_order(events: Iterable[Event]) -> list[Event]:
    """The events with each run of releases, and each run of tags, ordered by storage: their order
    within one instant is arbitrary (autocast empties a hash map) and moves no size."""
    ordered: list[Event] = []
    for kind, run in groupby(events, type):
        alike = list(run)
        if kind in (Freed, Tagged):
            alike.sort(key=itemgetter(0))
        ordered += alike
    return ordered
