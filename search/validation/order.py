"""The order in which a matrix's rows are measured: what each teaches, per second that it takes.

A device is often lent for less time than a matrix needs. So the next row is always the one with the
most that is new in it for its seconds:

- a *value* of a facet (a library, a precision, a way of checkpointing …) that no row before had
  counts most: nothing is known of it;
- a value new to its *library* counts less: libraries differ in how they do the same thing;
- a setting that is otherwise new counts little, and one more repeat of it least: noise.

Seconds are a guess, made of the worker's start, the compiler and the steps by their FLOPs. It
decides nothing but the order, so it is no estimate: hundreds of those would take longer than the
first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from planner.libraries.maps import feature_maps
from planner.schema import Model, SwinConfig, TrainSetting
from search.validation.matrix import Row, row_key

# Weights of what is new (judgement).
NEW_VALUE, NEW_IN_LIBRARY, NEW_SETTING, REPEAT = 3.0, 1.0, 0.5, 0.1

# Guesses (judgement: no device has been measured by us). Only their ratios matter.
START_SECONDS = 7.0
COMPILE_SECONDS = {
    "off": 0.0, "default": 45.0, "reduce-overhead": 50.0, "max-autotune": 240.0,
    "max-autotune-no-cudagraphs": 240.0,
}  # fmt: skip
WARMUP_STEPS = 4
FLOPS_PER_SECOND = {"fp32": 2.0e13, "tf32": 5.0e13}  # of whole steps; all others as below
LOW_PRECISION_FLOPS_PER_SECOND = 8.0e13

Facet = tuple[str, object]


def order_rows(rows: Sequence[Row], seconds_of: Callable[[Row], float] | None = None) -> list[Row]:
    """The same rows, what teaches most per second first; of equals the one that was written first.
    `seconds_of` guesses what a row takes."""
    guess = seconds_of or guess_seconds
    taught = [(row, lessons(row), guess(row)) for row in rows]
    known: set[Facet] = set()
    ordered = []
    while taught:
        rates = [worth(of_row, known) / seconds for _, of_row, seconds in taught]
        row, of_row, _ = taught.pop(rates.index(max(rates)))
        ordered.append(row)
        known |= of_row.keys()
    return ordered


def worth(of_row: Mapping[Facet, float], known: set[Facet]) -> float:
    """What a row with these lessons would teach to who knows `known`."""
    return REPEAT + sum(weight for lesson, weight in of_row.items() if lesson not in known)


def lessons(row: Row) -> dict[Facet, float]:
    """What a row teaches, each with its weight."""
    values = facets(row)
    library = values["library"]
    found: dict[Facet, float] = dict.fromkeys(values.items(), NEW_VALUE)
    found |= {
        (f"{name} of {library}", value): NEW_IN_LIBRARY
        for name, value in values.items()
        if name != "library"
    }
    found["setting", row_key(row.model, row.setting)] = NEW_SETTING
    return found


def facets(row: Row) -> dict[str, object]:
    """The values by which rows differ in kind."""
    model, setting = row.model, row.setting
    of_model: dict[str, object] = {"library": "another model", "model": model.title}
    if isinstance(model, SwinConfig):
        of_model = {
            "library": model.library,
            "version": model.version,
            "pixels": model.image_size,
            "width": model.embed_dim,
            "depths": model.depths,
        }
    fields = ("precision", "attention", "checkpointing", "compile", "optimizer", "accumulate")
    return of_model | {
        **{field: getattr(setting, field) for field in fields},
        # Within a factor of four memory and time follow one line.
        "batch": (setting.batch_size.bit_length() + 1) // 2,
    }


def guess_seconds(row: Row) -> float:
    """What measuring a row may take, in seconds."""
    step = step_flops(row.model, row.setting) / FLOPS_PER_SECOND.get(
        row.setting.precision, LOW_PRECISION_FLOPS_PER_SECOND
    )
    timed = max(row.measure_seconds, 3 * step)
    return START_SECONDS + COMPILE_SECONDS[row.setting.compile] + WARMUP_STEPS * step + timed


def step_flops(model: Model, setting: TrainSetting) -> float:
    """FLOPs of one optimizer step's matmuls: per block and token 12·C² multiply-adds in the linear
    layers and 2·C·N in attention (C channels, N tokens of a window), twice again for backward. Any
    other model is taken for a Swin-T: 4.5e9 multiply-adds an image."""
    images = setting.batch_size * setting.accumulate
    if not isinstance(model, SwinConfig):
        return 6 * 4.5e9 * images
    multiply_adds = 0.0
    for stage, (height, width) in enumerate(feature_maps(model)):
        channels, window = model.embed_dim * 2**stage, model.windows[stage]
        per_token = 12 * channels**2 + 2 * channels * window**2
        multiply_adds += model.depths[stage] * height * width * per_token
    again = 4 / 3 if setting.checkpointing != "none" else 1
    return 6 * multiply_adds * images * again
