"""`FullyShardedDataParallel` (FSDP1), by the ledger of FSDP2 and a range around it.

FSDP1 gathers a unit directly into the tensor whose views its weights are, where FSDP2 copies them
out; in backward it lays the gradients of a unit end to end beside them. On the CPU, torch 2.13.0,
2026-11-22, live peaks of a steady step differed from FSDP2's by -2.3% to +2.3%, and by less than a
quarter of the largest unit, for an MLP and a small Swin, on 2 and 8 devices, in fp32 and under
autocast (tests/step/test_fsdp1.py). On CUDA what crosses streams is given back when the other
stream is done (`record_stream`), and `limit_all_gathers` lets two units be on their way.
"""

from __future__ import annotations

from dataclasses import replace

from planner.errors import UnsupportedError
from planner.ledger import Allocated, Ledger
from planner.schema import ResolvedSetting, TrainSetting
from planner.schema.distribution import SHARDED
from planner.step.sharding import COPY_IN
from planner.units import format_bytes

UNITS_IN_FLIGHT = 2


def is_fsdp1(setting: TrainSetting) -> bool:
    return setting.parallelism in SHARDED and setting.fsdp_version == 1


def as_fsdp2(setting: TrainSetting) -> ResolvedSetting:
    """The setting whose ledger stands for it. Raises UnsupportedError where none was compared."""
    for field, value, way in (
        ("parallelism", "fsdp", "Choose fsdp, or fsdp_version=2."),
        ("fsdp_param_dtype", "fp32", "Set fsdp_param_dtype=fp32, or fsdp_version=2."),
        ("fsdp_reduce_dtype", "fp32", "Set fsdp_reduce_dtype=fp32, or fsdp_version=2."),
    ):
        if getattr(setting, field) != value:
            law = f"{field} {getattr(setting, field)} is not estimated with fsdp_version=1"
            raise UnsupportedError(f"{law}: it was never compared with FSDP2's.", way)
    return ResolvedSetting(setting.model_copy(update={"fsdp_version": 2}))


def ledger_of_fsdp1(ledger: Ledger) -> Ledger:
    """From that of FSDP2."""
    made = (event for event in ledger.events if isinstance(event, Allocated))
    unit = max((event.num_bytes for event in made if event.stream == COPY_IN), default=0)
    note = (
        "FSDP1 (FullyShardedDataParallel) by FSDP2's ledger, which its live bytes met within a "
        f"unit on the CPU: the range is the largest unit ({format_bytes(unit)}) below, and "
        f"{UNITS_IN_FLIGHT} of them above, since FSDP1 gives memory that crosses streams back "
        "late (record_stream). fsdp_version=2 gives it back at once"
    )
    return replace(
        ledger,
        notes=(*ledger.notes, note),
        doubtful_bytes=unit,
        late_bytes=UNITS_IN_FLIGHT * unit,
        like=None,
    )
