"""The page's section of memory against images/s: every probe, the front, the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planner.page.contents import Chart, Part, Section, Text
from planner.page.plotting import GREY, VERMILION, new_figure, plot_text
from planner.report.settings import describe_setting
from planner.units import GIB, MIB, format_bytes
from search.report.marks import (
    by_end,
    by_kind,
    end_mark,
    kind_mark,
    legend_below,
    named_point,
    points,
    shapes,
)
from search.report.probe import Probe
from search.report.run import Run
from search.report.wording import bytes_text, count, end_text, hover, interval_text, rate_text
from search.result.contenders import Contender, choose, pareto_front
from search.space import setting_id

MOST_PARTS = 6  # charts of a file that holds several models; the table of probes has them all
_FAR = 1.6  # a budget so many times the largest probe is told, not drawn: the probes would be dots
_MARGIN = 1.15  # right of them all; what needs still more stands at the edge
_STRIP = 0.16  # of the chart's height, for those that have no rate


def front(run: Run, key: str) -> list[Section]:
    """Memory against images/s, a chart for each model and device; none where no step was probed."""
    if not run.records:
        return []
    parts: list[Part] = []
    several = len(run.parts) > 1
    for number, one in enumerate(run.parts[:MOST_PARTS], start=1):
        parts += [Text(one.title)] if several else []
        parts += _one(one, f"{key}-front-{number}")
    more = len(run.parts) - MOST_PARTS
    if more > 0:
        parts.append(Text(f"{count(more, 'more model')}: see the table of probes.", "note"))
    return [Section("front", f"Memory against {run.unit}/s", parts)]


def _one(run: Run, key: str) -> list[Part]:
    drawn = Drawing(run, run.probes)
    if not drawn.run.contenders and not by_kind(drawn.probes):
        ends = ", ".join(
            f"{len(held)} {end_text(end)}" for end, held in by_end(drawn.probes).items()
        )
        said = f"No probe measured a rate ({ends}): the strip shows what memory is known of them."
        return [Text(said), drawn.chart(key)]
    return [drawn.chart(key), Text(_said(drawn), "note")]


def _said(drawn: Drawing) -> str:
    """How to read it, and what is not within its edges."""
    said = [
        "Up is faster, left is smaller. Each probe is a point; colour is the precision, shape the "
        "checkpointing, hollow is compiled. Click the legend to hide some."
    ]
    if drawn.budget is not None and not drawn.draws_budget:
        said.append(
            f"The budget of {format_bytes(drawn.budget)} lies far to the right: every probe drawn "
            "here is well within it."
        )
    if len(drawn.front) > 1:
        said.append(f"The line is the front: its {len(drawn.front)} settings have none beside them "
                    "that is both faster and smaller.")  # fmt: skip
    return " ".join(said)


@dataclass(frozen=True)
class Drawing:
    """A run of one model on one device, to be drawn."""

    run: Run
    probes: Sequence[Probe]

    @property
    def budget(self) -> int | None:
        return self.run.budget_bytes

    @cached_property
    def front(self) -> list[Contender]:
        return [c for c in pareto_front(self.run.contenders) if c.num_bytes is not None]

    @cached_property
    def most_bytes(self) -> int:
        """The most that a probe took."""
        return max((p.record.used_bytes or 0 for p in self.probes), default=0)

    @cached_property
    def draws_budget(self) -> bool:
        return self.budget is not None and (
            self.most_bytes == 0 or self.budget <= _FAR * self.most_bytes
        )

    @cached_property
    def right(self) -> float:
        """The right edge in bytes."""
        most = max(self.most_bytes, self.budget or 0 if self.draws_budget else 0)
        return _MARGIN * (most or GIB)

    @cached_property
    def scale(self) -> tuple[int, str]:
        return (GIB, "GiB") if self.right >= 1.5 * GIB else (MIB, "MiB")

    def chart(self, key: str) -> Chart:
        figure = new_figure([*self._traces()], **self._layout())
        kinds = list(by_kind(self.probes))
        legend = len(kinds) + len({kind[0] for kind in kinds}) + len(self._failed)
        height_px = 420 + 24 * len(self._failed) + 14 * legend
        return Chart(key, figure, self._description(), height_px)

    @cached_property
    def _failed(self) -> dict[str, list[Probe]]:
        return {end: held for end, held in by_end(self.probes).items() if end != "over_budget"}

    @cached_property
    def _has_gutter(self) -> bool:
        """Whether some probe's memory is not known: such stand left of nothing."""
        return any(place_of(probe) is None for probe in self.probes)

    def _x(self, num_bytes: float | None) -> float:
        place = -0.06 * self.right if num_bytes is None else min(num_bytes, 0.98 * self.right)
        return place / self.scale[0]

    def _traces(self) -> list[dict[str, Any]]:
        shape = shapes(self.probes)
        traces = [self._front_line()] if len(self.front) > 1 else []
        for kind, held in by_kind(self.probes).items():
            rates = [p.record.images_per_second for p in held]
            traces.append(self._points(held, rates, **kind_mark(kind, shape)))
        for end, held in self._failed.items():
            names = [end_text(end)] * len(held)
            traces.append(self._points(held, names, yaxis="y2", **end_mark(end)))
        return [*traces, *self._named()]

    def _points(self, held: Sequence[Probe], y: Sequence[Any], **more: Any) -> dict[str, Any]:
        return points((self._x(place_of(p)) for p in held), y, (p.hover for p in held), **more)

    def _front_line(self) -> dict[str, Any]:
        """The Pareto front: of each setting its most memory and the median of all its steps."""
        return points(
            (self._x(c.num_bytes) for c in self.front),
            (c.rate for c in self.front),
            (contender_hover(c, self.run.unit) for c in self.front),
            mode="lines",
            name="front",
            legendrank=1,
            line={"shape": "hv", "color": GREY, "width": 2, "dash": "dot"},
        )

    def _named(self) -> list[dict[str, Any]]:
        """The recommended setting and the plain default, by shape and by word."""
        found = self.run.found
        base = found.baseline if found is not None else None
        named = [("recommended", "star", chosen(self.run))]
        if base is not None:
            same = setting_id(base.setting)
            plain = next((c for c in self.run.contenders if setting_id(c.setting) == same), None)
            named.append(("plain default", "square-x-open", plain))
        return [
            self._named_point(name if found is not None else "best so far", symbol, held)
            for name, symbol, held in named
            if held is not None
        ]

    def _named_point(self, name: str, symbol: str, held: Contender) -> dict[str, Any]:
        x = self._x(held.num_bytes)
        side = "left" if x > 0.5 * self.right / self.scale[0] else "right"
        said = f"{name}<br>{contender_hover(held, self.run.unit)}"
        line = {"width": 2 if "open" in symbol else 1, "color": VERMILION}
        mark = {"symbol": symbol, "size": 20, "color": VERMILION, "line": line}
        return named_point(name, x, held.rate, said, f"top {side}", mark, legendrank=2)

    def _layout(self) -> dict[str, Any]:
        strip = _STRIP if self._failed else 0.0
        unit = self.scale[1]
        layout: dict[str, Any] = {
            "xaxis": {
                "title": {"text": f"memory, {unit}"},
                "range": [
                    self._x(None) * 1.6 if self._has_gutter else 0,
                    self.right / self.scale[0],
                ],
                "anchor": "y2" if self._failed else "y",
            },
            "yaxis": {
                "title": {"text": plot_text(_rate_title(self.run))},
                "rangemode": "tozero",
                "domain": [strip + 0.06 if self._failed else 0, 1],
            },
            "legend": legend_below(),
            "margin": {"l": 8, "r": 8, "t": 34, "b": 8},
            "hovermode": "closest",
            "shapes": self._budget_shapes(),
            "annotations": [*self._budget_words(), *self._gutter_words()],
        }
        if self._failed:
            names = [plot_text(end_text(end)) for end in self._failed]
            layout["yaxis2"] = {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": names[::-1],
                "domain": [0, strip],
                "range": [-0.6, len(names) - 0.4],
            }
        return layout

    def _budget_shapes(self) -> list[dict[str, Any]]:
        """A line at the budget, and its forbidden side shaded."""
        if not self.draws_budget:
            return []
        at = self._x(self.budget)
        edges = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
        return [
            {"type": "rect", "x0": at, "x1": self.right / self.scale[0], "fillcolor": VERMILION,
             "opacity": 0.14, "line": {"width": 0}, **edges},
            {"type": "line", "x0": at, "x1": at, "line": {"color": VERMILION, "width": 2}, **edges},
        ]  # fmt: skip

    def _budget_words(self) -> list[dict[str, Any]]:
        if not self.draws_budget or self.budget is None:
            return []
        text = f"budget {format_bytes(self.budget)}"
        return [_words(text, x=self._x(self.budget), y=1.0, yref="paper", xanchor="right")]

    def _gutter_words(self) -> list[dict[str, Any]]:
        if not self._has_gutter:
            return []
        return [_words("memory<br>not known", x=self._x(None), y=1.0, yref="paper")]

    def _description(self) -> str:
        """What it shows, for who cannot see it."""
        best = chosen(self.run)
        said = [f"Memory against {self.run.unit} per second of {count(len(self.probes), 'probe')}."]
        if best is not None:
            word = "recommended" if self.run.found is not None else "best so far"
            said.append(
                f"The {word}: {describe_setting(best.setting)}, {rate_text(best.rate)} "
                f"{self.run.unit}/s in {bytes_text(best.num_bytes)}."
            )
        if self.budget is not None:
            said.append(f"The budget is {format_bytes(self.budget)}.")
        return " ".join(said)


def chosen(run: Run) -> Contender | None:
    """The recommended setting among the contenders; where nothing is recommended yet, the best."""
    found = run.contenders
    if run.found is None:
        return choose(found) if found else None
    if run.found.setting is None:
        return None
    wanted = setting_id(run.found.setting)
    return next((c for c in found if setting_id(c.setting) == wanted), None)


def place_of(probe: Probe) -> int | None:
    """The memory at which a probe is drawn: what it took; of one that did not run, whose reading is
    of an unfinished step, what was expected of it where that is more."""
    used, expected = probe.record.used_bytes, probe.record.expected
    if probe.record.status == "measured" or expected is None or expected.used_bytes is None:
        return used
    return max(used or 0, int(expected.used_bytes[1]))


def contender_hover(held: Contender, unit: str) -> str:
    return hover(
        [
            describe_setting(held.setting),
            f"{rate_text(held.rate)} {unit}/s ({interval_text(held.interval)})",
            f"memory {bytes_text(held.num_bytes)}",
            f"{count(len(held.records), 'probe')} together" if len(held.records) > 1 else "",
        ]
    )


def _rate_title(run: Run) -> str:
    several = any(r.world is not None and r.world.world_size > 1 for r in run.records)
    return f"{run.unit}/s of each device" if several else f"{run.unit}/s"


def _words(text: str, **place: Any) -> dict[str, Any]:
    return {"text": text, "showarrow": False, "yanchor": "bottom", **place}
