"""What `planner profile` found, as text: measured beside predicted, by kind of operation."""

from __future__ import annotations

from planner.core.schema.profile import ProfileRecord
from planner.core.units import format_seconds
from planner.report.settings import describe_setting
from planner.report.terminal import table_text, wrapped

_NUM_TOP, _NAME_CHARACTERS = 8, 60  # profile.json has more
_LEAST_SHARE = 0.001  # of a step: what is shorter is left out of a table


def profile_text(found: ProfileRecord) -> str:
    """The step, the table by kind, what takes most, and what to know of it."""
    parts = [_heading(found), _kinds(found), _top(found) if found.top else ""]
    parts.append("\n".join(wrapped(f"- {note}", "  ") for note in found.notes))
    return "\n\n".join(part for part in parts if part)


def _heading(found: ProfileRecord) -> str:
    probe, under = found.probe, found.profiled_step_seconds
    lines = [
        f"{probe.model.title} on {probe.device.title}: "
        f"{describe_setting(probe.setting, probe.model)}",
        f"{format_seconds(found.step_seconds)} a step measured; {format_seconds(under)} under the "
        f"profiler, {under / found.step_seconds:.2f} × as long. The measured seconds below are of "
        "the latter.",
    ]
    if found.predicted_step_seconds is not None:
        lines.append(
            f"{format_seconds(found.predicted_step_seconds)} a step predicted "
            f"±{found.uncertainty:.0%} ({found.basis})."
        )
    return "\n".join(wrapped(line) for line in lines)


def _kinds(found: ProfileRecord) -> str:
    total, planned = found.profiled_step_seconds, found.predicted_step_seconds
    rows = []
    for row in found.kinds:
        measured, predicted = row.measured_seconds, row.predicted_seconds or 0.0
        if max(measured / total, predicted / (planned or 1.0)) < _LEAST_SHARE:
            continue
        cells = [row.kind, format_seconds(measured), f"{measured / total:.1%}"]
        if planned is not None:
            ratio = f"{measured / predicted:.3g} ×" if predicted else "-"
            cells += [format_seconds(predicted), f"{predicted / planned:.1%}", ratio]
        rows.append(cells)
    headers = ["operation", "measured", "share"]
    headers += ["predicted", "share", "measured /\npredicted"] if planned is not None else []
    return table_text(rows, headers, "lr")


def _top(found: ProfileRecord) -> str:
    rows = [
        [
            each.name if len(each.name) <= _NAME_CHARACTERS else f"{each.name[:59]}…",
            format_seconds(each.seconds), f"{each.seconds / found.profiled_step_seconds:.1%}",
            f"{each.calls:.4g}", each.kind,
        ]
        for each in found.top[:_NUM_TOP]
    ]  # fmt: skip
    return table_text(rows, ["operation, its own time", "time", "share", "calls", "kind"], "lrrrl")
