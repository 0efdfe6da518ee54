"""What fails together: which settings the failures so far say will not run, and how surely.

A setting fails because something that it shares with others is broken (the compiler, a compile
mode, a mode with checkpointing, an optimizer's implementation, another lever), or its arm is, or it
alone. Each of these is broken with a small probability beforehand; a probe that ran clears all that
it used, and each that failed needs a cause. A precision or an attention is blamed last, as a device
that was said to have it mostly runs it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.core.schema import TrainSetting
from planner.core.schema.setting import COMPILED_FIELDS
from planner.report.settings import value_text
from search.loop.space import Space
from search.loop.surrogate.arrays import Array, Indices, Mask

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
MAX_SUSPECTS = 10  # the likeliest: their combinations are gone through one by one
# What needs a part of torch, or of another package, that others do without.
_NEEDY = ("offload", *COMPILED_FIELDS, "optimizer_in_backward", "offload_optimizer", "parallelism")
_LEVERS = {field: TrainSetting.model_fields[field].default for field in _NEEDY}


def shared_parts(setting: TrainSetting) -> dict[str, float]:
    """What a setting uses that may be broken for others too, with how probable that is."""
    mode = setting.compile
    found = {setting.precision: NUMERIC, f"attention {setting.attention}": NUMERIC}
    if setting.compiles:
        found["compiler"] = COMPILER
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


class _Case(NamedTuple):
    """The combinations of broken parts that may be: how probable each is given the probes, and how
    probably each arm runs then [combinations, arms]."""

    weights: Array
    runs: Array


class BrokenParts:
    """What is believed of every candidate's running, from the probes told of."""

    def __init__(self, space: Space) -> None:
        names: dict[str, int] = {}
        self.arms = np.array([names.setdefault(c.arm, len(names)) for c in space.candidates])
        firsts = {c.arm: c.setting for c in reversed(space.candidates)}
        self.parts = [shared_parts(firsts[arm]) for arm in names]
        self.failed: dict[int, set[int]] = {}  # by arm: the candidates that failed
        self.cleared: set[str] = set()
        self.cleared_arms: set[int] = set()
        self.case: _Case | None = None

    def ran(self, index: int) -> None:
        """Candidate `index` ran: nothing that it uses is broken."""
        arm = int(self.arms[index])
        self.cleared.update(self.parts[arm])
        self.cleared_arms.add(arm)
        self.case = None

    def broke(self, index: int) -> None:
        """Candidate `index` failed for another reason than memory or time."""
        self.failed.setdefault(int(self.arms[index]), set()).add(index)
        self.case = None

    def probabilities(self) -> Array:
        """The probability that each candidate runs; 1 where no failure says anything of it."""
        case = self._case()
        return np.asarray((case.weights @ case.runs)[self.arms])

    def draw(self, random: np.random.Generator, num_draws: int, at: Indices) -> Mask:
        """Whether each candidate of `at` runs, in so many draws: together where they share."""
        case = self._case()
        runs = case.runs[random.choice(len(case.weights), num_draws, p=case.weights)]
        return np.asarray((random.random(runs.shape) < runs)[:, self.arms[at]])

    def _case(self) -> _Case:
        if self.case is None:
            self.case = self._judge()
        return self.case

    def _judge(self) -> _Case:
        """Bayes' rule over every combination of suspects: the parts of what failed that nothing has
        cleared."""
        suspects = self._suspects()
        priors = np.array(list(suspects.values()))
        broken = _combinations(len(suspects))
        weights = np.where(broken, priors, 1 - priors).prod(axis=1)
        uses = np.array([[s in parts for s in suspects] for parts in self.parts], dtype=bool)
        uses = uses.reshape(len(self.parts), len(suspects))
        breaks = (broken[:, None, :] & uses[None, :, :]).any(axis=2)
        runs = np.ones((len(broken), len(self.parts)))
        for arm, candidates in self.failed.items():
            alone = ALONE ** len(candidates)
            arm_broken = 0.0 if arm in self.cleared_arms else ARM
            unexplained = arm_broken + (1 - arm_broken) * alone
            weights = weights * np.where(breaks[:, arm], 1.0, unexplained)
            runs[:, arm] = (1 - arm_broken) * alone / unexplained
        return _Case(weights / weights.sum(), np.where(breaks, 0.0, runs))

    def _suspects(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for arm in self.failed:
            found |= {p: share for p, share in self.parts[arm].items() if p not in self.cleared}
        likeliest = sorted(found, key=lambda part: -found[part])[:MAX_SUSPECTS]
        return {part: share for part, share in found.items() if part in likeliest}


def _combinations(number: int) -> Mask:
    """[2^number, number]: every way in which some of so many are broken."""
    counts = np.arange(2**number)[:, None]
    return np.asarray((counts >> np.arange(number)) & 1, dtype=bool)


def is_plain(setting: TrainSetting) -> bool:
    """Whether it needs nothing that a machine may lack: eager, and an optimizer of many kernels."""
    if setting.compiles or setting.optimizer_implementation == "fused":
        return False
    return not _levers(setting)
