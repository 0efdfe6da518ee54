"""Pages to look at and to measure: every kind of part, hostile names, and much data."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from plotly import graph_objects

from planner.report.page.contents import (
    Chart,
    Copyable,
    Facts,
    Folded,
    Group,
    Number,
    Page,
    Part,
    Section,
    Table,
    Text,
    Verdict,
)
from planner.report.page.plotting import new_figure, plot_text

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "' onmouseover='alert(4)",
    "{{7*7}}{% raw %}",
    "<!--<script>",
    "javascript:alert(5)",
    "a\x00b\x1b[31mred\x07\r\x85",
    "\u202edrowssap\u202c\u2066",
    "lone \ud83d surrogate",
    "&lt;b&gt;&amp;",
    "W" * 800,
)


def showcase() -> Page:
    """Every kind of part, as a report of a step and of a search would use it."""
    return Page(
        "Swin-T on H100 SXM 80GB",
        "Batch 256 in bf16 fits into 80 GiB with 21.4 GiB to spare, and trains 2,310 images/s.",
        [Group("g1", "", [answer(), charts("g1"), table(40), files("g1"), folded("g1")])],
        "planner 0.1, 2026-11-22 16:00 UTC",
    )


def side_by_side() -> Page:
    """The same of two subjects."""
    sections = [answer(), table(8)]
    groups = [Group(f"g{n}", f"Swin-T on GPU {n}", [*sections, charts(f"g{n}")]) for n in (1, 2)]
    return Page("2 side by side", "", groups, "planner 0.1")


def hostile(texts: Sequence[str] = HOSTILE) -> Page:
    """A page of which others wrote every text."""
    everything = "\n".join(texts)
    long = Table(texts, [[*texts[:-1], Number(float(n), everything)] for n in range(500)])
    sections = [Section(f"s{n}", text, parts_of(text, f"g1-k{n}")) for n, text in enumerate(texts)]
    sections.append(Section("all", everything, [long]))
    return Page(everything, everything, [Group("g1", everything, sections)], everything)


def parts_of(text: str, key: str) -> list[Part]:
    """Each kind of part with `text` wherever it has a text."""
    rows = [[text, Number(1.0, text)], [text, Number(None, text)]]
    label = plot_text(text)
    trace = graph_objects.Bar(x=[label], y=[1], name=label, hovertext=[label])
    figure = new_figure([trace], title={"text": label}, xaxis={"title": {"text": label}})
    return [
        Text(text),
        Text(text, "lead"),
        Text(text, "note"),
        Text(text, "warning"),
        Facts([(text, text)]),
        Facts([(text, text)], "tiles"),
        Table([text, text], rows, text, [0]),
        Copyable(text, text),
        Folded(text, [Text(text)]),
        Verdict("likely", text),
        Chart(f"{key}-chart", figure, text, data={"name": text}),
    ]


def answer() -> Section:
    return Section(
        "answer",
        "Answer",
        [
            Text("Batch 256 in bf16 fits: the peak of 58.6 GiB leaves 21.4 GiB of 80 GiB.", "lead"),
            Facts(
                [
                    ("Rate", "2,310 images/s"),
                    ("Step", "110.8 ms"),
                    ("Device memory", "58.6 GiB"),
                    ("Spare", "21.4 GiB"),
                ],
                "tiles",
            ),
            Facts(
                [
                    ("Setting", "bf16, batch 256, SDPA, AdamW, no checkpointing, not compiled"),
                    ("Peak", "at the backward of stages.0.blocks.1.mlp.fc2"),
                    ("Device", "NVIDIA H100 80GB HBM3, driver 570.86, CUDA 12.8, torch 2.13"),
                ]
            ),
            Text("The rate assumes that data arrives in time: a loader was not measured.", "note"),
            Text(
                "The clocks fell from 1,980 to 1,620 MHz in 4 of 12 probes: the card was hot.",
                "warning",
            ),
        ],
    )


def charts(key: str) -> Section:
    steps = list(range(240))
    kinds = ("parameters", "optimizer state", "gradients", "activations", "temporaries")
    traces = [
        graph_objects.Scatter(
            x=steps,
            y=[4 + 30 * math.sin(math.pi * s / 240) if kind == "activations" else 3 for s in steps],
            name=kind,
            stackgroup="memory",
            line={"width": 0.5},
        )
        for kind in kinds
    ]
    over_time = new_figure(
        traces,
        xaxis={"title": {"text": "event"}},
        yaxis={"title": {"text": "GiB alive"}, "ticksuffix": ""},
        hovermode="x unified",
    )
    names = ["stages.2.blocks.17.attn.proj", "stages.2", "patch_embed", "head"]
    bars = new_figure(
        [graph_objects.Bar(y=names, x=[4.0, 11.2, 0.8, 0.3], orientation="h")],
        xaxis={"title": {"text": "ms"}},
    )
    return Section(
        "charts",
        "Memory over the step",
        [
            Text("What is alive at each event of a step, stacked by what it is."),
            Chart(f"{key}-memory", over_time, "Bytes alive over the events of one step."),
            Text("The time of the forward by module."),
            Chart(
                f"{key}-time",
                bars,
                "Milliseconds of four modules, as bars.",
                260,
                table=Table(["module", "ms"], [["head", "0.3"]]),
            ),
        ],
    )


HEADERS = (
    "Probe", "Status", "Batch", "Precision", "Attention", "Checkpointing", "Compile",
    "Images/s", "Expected", "Peak", "Reserved", "Message",
)  # fmt: skip


def table(num_rows: int) -> Section:
    rows = probe_rows(num_rows)
    return Section("probes", "Probes in order", [Table(HEADERS, rows, "Every probe.", [2])])


def probe_rows(num_rows: int) -> list[list[str | Number]]:
    """Rows of probes, of which one in seven ran out of memory."""
    draw = random.Random(0)
    rows: list[list[str | Number]] = []
    for number in range(1, num_rows + 1):
        batch, gib = draw.randrange(8, 512, 8), draw.uniform(4, 80)
        failed = number % 7 == 0
        rate = None if failed else draw.uniform(200, 2400)
        rows.append([
            Number(number, f"{number:,}"),
            "out of memory" if failed else "measured",
            Number(batch, f"{batch:,}"),
            draw.choice(("bf16", "fp16", "tf32")),
            draw.choice(("sdpa", "eager")),
            draw.choice(("none", "blocks", "stages:0,1")),
            draw.choice(("off", "default")),
            Number(rate, "-" if rate is None else f"{rate:,.0f}"),
            Number(1500.0, "1,500"),
            Number(gib, f"{gib:.1f} GiB"),
            Number(gib * 1.1, f"{gib * 1.1:.1f} GiB"),
            f"CUDA out of memory: tried to allocate {gib:.1f} GiB" if failed else "",
        ])  # fmt: skip
    return rows


def files(key: str) -> Section:
    launch = "torchrun --nproc-per-node 8 train.py --batch-size 256 --amp bf16 " * 2
    script = "\n".join(f"def line_{n}(value):  # line {n}" for n in range(40))
    return Section(
        "files",
        "Launch it",
        [
            Copyable(launch.strip(), "Launch line"),
            Folded("Lightning", [Copyable(script, "trainer.py"), charts(f"{key}-tab").parts[3]]),
        ],
    )


def folded(key: str) -> Section:
    return Section(
        "assumed",
        "What this leaves out",
        [
            Folded("Assumed", [Text("The context takes 480 MiB."), table(4).parts[0]]),
            Folded("A chart of it", [charts(f"{key}-fold").parts[1]]),
        ],
    )


def many_probes(num_rows: int = 5000, num_charts: int = 6) -> Page:
    """A search of many probes: a long table, and charts with a point for each."""
    rows = probe_rows(num_rows)
    draw = random.Random(1)
    parts: list[Part] = []
    for number in range(num_charts):
        xs, ys = ([draw.gauss(50, 12) for _ in range(num_rows)] for _ in "xy")
        names = [f"probe {index}" for index in range(num_rows)]
        trace = graph_objects.Scatter(x=xs, y=ys, text=names, mode="markers")
        figure = new_figure([trace], xaxis={"title": {"text": "GiB"}})
        parts.append(Chart(f"g1-chart-{number}", figure, "Rate against memory, a point a probe."))
    sections = [answer(), Section("probes", "Probes", [Table(HEADERS, rows, "Every probe.")])]
    sections += [Section("front", "Memory against rate", parts)]
    return Page("A search of many probes", "", [Group("g1", "", sections)])
