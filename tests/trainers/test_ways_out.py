"""Every way out that a refusal names is pasted, and leads to a file.

A way out is `--set FIELD=VALUE …` or `--for TRAINER, …`. What is pasted may be refused by another
law, as a setting may break several, which then names a way out to a file.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.schema.record import Recommendation
from planner.libraries.names import find_library
from planner.trainers.emission import emit
from planner.trainers.registry import TARGETS
from tests.covering import covering
from tests.trainers.cases import GIB, recommendation, tiny
from tests.trainers.test_levers import ASKED

PASTES = 2
DEVICES = {
    "cpu": DeviceInfo(kind="cpu", name="AMD EPYC", total_bytes=64 * GIB),
    "rtx-3090": DeviceInfo(
        kind="cuda", name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB, capability=(8, 6)
    ),
}
FSDP = {"parallelism": "fsdp", "world_size": 4}
HSDP = {"parallelism": "hsdp", "world_size": 4, "nodes": 2}
# fp16 needs a scaler, which reads all gradients.
AS_ONLY = {key: {"precision": "fp32"} for key in ("optimizer_in_backward", "offload_optimizer")}
# Each breaks a law of some trainer, on some device or of some model.
SETTINGS: list[dict[str, Any]] = [
    *({**AS_ONLY.get(name, {}), **fields} for name, asked in ASKED.items() for fields in asked),
    *({"precision": precision} for precision in ("fp32", "tf32")),
    *({"optimizer": name} for name in ("adamw-fused", "adamw-8bit", "sgd", "lion", "adafactor")),
    {"optimizer": "adamw-fused", "precision": "fp16", "clip_grad": True},
    FSDP,
    {**FSDP, "offload": "activations", "fsdp_reshard": False, "precision": "fp32"},
    {**FSDP, "optimizer": "lion"},
    HSDP,
    *({"parallelism": f"zero{stage}", "world_size": 2} for stage in (1, 2, 3)),
    {"parallelism": "zero2", "world_size": 4, "nodes": 2, "precision": "pure-bf16"},
]  # fmt: skip


Way = tuple[str | None, dict[str, str]]
"""A trainer, None for the same one, and what is set."""


def ways_of(line: str) -> list[Way]:
    """What can be pasted of the ways out of one law."""
    found: list[Way] = []
    for way in line.split(", or "):
        changes = dict(re.findall(r"--set (\w+)=([\w.,:-]*\w)", way))
        if changes and "batch_size=N" not in way:  # which its reader is to fill in
            found.append((None, changes))
        named = re.findall(r"[a-z]+", way.partition("--for ")[2])
        found += [(name, {}) for name in named if name in TARGETS]
    return found


def pastes_of(refused: UnsupportedError) -> Iterator[Way]:
    """Each way out, with the first out of every other law; another trainer by itself."""
    laws = [ways for line in refused.way_out.splitlines() if (ways := ways_of(line))]
    for number, ways in enumerate(laws):
        firsts = [other[0] for at, other in enumerate(laws) if at != number]
        for trainer, changes in ways:
            if trainer is not None:
                yield trainer, {}
            else:
                others = (more for _, more in firsts)
                to = next((name for name, _ in firsts if name), None)
                yield to, {k: v for each in (*others, changes) for k, v in each.items()}


def lost(
    found: Recommendation, target: str, changes: dict[str, str], pastes: int = PASTES
) -> list[str]:
    """What leads to no file, of what the refusals say to paste."""
    try:
        emit(found, target, changes=changes)
    except PlannerError as refused:
        here = [f"{target} {changes}: {refused.message} -> {refused.way_out}"]
        if not pastes or not isinstance(refused, UnsupportedError):
            return here
        ends = [
            lost(found, to or target, {**changes, **more}, pastes - 1)
            for to, more in pastes_of(refused)
        ]
        if pastes == PASTES:
            return [line for end in ends for line in end]
        return here if all(ends) else []
    return []


MODEL = tiny(num_classes=1000)


def lost_of(fields: dict[str, Any], device: DeviceInfo, targets: Iterable[str]) -> list[str]:
    """Of a setting that the model's own library runs: others are never found."""
    precision = "fp32" if device.kind == "cpu" else "fp16"
    setting = TrainSetting.model_validate({"batch_size": 16, "precision": precision, **fields})
    if find_library(MODEL.library).setting_faults(MODEL, setting):
        return []
    found = recommendation(MODEL, setting, device=device)
    return [line for target in targets for line in lost(found, target, {})]


# Each setting, and each trainer on each device.
CASES = covering(range(len(SETTINGS)), TARGETS, DEVICES, pairs=[(1, 2)])


def test_a_way_out_leads_to_a_file() -> None:
    found = [lost_of(SETTINGS[n], DEVICES[device], [target]) for n, target, device in CASES]
    assert not any(found), "\n".join(line for lines in found for line in lines)


def test_another_precision_is_one_that_the_gpu_has() -> None:
    """A V100 computes in fp32 and fp16."""
    v100 = DeviceInfo(
        kind="cuda", name="Tesla V100-SXM2-16GB", total_bytes=16 * GIB, capability=(7, 0)
    )
    for precision in ("tf32", "bf16", "pure-bf16"):
        assert lost_of({"precision": precision}, v100, ("pytorch", "timm")) == []
