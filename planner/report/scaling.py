"""Estimates on several devices as a table: what fits, how fast all are, and what they lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.core.units import format_seconds
from planner.estimation.scaling import LINEAR_SOURCE, ROOT_SOURCE, Scaled
from planner.report.cost import cost_cells, cost_headers
from planner.report.settings import value_text
from planner.report.tables import ALWAYS_SHOWN, header, range_notes, shown_fields, total_text
from planner.report.terminal import table_text, wrapped
from planner.report.verdicts import fits_cell

Column = tuple[str, Callable[[Scaled], str]]
_SPREAD = ("world_size", "nodes", "parallelism", "batch_size")  # have columns of their own
_TEXT = ("parallel-\nism", "fits")


def scaling_table(rows: Sequence[Scaled]) -> str:
    """One row for each number of devices and kind of parallelism, and what the figures mean."""
    columns = _columns(rows)
    names = [name for name, _ in columns]
    align = "".join("l" if name in _TEXT else "r" for name in names)
    table = table_text([[show(row) for _, show in columns] for row in rows], names, align)
    return "\n".join([table, "", *(wrapped(note, indent="  ") for note in _notes(rows))])


def _columns(rows: Sequence[Scaled]) -> list[Column]:
    settings = [row.estimate.setting for row in rows]
    differing = [
        field
        for field in shown_fields(settings)
        if field not in _SPREAD and (field not in ALWAYS_SHOWN or len(_values(rows, field)) > 1)
    ]
    has_nodes = any(setting.nodes > 1 for setting in settings)
    found: list[Column] = [
        ("gpus", lambda row: str(row.estimate.setting.world_size)),
        *([("nodes", lambda row: str(row.estimate.setting.nodes))] if has_nodes else []),
        ("parallel-\nism", lambda row: row.estimate.setting.parallelism),
        *(_field(field) for field in differing),
        ("batch\nper gpu", lambda row: str(row.estimate.setting.batch_size)),
        ("global\nbatch", lambda row: str(row.estimate.setting.global_batch)),
        ("needs\nper gpu", lambda row: total_text(row.estimate)),
    ]  # fmt: skip
    if any(row.estimate.fits is not None for row in rows):
        found.append(("fits", lambda row: fits_cell(row.estimate)))
    if any(row.estimate.throughput is not None for row in rows):
        found += [
            (f"{rows[0].estimate.unit}/s\nof all", _rate),
            ("effi-\nciency", lambda row: _share(row.efficiency)),
            ("step", _step),
            ("exposed", _exposed),
        ]
    names = cost_headers([row.estimate.cost for row in rows])
    found += [(name, _cost(number)) for number, name in enumerate(names)]
    if any(row.linear_rate is not None for row in rows):
        found += [
            ("lr\n(linear)", lambda row: _number(row.linear_rate)),
            ("lr\n(root)", lambda row: _number(row.root_rate)),
        ]
    return found


def _cost(number: int) -> Callable[[Scaled], str]:
    return lambda row: cost_cells(row.estimate.cost)[number]


def _field(field: str) -> Column:
    return header(field), lambda row: value_text(getattr(row.estimate.setting, field))


def _values(rows: Sequence[Scaled], field: str) -> set[object]:
    return {getattr(row.estimate.setting, field) for row in rows}


def _rate(row: Scaled) -> str:
    predicted = row.estimate.throughput
    if predicted is None:
        return ""
    bound = "" if predicted.is_whole else "up to "
    return f"{bound}{predicted.all_images_per_second:,.0f}"


def _step(row: Scaled) -> str:
    predicted = row.estimate.throughput
    return format_seconds(predicted.step_seconds) if predicted else ""


def _exposed(row: Scaled) -> str:
    """Of a step, in which devices only wait for each other."""
    predicted = row.estimate.throughput
    if predicted is None or row.estimate.setting.world_size == 1:
        return ""
    if predicted.communication is None:
        return "not known"
    return format_seconds(predicted.communication.exposed_seconds)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _notes(rows: Sequence[Scaled]) -> list[str]:
    """What the columns mean, and what several devices rest on."""
    found = range_notes([row.estimate for row in rows])
    if any(row.estimate.throughput is not None for row in rows):
        found.append(
            f"Efficiency: against as many GPUs that each work by themselves{_above(rows)}. "
            "Exposed: the part of a step in which a GPU only waits for the others."
        )
    if any(row.linear_rate is not None for row in rows):
        found.append(
            f"Learning rates start from 5e-4 for 512 images. {LINEAR_SOURCE}. {ROOT_SOURCE}."
        )
    return found + _rests_on(rows)


def _above(rows: Sequence[Scaled]) -> str:
    """Why some are more efficient than one by itself."""
    if all(row.efficiency is None or round(row.efficiency, 2) <= 1 for row in rows):
        return ""
    return " (above 100%: each updates only its share of the weights)"


def _rests_on(rows: Sequence[Scaled]) -> list[str]:
    """What several devices rest on beside one, by the kinds of parallelism that do: of each the
    last row with the most machines."""
    estimates = sorted((row.estimate for row in rows), key=lambda e: e.setting.nodes)
    by_kind = {e.setting.parallelism: e for e in estimates if e.setting.world_size > 1}
    alone = {line for e in estimates if e.setting.world_size == 1 for line in e.assumed}
    kinds: dict[str, list[str]] = {}
    for kind, estimate in by_kind.items():
        left_out = [f"left out: {x}" for x in estimate.left_out if "commun" in x.lower()]
        for line in (*estimate.assumed, *left_out):
            kinds.setdefault(line, []).append(kind)
    return [
        f"- {line}" if len(those) == len(by_kind) else f"- {', '.join(those)}: {line}"
        for line, those in kinds.items()
        if line not in alone
    ]
