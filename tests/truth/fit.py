"""What records say of a device's constants, as `planner/machine/hardware/overheads.json` has them:
`python -m tests.truth.fit FILE…`.

A quarter of all settings is held out: it judges a fit and never enters it. What kernels reach of a
datasheet's figures is fitted by `python -m tests.benchmarks.fit_rates`.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from pydantic import BaseModel

from planner.core.schema import MeasurementRecord, Model, SwinConfig, TrainSetting
from search.loop.records import read_records
from tests.truth.compare import Comparison, accuracy, compare, gpu_of

HELD_OUT_ONE_IN = 4
# The recipe that was the default when the held-out quarter was drawn.
FORMER_RECIPE: dict[str, Any] = {"loss": "cross-entropy", "clip_grad": False}
# The fields of models and settings when the held-out quarter was drawn, 2026-11-20.
DRAWN_FIELDS = (
    "library", "name", "version", "image_size", "patch_size", "in_channels", "num_classes",
    "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "qkv_bias", "drop_rate",
    "attn_drop_rate", "drop_path_rate", "patch_norm", "absolute_position_embedding",
    "pretrained_window_size", "batch_size", "accumulate", "world_size", "precision",
    "checkpointing", "compile", "attention", "optimizer", "memory_format", "parallelism",
    "loss", "amsgrad", "clip_grad", "ema", "zero_grad_to_none", "frozen_stages", "lora_rank",
    "validation_batch_size", "factory",
)  # fmt: skip
# Words of the flags that meters leave where bytes may not be the setting's own: others hold memory,
# or it ran short and cached segments were given back.
DISTURBED = (
    "other processes", "cached memory was given back", "out-of-memory errors were caught",
)  # fmt: skip


def is_held_out(record: MeasurementRecord) -> bool:
    """Whether a record judges the fit instead of entering it: a fixed quarter of all settings,
    chosen by a hash of model and setting, before anything is measured."""
    key = drawn_key(record.model, record.setting)
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def drawn_key(model: Model, setting: TrainSetting) -> str:
    """Model and setting as they were written when the quarter was drawn: a field that came later
    moves no row across, as long as it has its default, nor does one that moved in its class. With
    its model's recipe, which is the default now, a row is where it was with that of then."""
    plain = setting.without_recipe(isinstance(model, SwinConfig))
    if plain.loss == "library":
        plain = plain.model_copy(update=FORMER_RECIPE)
    return json.dumps([_as_drawn(model), _as_drawn(plain)])


def _as_drawn(value: BaseModel) -> dict[str, Any]:
    fields = type(value).model_fields
    written = value.model_dump(mode="json")
    if isinstance(value, TrainSetting):
        written |= {"amsgrad": False, "validation_batch_size": 0}  # fields of then
    later = [
        name
        for name in written
        if name not in DRAWN_FIELDS and getattr(value, name) != fields[name].get_default()
    ]
    return {name: written[name] for name in (*DRAWN_FIELDS, *later) if name in written}


def fit_overheads(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """architecture -> the entry of `planner/machine/hardware/overheads.json`, from the rows not
    held out.

    The context is the median of device bytes less reserved bytes; the error of reserved bytes is
    the worst seen, and never under 1%. Only eager rows count whose bytes are their own: none where
    other processes held memory, or where memory ran short meanwhile.
    """
    fitted: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[Comparison]] = {}
    for c in comparisons:
        record, gpu = c.record, gpu_of(c.record)
        disturbed = any(word in flag for word in DISTURBED for flag in record.flags)
        eager = record.setting.compile == "off"
        if gpu and eager and not (record.device.emulated or disturbed or is_held_out(record)):
            groups.setdefault(gpu.architecture, []).append(c)
    for architecture, rows in groups.items():
        contexts = sorted(
            c.record.device_bytes - c.record.peak_reserved_bytes
            for c in rows
            if c.record.device_bytes and c.record.peak_reserved_bytes
        )
        reserved = accuracy(rows, "reserved")
        if not contexts or reserved is None:
            continue
        names = sorted({c.record.device.name for c in rows})
        torch = sorted({c.record.versions.get("torch", "?") for c in rows})
        dates = sorted(c.record.date[:10] for c in rows)
        fitted[architecture] = {
            "context_bytes": int(median(contexts)),
            "context_low_bytes": contexts[0],
            "context_high_bytes": contexts[-1],
            "reserved_error": max(0.01, round(reserved.worst, 4)),
            "basis": (
                f"context and range measured on {', '.join(names)}, torch {', '.join(torch)}, "
                f"{dates[0]} to {dates[-1]}, {len(rows)} rows"
            ),
        }
    return fitted


if __name__ == "__main__":
    read = [record for file in sys.argv[1:] for record in read_records(file).records]
    print(json.dumps(fit_overheads(compare(read)), indent=2))
