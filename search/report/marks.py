"""How probes are marked in every chart of a search: precision by colour, checkpointing by shape,
compiled ones hollow, and each way to fail by a shape and a colour of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.page.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    plot_text,
)
from planner.report.settings import describe_setting
from planner.schema import MeasurementRecord
from planner.schema.setting import PRECISIONS
from search.report.wording import (
    ENDS,
    bytes_text,
    end_of,
    end_text,
    expected_text,
    hover,
    interval_of,
    interval_text,
    rate_text,
    seconds_text,
    short,
)

_COLOURS = (BLUE, SKY, GREEN, ORANGE, PURPLE, YELLOW)
PRECISION_COLOURS: dict[str, str] = dict(zip(PRECISIONS, _COLOURS, strict=True))
_SHAPES = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "pentagon",
    "star-triangle-down",
    "hexagon",
)
_END_MARKS = dict(
    zip(
        ENDS,
        (
            ("x", VERMILION), ("triangle-left", VERMILION), ("hourglass", ORANGE),
            ("cross", PURPLE), ("cross", SKY), ("asterisk-open", YELLOW), ("circle-x-open", GREY),
            ("diamond-wide", GREY), ("line-ew-open", GREY),
        ),
        strict=True,
    )
)  # fmt: skip
FAILED = ("x", VERMILION)  # an end that is not known here


@dataclass(frozen=True)
class Probe:
    """A record with its number in the run, from 1 on, and how it ended."""

    number: int
    record: MeasurementRecord
    end: str

    @property
    def ran(self) -> bool:
        """Whether it has a rate and stayed within the budget."""
        return self.end == "measured" and self.record.images_per_second is not None

    @property
    def kind(self) -> tuple[str, str, bool]:
        """What its mark shows: precision, checkpointing, whether blocks are compiled."""
        setting = self.record.setting
        return setting.precision, setting.checkpointing, setting.compile != "off"


def probes_of(records: Sequence[MeasurementRecord], budget_bytes: int | None) -> list[Probe]:
    return [
        Probe(number, record, end_of(record, budget_bytes))
        for number, record in enumerate(records, start=1)
    ]


def by_kind(probes: Sequence[Probe]) -> dict[tuple[str, str, bool], list[Probe]]:
    """Those with a rate by what their marks show: precisions in the order of PRECISIONS."""
    groups: dict[tuple[str, str, bool], list[Probe]] = {}
    for probe in probes:
        if probe.record.images_per_second is not None and probe.end in ("measured", "over_budget"):
            groups.setdefault(probe.kind, []).append(probe)
    return dict(sorted(groups.items(), key=lambda g: (PRECISIONS.index(g[0][0]), g[0][1:])))


def by_end(probes: Sequence[Probe]) -> dict[str, list[Probe]]:
    """Those that did not run within the budget by how they ended, in the order of ENDS."""
    groups: dict[str, list[Probe]] = {}
    for probe in probes:
        if not probe.ran:
            groups.setdefault(probe.end, []).append(probe)
    order = list(ENDS)
    return dict(sorted(groups.items(), key=lambda g: order.index(g[0]) if g[0] in order else 99))


def shapes(probes: Sequence[Probe]) -> dict[str, str]:
    """A shape for each value of checkpointing that was probed."""
    seen = sorted({probe.kind[1] for probe in probes}, key=lambda v: (v != "none", v))
    return {value: _SHAPES[i % len(_SHAPES)] for i, value in enumerate(seen)}


def kind_mark(kind: tuple[str, str, bool], shape: dict[str, str]) -> dict[str, Any]:
    """The legend entry and the marker of a kind, in the legend's group of its precision."""
    precision, checkpointing, compiled = kind
    saved = "no checkpointing" if checkpointing == "none" else f"checkpointing {checkpointing}"
    symbol = shape[checkpointing] + ("-open" if compiled else "")
    colour = PRECISION_COLOURS[precision]
    return {
        "name": plot_text(f"{saved}, {'compiled' if compiled else 'eager'}"),
        "legendgroup": precision,
        "legendgrouptitle": {"text": plot_text(precision)},
        "marker": {
            "symbol": symbol,
            "color": colour,
            "size": 10,
            "line": {"width": 2, "color": colour},
        },
    }


def precision_mark(precision: str) -> dict[str, Any]:
    """The legend entry and the marker of a precision, where nothing else is told apart."""
    marker = {"color": PRECISION_COLOURS[precision], "size": 8}
    return {"name": plot_text(precision), "marker": marker}


def end_mark(end: str) -> dict[str, Any]:
    """The legend entry and the marker of a way to fail."""
    symbol, colour = _END_MARKS.get(end, FAILED)
    return {
        "name": plot_text(end_text(end)),
        "legendrank": 2000,
        "marker": {
            "symbol": symbol,
            "color": colour,
            "size": 11,
            "line": {"width": 2 if "open" in symbol else 0, "color": colour},
        },
    }


def hovers(probes: Sequence[Probe], unit: str) -> dict[str, Any]:
    """What stands beside the pointer at each of them."""
    return {"hovertext": [probe_hover(probe, unit) for probe in probes], "hoverinfo": "text"}


def probe_hover(probe: Probe, unit: str) -> str:
    """A probe as the pointer shows it: setting, rate and its interval, memory, compiling."""
    record = probe.record
    rate = interval = ""
    if record.images_per_second is not None:
        rate = f"{rate_text(record.images_per_second)} {unit}/s"
        interval = f" ({interval_text(interval_of(record))})" if record.step_seconds else ""
    compiling = record.compile_seconds
    return hover(
        [
            f"probe {probe.number}: {describe_setting(record.setting)}",
            rate + interval,
            f"memory {bytes_text(record.used_bytes)}",
            expected_text(record, unit),
            f"compiled in {seconds_text(compiling)}" if compiling else "",
            ""
            if probe.end == "measured"
            else f"{end_text(probe.end)} {short(record.message, 120)}",
            *(short(flag, 120) for flag in record.flags[:3]),
        ]
    )


def legend_below() -> dict[str, Any]:
    """A legend at the chart's lower edge, that takes its room from the chart; each entry switches
    what it names."""
    return {
        "groupclick": "toggleitem",
        "orientation": "h",
        "yref": "container",
        "y": 0,
        "yanchor": "bottom",
    }
