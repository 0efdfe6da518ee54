"""What `planner profile` found, as text: measured beside predicted, by phase and by operation."""

from __future__ import annotations

from collections.abc import Callable

from planner.core.schema.profile import ProfiledPart, ProfileRecord
from planner.core.units import format_seconds
from planner.report.settings import describe_setting
from planner.report.terminal import table_text, wrapped

_NUM_TOP = 8  # rows; profile.json has more
_NAME_CHARACTERS = 60
# Of a step: what is shorter is left out of a table.
_LEAST_SHARE = 0.001


def profile_text(found: ProfileRecord) -> str:
    """The step, the two tables, what takes most, and what to know of it."""
    unit = "operation" if found.probe.device.kind == "cpu" else "kernel"
    parts = [
        _heading(found),
        _compared("phase", found, lambda part: part.phase) if found.parts else "",
        _compared("operation", found, lambda part: part.kind) if found.parts else "",
        _top(found, unit) if found.top else "",
        "\n".join(wrapped(f"- {note}", "  ") for note in found.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def sums(
    parts: tuple[ProfiledPart, ...], key: Callable[[ProfiledPart], str]
) -> dict[str, tuple[float, float]]:
    """(measured, predicted) seconds by `key`, the longest measured first."""
    found: dict[str, tuple[float, float]] = {}
    for part in parts:
        measured, predicted = found.get(key(part), (0.0, 0.0))
        found[key(part)] = (
            measured + part.measured_seconds,
            predicted + (part.predicted_seconds or 0.0),
        )
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _heading(found: ProfileRecord) -> str:
    probe = found.probe
    setting = describe_setting(probe.setting, probe.model)
    lines = [
        f"{probe.model.title} on {probe.device.title}: {setting}",
        f"{format_seconds(found.step_seconds)} a step measured "
        f"({_steps(len(probe.step_seconds))}); "
        f"{format_seconds(found.profiled_step_seconds)} under the profiler "
        f"({_steps(found.num_steps)}), {found.overhead:.2f} × as long. The measured seconds below "
        "are of the latter.",
    ]
    if found.predicted_step_seconds is not None:
        lines.append(
            f"{format_seconds(found.predicted_step_seconds)} a step predicted "
            f"±{found.uncertainty:.0%} ({found.basis})."
        )
    return "\n".join(wrapped(line) for line in lines)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _compared(what: str, found: ProfileRecord, key: Callable[[ProfiledPart], str]) -> str:
    total, predicted_total = found.profiled_step_seconds, found.predicted_step_seconds
    rows = []
    for name, (measured, predicted) in sums(found.parts, key).items():
        if max(measured / total, predicted / (predicted_total or 1.0)) < _LEAST_SHARE:
            continue
        row = [name, format_seconds(measured), f"{measured / total:.1%}"]
        if predicted_total is not None:
            row += [
                format_seconds(predicted),
                f"{predicted / predicted_total:.1%}",
                _ratio(measured / predicted) if predicted else "-",
            ]
        rows.append(row)
    headers = [what, "measured", "share"]
    if predicted_total is not None:
        headers += ["predicted", "share", "measured /\npredicted"]
    return table_text(rows, headers, "lr")


def _ratio(ratio: float) -> str:
    """`1.13 ×`, and `2,430 ×` in place of `2.43e+03 ×`."""
    return f"{ratio:.3g} ×" if ratio < 999.5 else f"{ratio:,.0f} ×"


def _top(found: ProfileRecord, unit: str) -> str:
    rows = [
        [
            _shortened(operation.name),
            format_seconds(operation.seconds),
            f"{operation.seconds / found.profiled_step_seconds:.1%}",
            f"{operation.calls:.4g}",
            operation.kind,
        ]
        for operation in found.top[:_NUM_TOP]
    ]
    headers = [f"{unit}, its own time", "measured", "share", "calls", "counts as"]
    return table_text(rows, headers, "lrrrl")


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 1]}…"
