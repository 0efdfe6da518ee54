"""What every trainer's file gets, and what it gives back."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from textwrap import wrap
from typing import Any, Literal, NamedTuple

import yaml

from planner.core.errors import UnsupportedError
from planner.core.files import write_whole
from planner.core.schema import Library, Model, NamedModel, SwinConfig, TrainSetting
from planner.core.schema.record import DataResult, LoaderSetting
from planner.core.schema.setting import Parallelism
from planner.estimation.ledgers import Recipe, recipe_of

# Comments of emitted files: what a file says of itself, in lines that can be nothing but comments.
#
# Names, dates and versions come from `recommendation.json`, which others may have written: each is
# brought onto one line of printable characters before it stands behind a `#`.

WRITTEN_BY = "Written by 'planner emit'"
FIRST_LINES = f"# {WRITTEN_BY}, which replaces files that begin with this line.\n#\n"
"""Of every file, ours to the letter: Python looks for a file's encoding in the first two lines."""
_WIDTH = 98
_LONGEST = 300


def one_line(text: str, longest: int = _LONGEST) -> str:
    """`text` on one line: what does not print (newlines, NUL, surrogates …) is escaped."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text[: longest + 1]
    )
    return shown if len(text) <= longest else f"{shown[:longest]}..."


def _paragraph(text: str, indent: str) -> list[str]:
    return wrap(one_line(text, 1000), _WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [
        ""
    ]


def is_ours(text: str) -> bool:
    """Whether a file that begins with `text` was written by `planner emit`."""
    return WRITTEN_BY in text[:200]


@dataclass(frozen=True)
class Emitted:
    """What to write into a trainer. `text` is a whole file, for which `filename` is the usual name.

    `launch` is the command that trains with it. `modules` are further files, by name, that lie
    beside it.
    """

    target: str
    filename: str
    text: str
    launch: str
    warnings: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Writes every file into a folder, which it makes, and returns the path of the first.

        Replaces what lies there by these names. Raises OSError where it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {self.filename: self.text, **self.modules}.items():
            write_whole(folder / name, text)
        return folder / self.filename


@dataclass(frozen=True)
class Plan:
    """A model of the trainer's own library, the setting to run it with, and what is known of it.

    `heading` says where the setting comes from, a comment's line each. `device` is what was probed,
    and `allocator` the configuration of torch's caching allocator there (None: its own). `output`
    is where the file will be written, None where that is not known: then it is called by its usual
    name. `unit` is what a task calls an item of its batch, None where images go in and logits come
    out. `fed` is what was measured of the training data's loader. `warnings` are of where the
    setting comes from, and `known_by` says what told of it.
    """

    model: Model
    setting: TrainSetting
    heading: tuple[str, ...]
    device: Literal["cuda", "cpu"] = "cuda"
    allocator: str | None = None
    output: PurePath | None = None
    unit: str | None = None
    fed: DataResult | None = None
    warnings: tuple[str, ...] = ()
    known_by: Literal["probe", "estimate"] = "probe"

    @property
    def loader(self) -> LoaderSetting | None:
        """How the training data are loaded, None where that was not measured."""
        return self.fed.setting if self.fed is not None else None

    @property
    def swin(self) -> SwinConfig:
        """The model of a trainer that builds it by itself (`port_model` has refused factories)."""
        assert isinstance(self.model, SwinConfig)
        return self.model

    @property
    def is_task(self) -> bool:
        """Whether its step is a task's: a factory's own, or that of a model of a library."""
        if isinstance(self.model, NamedModel):
            return not self.model.is_plain
        return self.unit is not None

    @property
    def recipe(self) -> Recipe:
        """What the trainer is told beside the setting."""
        return recipe_of(self.setting, self.model)

    def path(self, usual: str) -> str:
        """The file on a command line: where it is written, else its usual name."""
        return shlex.quote(str(self.output or usual))

    def comment(self, run: str, *more: str, notes: Iterable[str] = ()) -> str:
        """The `#` lines above the file: where the setting comes from, how to run it, and what to
        know of it."""
        lines = [line for text in self.heading for line in _paragraph(text, "")]
        lines += ["", f"Run: {one_line(run, 2000)}", *(one_line(line) for line in more)]
        noted = [line for note in notes for line in _paragraph(f"- {note}", "  ")]
        lines += ["", "Note:", *noted] if noted else []
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)

    def keys(
        self, values: Mapping[str, Any], run: str, more: Iterable[str], notes: tuple[str, ...]
    ) -> Written:
        """A trainer's own keys as YAML, below the comment."""
        above = FIRST_LINES + self.comment(run, *more, notes=notes)
        return Written(above + yaml.safe_dump(values, sort_keys=False), run, notes)


class Written(NamedTuple):
    """What a trainer writes of a plan: a whole file, the command that trains with it, and what to
    know of both. `modules` are the files beside it."""

    text: str
    run: str
    notes: tuple[str, ...]
    modules: dict[str, str] = {}  # noqa: RUF012


class Refusal(NamedTuple):
    """What a trainer cannot express (the law and the value), and the way out."""

    law: str
    way_out: str


class Parallel(NamedTuple):
    """How a trainer runs one parallelism: the options (fields of a Distribution) that its files
    say, and whether it does on GPUs only."""

    writes: frozenset[str] = frozenset()
    needs_gpu: bool = False


@dataclass(frozen=True)
class Trainer:
    """A trainer that `emit` can write for; each has a file of its own.

    `name` is what --for takes, `filename` the usual name of what is written. `library` is the one
    whose Swin it builds, or None where it trains any module. `lacks` names fields that it
    has no words for (but for the default, and checkpointing blocks), and precisions, some only `on
    a CPU`; `refusals` are what else it cannot express.

    `reads` says how it reads pictures where it does by itself. `parallel` are the parallelisms that
    it can run; `sums_each`: it sums gradients in every micro-batch. `trains_named`: it also trains
    any classifier of its library, given the name.
    """

    name: str
    title: str
    filename: str
    write: Callable[[Plan], Written]
    lacks: tuple[str, ...] = ()
    refusals: Callable[[Plan], list[Refusal]] = lambda plan: []
    library: Library | None = None
    always_ddp: bool = False
    sums_each: bool = False
    parallel: Mapping[Parallelism, Parallel] = field(default_factory=lambda: {"ddp": Parallel()})
    reads: str | None = None
    trains_named: bool = False

    def names(self, plan: Plan) -> bool:
        """Whether it trains the model of `plan` by its name alone, from images to logits."""
        if not self.trains_named or not isinstance(plan.model, NamedModel):
            return False
        return plan.model.is_plain and plan.model.library == self.library


def refused(*cases: tuple[object, str, str]) -> list[Refusal]:
    """One for each of `cases` (whether it is asked, the law, what --set takes to do without)."""
    return [Refusal(law, way_out(change)) for asked, law, change in cases if asked]


def refuse(trainer: str, refusals: Iterable[Refusal]) -> None:
    """Raises UnsupportedError with every refusal and each one's way out, if there are any."""
    given = list(refusals)
    if not given:
        return
    laws = [refusal.law for refusal in given]
    several = [f"{trainer} cannot express this setting:", *laws]
    message = f"{trainer}: {laws[0]}" if len(laws) == 1 else "\n  ".join(several)
    ways = dict.fromkeys(refusal.way_out for refusal in given)
    raise UnsupportedError(message, "\n".join(ways))


def way_out(change: str = "") -> str:
    """The ways out that always exist: another value (then unmeasured), or the plain script."""
    script = "emit the plain script, which can: --for pytorch"
    return f"Emit with --set {change} (not measured), or {script}." if change else f"Or {script}."
