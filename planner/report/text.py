"""An answer's parts as text for a terminal, at its width: its first screen, or all of it. A setting
in words, the same in every table and sentence.
"""

import shutil
import sys
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.units import GIB, format_bytes, format_seconds
from planner.ledger.cache import Entry
from planner.machine.hardware import Gpu
from planner.report.page import contents as doc
from planner.report.page.contents import Cell, Number, Part, Table, Text

WIDTH = 100  # characters of a line where there is no terminal
NARROWEST = 60
_LONGEST_WORD = 30  # that is kept whole: a file and its line
_LEAST_COLUMN = 14  # characters, of a text that is broken to make a table narrower


def parts_text(parts: Sequence[doc.Part], detail: bool = False) -> str:
    """Paragraphs in the order of `parts`. What is folded, and the rows of a table beyond its first
    ones, is there only in `detail`; without it the last line says what there is."""
    text = "".join(_paragraphs(parts, detail)).strip("\n")
    folded = [part.summary for part in parts if isinstance(part, doc.Folded)]
    if detail or not folded:
        return text
    return "\n".join([text, wrapped(f"--detail adds: {'; '.join(folded)}.")])


def _paragraphs(parts: Sequence[doc.Part], detail: bool) -> Iterator[str]:
    for part in parts:
        text = _text(part, detail)
        if text:
            yield text + ("\n" if isinstance(part, doc.Verdict) else "\n\n")


def _text(part: doc.Part, detail: bool) -> str:
    match part:
        case doc.Text(text):
            return "\n".join(wrapped(line, _indent(line)) for line in text.split("\n"))
        case doc.Verdict(text=text):
            return wrapped(f"{part.word}: {text[0].lower()}{text[1:]}" if text else part.word)
        case doc.Facts(pairs):
            most = max((len(term) for term, _ in pairs), default=0) + 2
            return "\n".join(wrapped(f"{term:<{most}}{of}", " " * most) for term, of in pairs)
        case doc.Table():
            return _table(part, detail)
        case doc.Copyable(command, label):
            return f"{label}:\n{command_text(command)}" if label else command_text(command)
        case doc.Folded(summary, parts) if detail:
            heading = f"{summary[0].upper()}{summary[1:]}:"
            return "\n".join([heading, "".join(_paragraphs(parts, detail)).rstrip("\n")])
    return ""  # a chart says more on the page


def _indent(line: str) -> str:
    return "  " if line.startswith(("- ", "  ")) else ""


def _table(table: doc.Table, detail: bool) -> str:
    is_whole = detail or len(table.rows) <= table.first + 1  # one more takes no more than to say so
    shown = table.rows if is_whole else table.rows[: table.first]
    if not shown:
        return ""
    numeric = [
        all(isinstance(row[n], doc.Number) for row in table.rows) for n in range(len(table.headers))
    ]
    text = table_text(
        [[_cell(cell) for cell in row] for row in shown],
        table.headers if any(table.headers) else (),
        "".join("r" if one else "l" for one in numeric),
    )
    caption = [wrapped(table.caption)] if table.caption else []
    more = len(table.rows) - len(shown)
    return "\n".join([*caption, text, *([f"and {more} more: --detail"] if more else [])])


def _cell(cell: doc.Cell) -> str:
    return doc.VERDICTS[cell.kind][2] if isinstance(cell, doc.Verdict) else str(cell)


def width() -> int:
    """That of the terminal that standard output is, from NARROWEST to WIDTH; else WIDTH."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)


def wrapped(text: str, indent: str = "") -> str:
    """`text` in lines of `width()`, those after the first indented. A long word (a path, a model's
    name) stays whole, however long it is."""
    return textwrap.fill(
        text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def fitted(text: str) -> str:
    """`text` with the lines that are wider than the terminal broken between words, as far in as
    they begin; as it is where there is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return "\n".join(_fitted(line) if len(line) > width() else line for line in text.split("\n"))


def _fitted(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip(" -")))
    return wrapped(line, indent or ("  " if "  " in line else ""))  # the rest of a row of a table


def command_text(command: str) -> str:
    """A command to be pasted: on a terminal that is narrower, before options, with a backslash."""
    if 2 + len(command) <= width() or not sys.stdout.isatty():
        return f"  {command}"
    lines, room = [""], width() - 6
    for part in command.replace(" | ", " |\0").replace(" --", "\0--").split("\0"):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > room:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return "  " + " \\\n    ".join(lines)


def table_text(
    rows: Sequence[Sequence[str | None]], headers: Sequence[str] = (), align: str = ""
) -> str:
    """`rows` of one length, with a line under their headers if they have any; None reads as "-".
    On a terminal that is narrower, its widest texts are broken into lines within their columns.

    `align` has a letter for each column: "l" for left, "r" for right; columns after its last are as
    that one. All are to the left by default.
    """
    # Imported here, since `planner estimate --json` has no use for it and is timed.
    from tabulate import tabulate

    if not rows:
        return ""
    letters = (align or "l").ljust(len(rows[0]), align[-1:] or "l")[: len(rows[0])]
    cells = [["-" if cell is None else cell for cell in row] for row in rows]
    widths = _widths([headers, *cells] if headers else cells)
    texts = [number for number, letter in enumerate(letters) if letter == "l"]
    for long in sorted(texts, key=lambda number: -widths[number]) if sys.stdout.isatty() else ():
        if (over := sum(widths) + 2 * (len(widths) - 1) - width()) > 0:
            room = max(widths[long] - over, _LEAST_COLUMN)
            words = (word for row in cells for word in row[long].split())
            room = max(room, min(max(map(len, words), default=0), _LONGEST_WORD))
            breaking = textwrap.TextWrapper(room, break_on_hyphens=False)
            cells = [[*row[:long], breaking.fill(row[long]), *row[long + 1 :]] for row in cells]
            widths = _widths([headers, *cells] if headers else cells)
    if headers:  # tabulate's own would be two characters wider than what they say
        cells = [list(headers), ["-" * width for width in widths], *cells]
    sides = [{"l": "left", "r": "right"}[letter] for letter in letters]
    return tabulate(cells, tablefmt="plain", colalign=sides, disable_numparse=True)


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    """Of each column its longest line."""
    return [max(len(line) for cell in column for line in cell.split("\n"))
            for column in zip(*cells, strict=True)]  # fmt: skip


ALWAYS_SAID = ("batch_size", "precision", "optimizer", "checkpointing")
_NAMED_BY_VALUE = ("precision", "optimizer", "loss")
_NAMES = {"batch_size": "batch", "clip_grad": "gradient clipping"}


def describe_setting(
    setting: TrainSetting, model: Model | None = None, without: Container[str] = ()
) -> str:
    """`batch 64, bf16, adamw, checkpointing none, accumulate 4`: what is always worth saying, then
    what differs from the default and the recipe of `model`; where no model is at hand, from that of
    a Swin and of others. Fields in `without` are said elsewhere."""
    for of_swin in (True, False) if model is None else (isinstance(model, SwinConfig),):
        setting = setting.without_recipe(of_swin)
    other = setting.differences(_default())
    always = {field: getattr(setting, field) for field in ALWAYS_SAID}
    return in_words({f: v for f, v in {**always, **other}.items() if f not in without})


@cache
def _default() -> TrainSetting:
    return TrainSetting()


def describe_changes(setting: TrainSetting, against: TrainSetting) -> str:
    """What makes a setting another than `against`: `batch 32, compile default`."""
    return in_words(setting.differences(against)) or "the same setting"


def value_text(value: object) -> str:
    """A field's value: `yes` and `no` for what is on and off."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def in_words(fields: Mapping[str, object]) -> str:
    """`batch 32, accumulate 8, adamw-fused`: each field's name and value; only its value where that
    says what it is."""
    return ", ".join(_said(field, value) for field, value in fields.items())


def _said(field: str, value: object) -> str:
    if field in _NAMED_BY_VALUE:
        return "own optimizer" if value == OWN_OPTIMIZER else value_text(value)
    if field == "allocator" and value == "expandable_segments:True":
        return "expandable segments"
    if field == "world_size":
        return f"on each of {value} GPUs" if value != 1 else "on 1 GPU"
    name = _NAMES.get(field, field.replace("_", " "))
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


# Rows of the catalogues, and of what is kept.

OF_GPUS = ("name", "GiB", "GB/s", "fp32", "tf32", "bf16", "fp16", "architecture")
OF_MODELS = ("image", "classes", "version", "window", "channels", "depths", "model")
OF_CACHE = ("model", "kept", "setting", "size", "last used")
ANY = (
    "MODEL is any model of timm, torchvision or transformers (timm:resnet50), or a function of "
    "yours (file:name)."
)
RATES = "Rates are dense TFLOP/s (a multiply-add is two); memory is what CUDA reports, if known."


def by_architecture(gpus: tuple[Gpu, ...]) -> Text:
    """Their names, the newest first."""
    found: dict[str, list[str]] = {}
    for gpu in gpus[::-1]:
        found.setdefault(gpu.architecture if gpu.capability else "AMD", []).append(gpu.name)
    found |= {"AMD": found.pop("AMD", [])}  # the last
    lines = [f"- {kind}: {', '.join(names[::-1])}" for kind, names in found.items()]
    said = f"{len(gpus)} GPUs. 'planner gpus NAME' has memory and rates, --detail those of all."
    return Text("\n".join([said, *lines]))


def gpu_row(gpu: Gpu) -> list[Cell]:
    rates = (gpu.fp32_flops, gpu.tf32_flops, gpu.bf16_flops, gpu.fp16_flops)
    shown = [Number(rate, "-" if rate is None else f"{rate / 1e12:.1f}") for rate in rates]
    memory = Number(gpu.memory_bytes, f"{gpu.memory_bytes / GIB:.2f}")
    bandwidth = Number(gpu.bandwidth, f"{gpu.bandwidth / 1e9:.0f}")
    return [gpu.name, memory, bandwidth, *shown, gpu.architecture]


def names_answer(text: str, names: list[str]) -> list[Part]:
    """Models that are no Swins, so that torch records them, by their names."""
    title = f"{len(names)} models have {text!r} in their names. Each is recorded once: seconds."
    return [
        Text(title),
        Table(("model",), [[name] for name in names], first=14),
        Text(f"Next: 'planner estimate {names[0]} --gpu NAME' says whether it fits."),
    ]


def model_row(name: str, config: SwinConfig) -> list[Cell]:
    (height, width), window = config.image_size, config.window_size
    windows = str(window) if isinstance(window, int) else ",".join(map(str, window))
    classes, channels = (Number(n, str(n)) for n in (config.num_classes, config.embed_dim))
    depths = ",".join(map(str, config.depths))
    return [f"{height}x{width}", classes, f"v{config.version}", windows, channels, depths, name]


def cache_row(entry: Entry, age: float) -> list[Cell]:
    key, what, setting = entry.key, "the model's description", ""
    if "name" not in key:
        what = f"a step at batch {key['batch']}"
    if "setting" in key:
        setting = describe_setting(TrainSetting(**key["setting"])).partition(", ")[2]
    size, ago = format_bytes(entry.num_bytes), f"{format_seconds(age)} ago"
    return [key["title"], what, setting, Number(entry.num_bytes, size), Number(age, ago)]
