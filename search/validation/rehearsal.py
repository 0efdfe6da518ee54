"""A matrix with tiny models, small batches and short times: to see that all of it runs here before
a device's minutes are spent on it."""

from __future__ import annotations

from dataclasses import replace

from planner.libraries.registry import find_library
from planner.schema import SwinConfig
from planner.schema.observation import Observation
from search.validation.matrix import Matrix, Row

# One block that every library can build: a compiler takes seconds for it.
TINY = {
    "image_size": (56, 56), "embed_dim": 16, "depths": (1,), "num_heads": (1,), "num_classes": 10,
}  # fmt: skip
BATCH_SIZE = 2
# Near the limit what is short must be tensors, which a larger batch has more of, and by more than
# a process's small change.
LIMIT_BATCH_SIZE, LIMIT_SHARE = 256, 0.25
TIME_SHARE = 0.02
LEAST_SECONDS = 0.1
# A busy machine without a GPU compiles and imports slowly.
DEADLINE_SECONDS = 300.0


def rehearse(matrix: Matrix) -> Matrix:
    """The same list, made small; a budget of the file's does not hold."""
    rows = {row.key: row for row in map(_small_row, matrix.rows)}
    observations = tuple(_small_observation(o) for o in matrix.observations)
    return Matrix(tuple(rows.values()), observations)


def _small_observation(observation: Observation) -> Observation:
    near_limit = observation.see == "near-limit"
    setting = dict(observation.setting)
    if observation.model:
        setting["batch_size"] = LIMIT_BATCH_SIZE if near_limit else BATCH_SIZE
    return observation.model_copy(
        update={
            "overrides": {**observation.overrides, **_written(TINY)} if observation.model else {},
            "setting": setting,
            "seconds": tuple(max(LEAST_SECONDS, s * TIME_SHARE) for s in observation.seconds),
            "share": LIMIT_SHARE if near_limit else observation.share,
            "deadline": DEADLINE_SECONDS,
            "when_short": {},
        }
    )


def _written(fields: dict[str, object]) -> dict[str, str]:
    """Fields as they are written on a command line."""
    return {
        name: ",".join(str(v) for v in value) if isinstance(value, tuple) else str(value)
        for name, value in fields.items()
    }


def _small_row(row: Row) -> Row:
    if not isinstance(row.model, SwinConfig):
        return row
    model = row.model.model_copy(update=TINY)
    setting = row.setting.model_copy(update={"batch_size": BATCH_SIZE})
    setting = find_library(model.library).resolve(model, setting)
    seconds = max(LEAST_SECONDS, row.measure_seconds * TIME_SHARE)
    return replace(row, model=model, setting=setting, measure_seconds=seconds)
