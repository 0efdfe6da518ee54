"""What a trainer is, the plan that it gets, the files that it gives back, and what it refuses."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from textwrap import wrap
from typing import Any, Literal, NamedTuple

import yaml

from planner.core.errors import Fault, UnsupportedError, printable
from planner.core.files import write_whole
from planner.core.schema import Library, Model, NamedModel, SwinConfig, TrainSetting
from planner.core.schema.record import DataResult, LoaderSetting
from planner.core.schema.setting import Parallelism
from planner.trainers.recipe import Recipe, recipe_of

# The comments of emitted files. Names, dates and versions in them come from `recommendation.json`,
# which others may have written: each is brought onto one line of printable characters, so that a
# line behind `#` can be nothing but a comment.

WRITTEN_BY = "Written by 'planner emit'"
# The first lines of every file. No name of others is in them: Python looks for a file's encoding
# in its first two lines.
FIRST_LINES = f"# {WRITTEN_BY}, which replaces files that begin with this line.\n#\n"
_WIDTH = 98
_MAX_LENGTH = 300


def one_line(text: str, max_length: int = _MAX_LENGTH) -> str:
    """`text` on one line: characters that do not print (newlines, NUL, surrogates …) are
    escaped."""
    shown = printable(text[: max_length + 1], but="")
    return shown if len(text) <= max_length else f"{shown[:max_length]}..."


def _paragraph(text: str, indent: str) -> list[str]:
    line = one_line(text, 1000)
    return wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def is_ours(text: str) -> bool:
    """Whether a file that begins with `text` was written by `planner emit`."""
    return WRITTEN_BY in text[:200]


@dataclass(frozen=True)
class Emitted:
    """The files of a setting for one trainer. `text` is a whole file with the usual name
    `filename`, `launch` is the command that trains with it, and `modules` are the other files, by
    name, that go into the same folder."""

    target: str
    filename: str
    text: str
    launch: str
    warnings: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write every file into `folder`, which is created if needed, and return the first path.

        Files of the same names are replaced. Raises OSError where a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {self.filename: self.text, **self.modules}.items():
            write_whole(folder / name, text)
        return folder / self.filename


@dataclass(frozen=True)
class Plan:
    """A model, the setting to train it with, and where both come from.

    `heading` says where the setting comes from, as lines of a comment. `device` is the kind of the
    probed device, and `allocator` the configuration of torch's caching allocator there (None: its
    default). `output` is the path where the file will be written, None if that is unknown: then a
    command uses the usual name. `unit` is what a task calls an item of its batch, None for a step
    from images to logits. `measured_data` is the measurement of the training data's loader.
    `warnings` are about where the setting comes from, and `origin` says whether a probe or an
    estimate gave it.
    """

    model: Model
    setting: TrainSetting
    heading: tuple[str, ...]
    device: Literal["cuda", "cpu"] = "cuda"
    allocator: str | None = None
    output: PurePath | None = None
    unit: str | None = None
    measured_data: DataResult | None = None
    warnings: tuple[str, ...] = ()
    origin: Literal["probe", "estimate"] = "probe"

    @property
    def loader(self) -> LoaderSetting | None:
        """The measured loader of the training data, None where none was measured."""
        return self.measured_data.setting if self.measured_data is not None else None

    @property
    def swin(self) -> SwinConfig:
        """The model, for a trainer that builds Swins only (`port_model` refuses all others)."""
        assert isinstance(self.model, SwinConfig)
        return self.model

    @property
    def is_task(self) -> bool:
        """Whether its step is a task's: that of a factory, or of a model of a library."""
        if isinstance(self.model, NamedModel):
            return not self.model.is_plain
        return self.unit is not None

    @property
    def recipe(self) -> Recipe:
        """The hyperparameters that a setting does not hold: rates, epochs, augmentation."""
        return recipe_of(self.setting, self.model)

    def path(self, usual_name: str) -> str:
        """The file, quoted for a command line: its output path, or else its usual name."""
        return shlex.quote(str(self.output or usual_name))

    def comment(self, command: str, *advice: str, notes: Iterable[str] = ()) -> str:
        """The `#` lines at the top of a file: where the setting comes from, the `command` that
        trains with it, lines of `advice` on that command, and notes."""
        lines = [line for text in self.heading for line in _paragraph(text, "")]
        lines += ["", f"Run: {one_line(command, 2000)}", *(one_line(line) for line in advice)]
        note_lines = [line for note in notes for line in _paragraph(f"- {note}", "  ")]
        lines += ["", "Note:", *note_lines] if note_lines else []
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)

    def write_yaml(
        self, values: Mapping[str, Any], command: str, advice: Iterable[str], notes: tuple[str, ...]
    ) -> Written:
        """A trainer's own keys as YAML, below the comment."""
        comment = FIRST_LINES + self.comment(command, *advice, notes=notes)
        return Written(comment + yaml.safe_dump(values, sort_keys=False), command, notes)


class Written(NamedTuple):
    """What a trainer makes of a plan: the text of its file, the command that trains with it, notes
    on both, and the files beside it by name (`modules`)."""

    text: str
    command: str
    notes: tuple[str, ...]
    modules: dict[str, str] = {}  # noqa: RUF012


class Support(NamedTuple):
    """How a trainer supports one parallelism: the options (fields of a Distribution) that its files
    can hold, and whether it needs GPUs."""

    options: frozenset[str] = frozenset()
    needs_gpu: bool = False


@dataclass(frozen=True)
class Trainer:
    """A trainer that `emit` can write for.

    `name` is the word that --for takes, `filename` the usual name of the file. `library` is the one
    whose Swin it builds, or None if it trains any module. `lacks` names the fields for which it has
    no word (their defaults, and checkpointing blocks, need none) and the precisions that it does
    not have, some only `on a CPU`. `faults` lists what else it cannot express of a plan.

    `own_loader` describes its loader, if it reads pictures in its own way. `parallel` holds the
    parallelisms that it supports. `always_ddp`: it trains under DDP even on one device.
    `always_syncs`: it sums gradients over devices in every micro-batch. `trains_named`: it also
    trains any classifier of its library, given the name.
    """

    name: str
    title: str
    filename: str
    write: Callable[[Plan], Written]
    lacks: tuple[str, ...] = ()
    faults: Callable[[Plan], list[Fault]] = lambda plan: []
    library: Library | None = None
    always_ddp: bool = False
    always_syncs: bool = False
    parallel: Mapping[Parallelism, Support] = field(default_factory=lambda: {"ddp": Support()})
    own_loader: str | None = None
    trains_named: bool = False

    def can_name(self, plan: Plan) -> bool:
        """Whether it trains the model of `plan` given only its name, from images to logits."""
        if not self.trains_named or not isinstance(plan.model, NamedModel):
            return False
        return plan.model.is_plain and plan.model.library == self.library


def list_faults(*cases: tuple[object, str, str]) -> list[Fault]:
    """The faults among `cases`: (whether it is one, the law, what --set would take instead)."""
    return [Fault(law, change=change) for is_refused, law, change in cases if is_refused]


def refuse(trainer: str, faults: Iterable[Fault]) -> None:
    """Raise UnsupportedError with what `trainer` cannot express and the ways out, if there is
    any."""
    ways = {fault.message: fault.way_out or way_out(fault.change) for fault in faults}
    if not ways:
        return
    lines = [f"{trainer} cannot express this setting:", *ways]
    message = f"{trainer}: {lines[1]}" if len(ways) == 1 else "\n  ".join(lines)
    raise UnsupportedError(message, "\n".join(dict.fromkeys(ways.values())))


PLAIN_SCRIPT = "emit the plain script, which can: --for pytorch"


def way_out(change: str, other: str = PLAIN_SCRIPT) -> str:
    """What to do instead: another value, which is not measured, or the `other` way."""
    ways = [f"emit with --set {change} (not measured)"] if change else []
    text = ", or ".join(filter(None, (*ways, other)))
    return f"{text[0].upper()}{text[1:]}."
