"""What is run to be looked at: a training whose setting nobody has refused or resolved."""

from __future__ import annotations

from functools import cached_property

import torch

from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.schema.observation import Observation
from planner.tasks import as_task
from planner.tasks.compiling import compile_as_set
from planner.training import Training
from search.probe.observation.view import NotHereError
from search.probe.protocol import ProbeRequest
from search.probe.worker.precision import set_precision
from search.probe.worker.subject import seed_everything, touch_libraries


class Subject:
    """The model and setting that an observation names.

    The setting's fields are put in unchecked, and the library's module is built without asking what
    it can do: what the planner refuses must be seen to fail at least once.
    """

    def __init__(self, observation: Observation, device: str) -> None:
        model = resolve_model(observation.model, dict(observation.overrides))
        assert isinstance(model, SwinConfig)
        self.model = model
        self.device = torch.device(device)
        fields = dict(observation.setting)
        spec = find_library(model.library)
        if fields.get("attention", "library") == "library":
            fields["attention"] = spec.default_attention(model)
        self.setting = TrainSetting().model_copy(update=fields)
        if self.setting.precision == "tf32" and self.device.type == "cpu":
            raise NotHereError("the CPU has no tf32")

    @cached_property
    def request(self) -> ProbeRequest:
        return ProbeRequest.model_construct(
            model=self.model, setting=self.setting, device=str(self.device)
        )

    def prepare(self) -> None:
        """What a probe's worker does before it builds."""
        set_precision(self.request)
        seed_everything(0)
        touch_libraries(self.request)

    def training(self) -> Training:
        """A fresh one on the device."""
        built = find_library(self.model.library).build(self.model, ResolvedSetting(self.setting))
        set_precision(self.request)  # the module's code may have set its own
        built = built.to(self.device)
        task = as_task(built, self.model, self.setting)
        compiled = compile_as_set(built, task, self.model, self.setting)
        batch = task.batch(self.setting.batch_size, self.device)
        return Training(built, self.setting, task, batch, compiled)
