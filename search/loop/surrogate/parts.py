"""What fails together: which settings the failures so far say will not run, and how surely.

A setting fails because something that it shares with others is broken (the compiler, a compile
mode, a mode with checkpointing, an optimizer's implementation, another lever), or its arm is, or it
alone. Each of these is broken with a small probability beforehand; a probe that ran clears all that
it used, and each that failed needs a cause. A precision or an attention is blamed last, as a device
that was said to have it mostly runs it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from planner.core.schema import TrainSetting
from planner.core.schema.setting import COMPILED_FIELDS
from planner.report.settings import value_text
from search.loop.space import Space
from search.loop.surrogate.process import Array

# How probable it is that each is broken on a machine, before anything is known: judgements. What
# matters is their order: a mode is more often broken than the whole compiler, a shared part more
# often than one arm, an arm more often than one batch of it.
COMPILER = 0.03
MODE = 0.1
CHECKPOINTING_COMPILED = 0.1
CHECKPOINTING_IN_MODE = 0.03
OPTIMIZER = 0.05
LEVER = 0.05
NUMERIC = 0.01  # a precision (but fp8, which another package runs), or an attention
ARM = 0.03
ALONE = 0.01
SURE = 0.8  # so probable a cause explains its failures, and others are looked for: a judgement
# What needs a part of torch, or of another package, that others do without.
_NEEDY = ("offload", *COMPILED_FIELDS, "optimizer_in_backward", "offload_optimizer", "parallelism")
_LEVERS = {field: TrainSetting.model_fields[field].default for field in _NEEDY}


def shared_parts(setting: TrainSetting) -> dict[str, float]:
    """What a setting uses that may be broken for others too, with how probable that is."""
    mode = setting.compile
    found = {setting.precision: NUMERIC, f"attention {setting.attention}": NUMERIC}
    if setting.compiles:
        found["the compiler"] = COMPILER
    if mode != "off":
        found[f"compile {mode}"] = MODE
    if setting.checkpointing != "none":
        if mode != "off":
            found["compiled checkpointing"] = CHECKPOINTING_COMPILED
        found[f"checkpointing in {mode}"] = CHECKPOINTING_IN_MODE
    if setting.optimizer_implementation != "foreach":
        found[setting.optimizer] = OPTIMIZER
    return found | dict.fromkeys(_levers(setting), LEVER)


def _levers(setting: TrainSetting) -> list[str]:
    """What else it needs that others do without."""
    used = [lever for lever, plain in _LEVERS.items() if getattr(setting, lever) != plain]
    found = [f"{lever} {value_text(getattr(setting, lever))}" for lever in used]
    return [*found, "fp8"] if setting.precision == "fp8" else found


class BrokenParts:
    """What is believed of every candidate's running, from the probes told of."""

    def __init__(self, space: Space) -> None:
        names: dict[str, int] = {}
        self.arms = np.array([names.setdefault(c.arm, len(names)) for c in space.candidates])
        firsts = {c.arm: c.setting for c in reversed(space.candidates)}
        self.parts = [shared_parts(firsts[arm]) for arm in names]
        self.failed: dict[int, int] = {}  # by arm: how many of its candidates failed
        self.cleared: set[str] = set()
        self.cleared_arms: set[int] = set()

    def ran(self, index: int) -> None:
        """Candidate `index` ran: nothing that it uses is broken."""
        arm = int(self.arms[index])
        self.cleared.update(self.parts[arm])
        self.cleared_arms.add(arm)

    def broke(self, index: int) -> None:
        """Candidate `index` failed for another reason than memory or time."""
        arm = int(self.arms[index])
        self.failed[arm] = self.failed.get(arm, 0) + 1

    def probabilities(self) -> Array:
        """The probability that each candidate runs; 1 where no failure says anything of it."""
        broken = self._judge()
        found = np.ones(len(self.parts))
        for arm, parts in enumerate(self.parts):
            sound = max(0.0, 1.0 - sum(broken.get(part, 0.0) for part in parts))
            found[arm] = sound * (self._runs_alone(arm) if arm in self.failed else 1.0)
        return np.asarray(found[self.arms])

    def _judge(self) -> dict[str, float]:
        """Bayes' rule, one cause at a time: how probably each part is broken. Failures that a
        surely broken part explains are taken away, and the next cause is looked for."""
        left = {arm: self._suspects(arm) for arm in self.failed}
        broken: dict[str, float] = {}
        while left:
            alone = {arm: self._alone(arm) for arm in left}
            weight = {
                part: share * prod(alone[arm] for arm in left if part not in left[arm])
                for suspects in left.values()
                for part, share in suspects.items()
            }
            total = sum(weight.values()) + prod(alone.values())
            worst = max(weight, key=lambda part: weight[part], default="")
            if not worst or weight[worst] < SURE * total:
                broken |= {part: each / total for part, each in weight.items()}
                break
            broken[worst] = weight[worst] / total
            left = {arm: suspects for arm, suspects in left.items() if worst not in suspects}
        return broken

    def _suspects(self, arm: int) -> dict[str, float]:
        return {p: share for p, share in self.parts[arm].items() if p not in self.cleared}

    def _alone(self, arm: int) -> float:
        """How probably an arm fails so often for a reason of its own."""
        broken = 0.0 if arm in self.cleared_arms else ARM
        return broken + (1 - broken) * float(ALONE ** self.failed[arm])

    def _runs_alone(self, arm: int) -> float:
        """How probably the rest of an arm runs that failed so often, if for no part's sake."""
        broken = 0.0 if arm in self.cleared_arms else ARM
        return (1 - broken) * float(ALONE ** self.failed[arm]) / self._alone(arm)


def is_plain(setting: TrainSetting) -> bool:
    """Whether it needs nothing that a machine may lack: eager, and an optimizer of many kernels."""
    if setting.compiles or setting.optimizer_implementation == "fused":
        return False
    return not _levers(setting)
