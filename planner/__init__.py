"""Train a vision model as fast as the card allows, without running out of memory.

    planner.estimate("timm:swin_tiny_patch4_window7_224", gpu="RTX 3090", batch_size=64)
    planner.advise("timm:swin_base_patch4_window12_384", gpu="RTX 4090", batch_size=256)
    search.tune("native:swin_tiny", output="tuned")
    planner.emit("tuned", "timm")

Names are imported when they are first used: `import planner` is quick, and estimating imports
neither torch nor optuna.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from planner.advice.advice import Advice, advise
    from planner.core.errors import PlannerError, UnsupportedError, UsageError
    from planner.core.schema import MeasurementRecord, SwinConfig, TrainSetting
    from planner.core.schema.record import Recommendation
    from planner.estimation.estimate import Estimate, estimate
    from planner.estimation.largest import largest_batch
    from planner.libraries.names import resolve_model
    from planner.machine.hardware import Gpu, all_gpus, find_gpu
    from planner.programs.emulated import EmulatedRun
    from planner.programs.explanation import Explanation, explain
    from planner.programs.running import emulate
    from planner.programs.watch import Watch, watch
    from planner.trainers.emission import emit, emit_setting

_HOMES = {
    "Advice": "planner.advice.advice", "advise": "planner.advice.advice",
    "emit": "planner.trainers.emission", "emit_setting": "planner.trainers.emission",
    "PlannerError": "planner.core.errors", "UnsupportedError": "planner.core.errors",
    "UsageError": "planner.core.errors",
    "EmulatedRun": "planner.programs.emulated",
    "emulate": "planner.programs.running",
    "Estimate": "planner.estimation.estimate", "estimate": "planner.estimation.estimate",
    "Explanation": "planner.programs.explanation",
    "explain": "planner.programs.explanation",
    "largest_batch": "planner.estimation.largest",
    "Gpu": "planner.machine.hardware", "all_gpus": "planner.machine.hardware",
    "find_gpu": "planner.machine.hardware",
    "resolve_model": "planner.estimation.arguments",
    "MeasurementRecord": "planner.core.schema", "SwinConfig": "planner.core.schema",
    "TrainSetting": "planner.core.schema",
    "Recommendation": "planner.core.schema.record",
    "Watch": "planner.programs.watch", "watch": "planner.programs.watch",
}  # fmt: skip

__all__ = [
    "Advice", "EmulatedRun", "Estimate", "Explanation", "Gpu", "MeasurementRecord",
    "PlannerError", "Recommendation", "SwinConfig", "TrainSetting", "UnsupportedError",
    "UsageError", "Watch", "__version__", "advise", "all_gpus", "emit",
    "emit_setting", "emulate", "estimate", "explain", "find_gpu", "largest_batch",
    "resolve_model", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
