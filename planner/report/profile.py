"""What `planner profile` found: measured beside predicted, by kind of operation."""

from __future__ import annotations

from planner.core.schema.record import ProfileRecord
from planner.core.units import format_seconds
from planner.report.page import contents as doc
from planner.report.settings import describe_setting
from planner.report.text import parts_text

_NUM_TOP, _NAME_CHARACTERS = 8, 60  # profile.json has more
_LEAST_SHARE = 0.001  # of a step: what is shorter is left out of a table


def profile_text(found: ProfileRecord) -> str:
    return parts_text(profile_answer(found))


def profile_answer(found: ProfileRecord) -> list[doc.Part]:
    """The step, the table by kind, what takes most, and what to know of it."""
    probe, total, planned = found.probe, found.profiled_step_seconds, found.predicted_step_seconds
    setting = describe_setting(probe.setting, probe.model)
    lines = [
        f"{probe.model.title} on {probe.device.title}: {setting}",
        f"{format_seconds(found.step_seconds)} a step measured; {format_seconds(total)} under the "
        f"profiler, {total / found.step_seconds:.2f} × as long. The measured seconds below are of "
        "the latter.",
    ]
    if planned is not None:
        off = f"±{found.uncertainty:.0%} ({found.basis})"
        lines.append(f"{format_seconds(planned)} a step predicted {off}.")
    kinds: list[list[doc.Cell]] = []
    for row in found.kinds:
        measured, predicted = row.measured_seconds, row.predicted_seconds or 0.0
        if max(measured / total, predicted / (planned or 1.0)) >= _LEAST_SHARE:
            cells: list[doc.Cell] = [
                row.kind,
                doc.seconds_cell(measured),
                doc.share_cell(measured, total),
            ]
            if planned is not None:
                ratio = f"{measured / predicted:.3g} ×" if predicted else "-"
                share = doc.share_cell(predicted, planned)
                cells += [doc.seconds_cell(predicted), share, doc.Number(None, ratio)]
            kinds.append(cells)
    headers = ["operation", "measured", "share"]
    headers += ["predicted", "share", "measured /\npredicted"] if planned is not None else []
    top: list[list[doc.Cell]] = [
        [
            each.name if len(each.name) <= _NAME_CHARACTERS else f"{each.name[:59]}…",
            doc.seconds_cell(each.seconds), doc.share_cell(each.seconds, total),
            doc.Number(each.calls, f"{each.calls:.4g}"), each.kind,
        ]
        for each in found.top[:_NUM_TOP]
    ]  # fmt: skip
    return [
        doc.Text("\n".join(lines)),
        doc.Table(headers, kinds, first=len(kinds)),
        doc.Table(["operation, its own time", "time", "share", "calls", "kind"], top),
        doc.Text("\n".join(f"- {note}" for note in found.notes)),
    ]
