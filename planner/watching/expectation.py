"""What a plan says of a training: the figures that a running one is held against. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import UsageError
from planner.core.files import named_path, to_json

if TYPE_CHECKING:
    from planner.core.schema.record import Recommendation


@dataclass(frozen=True)
class Expectation:
    """Figures of one device; None where the plan says nothing. Sizes in bytes, rates in images a
    second, `images_per_step` the images of one optimizer step.

    `basis` is "measured" or "estimated". `waiting_share` is what of its time the device is expected
    to wait for batches.
    """

    source: str
    basis: str
    device: str | None = None
    images_per_step: int | None = None
    images_per_second: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    waiting_share: float | None = None

    def figures(self) -> dict[str, Any]:
        """What an interval's line has beside what was measured."""
        shown = ("images_per_second", "peak_allocated_bytes", "peak_reserved_bytes")
        return {key: value for key, value in self.as_json().items() if key in shown}

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_expectation(plan: Any) -> Expectation | None:
    """What `plan` says: None, an Expectation, a Recommendation, an Estimate, a record of a probe,
    the JSON of an estimate, or the path of `recommendation.json`, of the folder that holds it or of
    `planner estimate --json`. Raises PlannerError."""
    if plan is None or isinstance(plan, Expectation):
        return plan
    if isinstance(plan, str | PathLike):
        return _read_file(named_path(plan, "plan"))
    if isinstance(plan, Mapping):
        return _of_mapping(plan, "the plan")
    if hasattr(plan, "evidence") and hasattr(plan, "feeding"):
        return _of_recommendation(plan, "a recommendation")
    if hasattr(plan, "peak_allocated_bytes"):
        return _of_estimate(to_json(plan), "an estimate")
    raise UsageError(
        f"a plan is a recommendation, an estimate or a path, and this is a {type(plan).__name__}.",
        "Pass the folder that 'planner tune' wrote, or what planner.estimate returned.",
    )


def _read_file(path: Path) -> Expectation:
    from planner.core.files import MAX_RESULT_BYTES, TUNE_RESULT, parse_json, read_text

    file = path / TUNE_RESULT if path.is_dir() else path
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise UsageError(f"{file} is no regular file.", "Name a file, or the folder of a run.")
    data = parse_json(read_text(file, MAX_RESULT_BYTES), str(file))
    if isinstance(data, list) and len(data) == 1:  # `planner estimate --json` of one setting
        data = data[0]
    if not isinstance(data, Mapping):
        raise UsageError(f"{file} holds neither a recommendation nor one estimate.")
    return _of_mapping(data, str(file))


def _of_mapping(data: Mapping[str, Any], source: str) -> Expectation:
    if "peak_live_bytes" in data and "setting" in data:
        return _of_estimate(data, source)
    from planner.core.schema import parse
    from planner.core.schema.record import Recommendation

    return _of_recommendation(parse(Recommendation, dict(data), source), source)


def _of_recommendation(found: Recommendation, source: str) -> Expectation:
    evidence, setting = found.evidence, found.setting
    if evidence is None or setting is None:
        raise UsageError(f"{source} recommends nothing: no setting fitted.")
    is_cuda = found.device.kind == "cuda"  # on the CPU a probe's bytes are of its whole process
    fed = found.feeding
    rate = evidence.images_per_second
    if fed is not None:
        rate = fed.images_per_second or rate
    return Expectation(
        source=source,
        basis="measured",
        device=found.device.name,
        images_per_step=setting.batch_size * setting.accumulate,
        images_per_second=rate,
        peak_allocated_bytes=evidence.peak_allocated_bytes if is_cuda else None,
        peak_reserved_bytes=evidence.peak_reserved_bytes if is_cuda else None,
        waiting_share=fed.waited if fed is not None else None,
    )


def _of_estimate(data: Mapping[str, Any], source: str) -> Expectation:
    setting = data["setting"]
    rates = data.get("throughput") or {}
    return Expectation(
        source=source,
        basis="estimated",
        images_per_step=int(setting["batch_size"]) * int(setting.get("accumulate", 1)),
        images_per_second=rates.get("images_per_second"),
        peak_allocated_bytes=data.get("peak_allocated_bytes"),
        peak_reserved_bytes=data.get("peak_reserved_bytes"),
    )
