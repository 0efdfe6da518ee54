"""What a setting can say and no step runs yet: refused wherever a setting is resolved."""

from __future__ import annotations

from collections.abc import Iterator

from planner.libraries.limits import SettingFault
from planner.schema import TrainSetting


def pending(setting: TrainSetting) -> Iterator[SettingFault]:
    """A fault for each value of `setting` that cannot be estimated, probed or written yet."""
    if setting.compile_scope != "model":
        yield _fault("compile_scope", setting, "model")
    if setting.compile_dynamic:
        yield _fault("compile_dynamic", setting, "false")
    if setting.compile_fullgraph:
        yield _fault("compile_fullgraph", setting, "false")
    if setting.activation_memory_budget < 1:
        yield _fault("activation_memory_budget", setting, "1")


def _fault(field: str, setting: TrainSetting, instead: str) -> SettingFault:
    return SettingFault(
        f"this version cannot run every {field}",
        f"{field} is {getattr(setting, field)}",
        f"Set {field}={instead}.",
        field=field,
        instead=instead,
    )
