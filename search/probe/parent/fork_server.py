"""The process that the workers of probes are forked from: it has imported torch and the model's
library."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema import Model
from planner.machine.forking import ForkServer as WarmProcess
from planner.recording.recordings import library_modules
from search.probe.parent.environment import probe_environment

# What every eager probe imports; the first optimizer of a process would import torch._dynamo.
STEP_MODULES = ("search.probe.worker.measure", "torch._dynamo", "search.probe.worker.worker")
# Of ranks too: FSDP's part of torch takes a second more.
WORLD_MODULES = (*STEP_MODULES, "torch.distributed.fsdp")


class ForkServer(WarmProcess):
    """It imports `modules` and the library of `model`; a factory of the user's runs in the worker
    alone. Workers have the environment and the current directory of the moment it was made."""

    def __init__(self, model: Model | None = None, modules: Sequence[str] = STEP_MODULES) -> None:
        library = library_modules(str(getattr(model, "library", "")))
        # torch.cuda.is_available() then asks NVML, where it would else initialise CUDA.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **probe_environment()}
        super().__init__([*modules, *library], environment)
