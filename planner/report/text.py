"""Text for a terminal: an answer's parts at its width, a setting in words, rows of the catalogues.

Every table and every sentence names a setting by the same words.
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
_LONGEST_WORD = 30  # characters of a word that is never broken: a file and its line
_LEAST_COLUMN = 14  # characters of a column whose text is broken to make its table narrower


def parts_text(parts: Sequence[doc.Part], detail: bool = False) -> str:
    """Paragraphs in the order of `parts`. Only `detail` shows folded parts and all rows of a table;
    without it, the last line names what is folded."""
    text = "".join(_paragraphs(parts, detail)).strip("\n")
    folded = [part.summary for part in parts if isinstance(part, doc.Folded)]
    if detail or not folded:
        return text
    return "\n".join([text, wrap(f"--detail adds: {'; '.join(folded)}.")])


def _paragraphs(parts: Sequence[doc.Part], detail: bool) -> Iterator[str]:
    for part in parts:
        text = _part_text(part, detail)
        if text:
            yield text + ("\n" if isinstance(part, doc.Verdict) else "\n\n")


def _part_text(part: doc.Part, detail: bool) -> str:
    match part:
        case doc.Text(text):
            return "\n".join(wrap(line, _indent(line)) for line in text.split("\n"))
        case doc.Verdict(text=text):
            return wrap(f"{part.word}: {text[0].lower()}{text[1:]}" if text else part.word)
        case doc.Facts(pairs):
            indent = max((len(term) for term, _ in pairs), default=0) + 2
            return "\n".join(wrap(f"{term:<{indent}}{text}", " " * indent) for term, text in pairs)
        case doc.Table():
            return _table_part_text(part, detail)
        case doc.Copyable(command, label):
            return f"{label}:\n{command_text(command)}" if label else command_text(command)
        case doc.Folded(summary, parts) if detail:
            heading = f"{summary[0].upper()}{summary[1:]}:"
            return "\n".join([heading, "".join(_paragraphs(parts, detail)).rstrip("\n")])
    return ""  # a chart is drawn on a page only


def _indent(line: str) -> str:
    return "  " if line.startswith(("- ", "  ")) else ""


def _table_part_text(table: doc.Table, detail: bool) -> str:
    # A single hidden row would take no more room than the line that mentions it.
    is_whole = detail or len(table.rows) <= table.first + 1
    rows = table.rows if is_whole else table.rows[: table.first]
    if not rows:
        return ""
    numeric = [
        all(isinstance(row[n], doc.Number) for row in table.rows) for n in range(len(table.headers))
    ]
    text = table_text(
        [[_cell_text(cell) for cell in row] for row in rows],
        table.headers if any(table.headers) else (),
        "".join("r" if is_number else "l" for is_number in numeric),
    )
    caption = [wrap(table.caption)] if table.caption else []
    hidden = len(table.rows) - len(rows)
    return "\n".join([*caption, text, *([f"and {hidden} more: --detail"] if hidden else [])])


def _cell_text(cell: doc.Cell) -> str:
    return doc.VERDICTS[cell.kind][2] if isinstance(cell, doc.Verdict) else str(cell)


def line_width() -> int:
    """The width of the terminal on standard output, from NARROWEST to WIDTH; WIDTH if there is no
    terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)


def wrap(text: str, indent: str = "") -> str:
    """`text` in lines of `line_width()`, all but the first indented. A word (a path, a model's
    name) stays whole, however long it is."""
    return textwrap.fill(
        text, line_width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def fit_to_terminal(text: str) -> str:
    """Break the lines of `text` that are wider than the terminal, and keep their indents. Without a
    terminal `text` stays as it is."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return "\n".join(map(_fit_line, text.split("\n")))


def _fit_line(line: str) -> str:
    if len(line) <= line_width():
        return line
    indent = " " * (len(line) - len(line.lstrip(" -")))
    return wrap(line, indent or ("  " if "  " in line else ""))  # two spaces: a row of a table


def command_text(command: str) -> str:
    """A command to be pasted. On a narrower terminal a backslash breaks it before an option."""
    if 2 + len(command) <= line_width() or not sys.stdout.isatty():
        return f"  {command}"
    lines, room = [""], line_width() - 6
    for word in command.replace(" | ", " |\0").replace(" --", "\0--").split("\0"):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "  " + " \\\n    ".join(lines)


def table_text(
    rows: Sequence[Sequence[str | None]], headers: Sequence[str] = (), align: str = ""
) -> str:
    """Rows of equal length as a table, with a rule under the headers if there are any. None reads
    as "-". On a narrower terminal the widest texts are broken into lines within their columns.

    `align` has a letter for each column, "l" for left and "r" for right; its last letter also
    applies to the columns after it. By default every column is aligned to the left.
    """
    # Imported here, since `planner estimate --json` has no use for it and is timed.
    from tabulate import tabulate

    if not rows:
        return ""
    letters = (align or "l").ljust(len(rows[0]), align[-1:] or "l")[: len(rows[0])]
    cells = [["-" if cell is None else cell for cell in row] for row in rows]
    widths = _column_widths([headers, *cells] if headers else cells)
    texts = [n for n, letter in enumerate(letters) if letter == "l"] if sys.stdout.isatty() else []
    for n in sorted(texts, key=lambda n: -widths[n]):
        if (excess := sum(widths) + 2 * (len(widths) - 1) - line_width()) > 0:
            room = max(widths[n] - excess, _LEAST_COLUMN)
            words = (word for row in cells for word in row[n].split())
            room = max(room, min(max(map(len, words), default=0), _LONGEST_WORD))
            wrapper = textwrap.TextWrapper(room, break_on_hyphens=False)
            cells = [[*row[:n], wrapper.fill(row[n]), *row[n + 1 :]] for row in cells]
            widths = _column_widths([headers, *cells] if headers else cells)
    if headers:  # tabulate's own headers make a column two characters wider than its text
        cells = [list(headers), ["-" * width for width in widths], *cells]
    alignments = [{"l": "left", "r": "right"}[letter] for letter in letters]
    return tabulate(cells, tablefmt="plain", colalign=alignments, disable_numparse=True)


def _column_widths(cells: Sequence[Sequence[str]]) -> list[int]:
    """The length of each column's longest line."""
    return [max(len(line) for cell in column for line in cell.split("\n"))
            for column in zip(*cells, strict=True)]  # fmt: skip


ALWAYS_NAMED = ("batch_size", "precision", "optimizer", "checkpointing")
_NAMED_BY_VALUE = ("precision", "optimizer", "loss")
_NAMES = {"batch_size": "batch", "clip_grad": "gradient clipping"}


def describe_setting(
    setting: TrainSetting, model: Model | None = None, without: Container[str] = ()
) -> str:
    """`batch 64, bf16, adamw, checkpointing none, accumulate 4`: the fields of ALWAYS_NAMED, then
    those that differ from the default and from the recipe of `model`. Without a model the recipes
    of a Swin and of any other model count. Fields in `without` are not named."""
    for is_swin in (True, False) if model is None else (isinstance(model, SwinConfig),):
        setting = setting.without_recipe(is_swin)
    differences = setting.differences(_default())
    values = {field: getattr(setting, field) for field in ALWAYS_NAMED}
    return describe_fields({f: v for f, v in {**values, **differences}.items() if f not in without})


@cache
def _default() -> TrainSetting:
    return TrainSetting()


def describe_changes(setting: TrainSetting, against: TrainSetting) -> str:
    """The fields in which a setting differs from `against`: `batch 32, compile default`."""
    return describe_fields(setting.differences(against)) or "the same setting"


def value_text(value: object) -> str:
    """A field's value in words: `yes` and `no` for True and False."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def describe_fields(fields: Mapping[str, object]) -> str:
    """`batch 32, accumulate 8, adamw-fused`: the name and value of each field, or the value only
    where that is clear by itself."""
    return ", ".join(_field_text(field, value) for field, value in fields.items())


def _field_text(field: str, value: object) -> str:
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


# Rows of the catalogues and of the cache.

GPU_HEADERS = ("name", "GiB", "GB/s", "fp32", "tf32", "bf16", "fp16", "architecture")
MODEL_HEADERS = ("image", "classes", "version", "window", "channels", "depths", "model")
CACHE_HEADERS = ("model", "kept", "setting", "size", "last used")
ANY_MODEL = (
    "MODEL is any model of timm, torchvision or transformers (timm:resnet50), or a function of "
    "yours (file:name)."
)
UNITS = "Rates are dense TFLOP/s (a multiply-add is two); memory is what CUDA reports, if known."


def gpus_by_architecture(gpus: tuple[Gpu, ...]) -> Text:
    """The names of `gpus` by architecture, the newest first."""
    names_by_kind: dict[str, list[str]] = {}
    for gpu in gpus[::-1]:
        names_by_kind.setdefault(gpu.architecture if gpu.capability else "AMD", []).append(gpu.name)
    names_by_kind |= {"AMD": names_by_kind.pop("AMD", [])}  # moved to the end
    lines = [f"- {kind}: {', '.join(names[::-1])}" for kind, names in names_by_kind.items()]
    heading = f"{len(gpus)} GPUs. 'planner gpus NAME' has memory and rates, --detail those of all."
    return Text("\n".join([heading, *lines]))


def gpu_row(gpu: Gpu) -> list[Cell]:
    rates = (gpu.fp32_flops, gpu.tf32_flops, gpu.bf16_flops, gpu.fp16_flops)
    shown = [Number(rate, "-" if rate is None else f"{rate / 1e12:.1f}") for rate in rates]
    memory = Number(gpu.memory_bytes, f"{gpu.memory_bytes / GIB:.2f}")
    bandwidth = Number(gpu.bandwidth, f"{gpu.bandwidth / 1e9:.0f}")
    return [gpu.name, memory, bandwidth, *shown, gpu.architecture]


def names_answer(text: str, names: list[str]) -> list[Part]:
    """The models that have `text` in their names and are recorded by torch, as no Swins are."""
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
    key, content, setting = entry.key, "the model's description", ""
    if "name" not in key:
        content = f"a step at batch {key['batch']}" if "batch" in key else "what a search expects"
    if "setting" in key:
        setting = describe_setting(TrainSetting(**key["setting"])).partition(", ")[2]
    size, last_used = format_bytes(entry.num_bytes), f"{format_seconds(age)} ago"
    return [key["title"], content, setting, Number(entry.num_bytes, size), Number(age, last_used)]
