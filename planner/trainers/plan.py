"""What every trainer's file gets, and what it gives back."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, NoReturn

from planner.core.errors import UnsupportedError, UsageError
from planner.core.files import write_whole
from planner.core.schema import Library, Model, NamedModel, SwinConfig, TrainSetting
from planner.core.schema.distribution import Parallelism
from planner.core.schema.loading import DataResult, LoaderSetting, Pipeline
from planner.estimation.recipe import Recipe, recipe_of
from planner.trainers.comments import comment


@dataclass(frozen=True)
class Emitted:
    """What to write into a trainer. `text` is a whole file, for which `filename` is the usual name.

    `launch` is the command that trains with it. `code` is Python for the user's own script where
    the trainer's file cannot hold it all (model, checkpointing wrapper, optimizer), else "".
    `modules` are further files that these import, by name.
    """

    target: str
    filename: str
    text: str
    launch: str
    warnings: tuple[str, ...] = ()
    code: str = ""
    code_filename: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def beside(self) -> dict[str, str]:
        """Every file that lies beside the first, by its name."""
        return {**({self.code_filename: self.code} if self.code else {}), **self.modules}

    def write(self, folder: Path) -> Path:
        """Writes every file into a folder, which it makes, and returns the path of the first.

        Replaces what lies there by these names. Raises OSError where it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {self.filename: self.text, **self.beside}.items():
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

    def module(self, usual: str) -> str:
        """The name under which a script imports the file. Raises UsageError where it has none."""
        stem = (self.output or PurePath(usual)).stem
        if not stem.isidentifier():
            raise UsageError(
                f"your script will import this file, and {stem!r} is not a valid module name.",
                f"Use letters, digits and underscores, for example --output {usual}.",
            )
        return stem

    def comment(self, run: str, *more: str, notes: Iterable[str] = ()) -> str:
        """The `#` lines above the file: the heading, how to run it, and what to know of it."""
        return comment(self.heading, run, more, notes)


class Written(NamedTuple):
    """What a trainer writes of a plan: a whole file, the command that trains with it, and what to
    know of both. `code` is `building.py`, where the file cannot hold everything."""

    text: str
    run: str
    notes: tuple[str, ...]
    code: str = ""


LeverName = Literal[
    "checkpointing-in-parts", "offload", "compile", "compile_scope", "compile_fullgraph",
     "activation_memory_budget", "optimizer_in_backward", "offload_optimizer",
    "zero_grad_to_none", "frozen_stages", "lora_rank", "ema", "memory_format", "cudnn_benchmark",
    "pure-bf16", "fp8", "bf16-on-cpu", "fp16-on-cpu",
]  # fmt: skip
"""The levers that not every trainer can express (`planner/trainers/levers.py`)."""
COMPILING: tuple[LeverName, ...] = (
    "compile", "compile_scope", "compile_fullgraph", "activation_memory_budget",
)  # fmt: skip

IN_A_SCRIPT: tuple[LeverName, ...] = (
    *COMPILING, "checkpointing-in-parts", "offload", "frozen_stages", "lora_rank", "memory_format",
    "cudnn_benchmark", "bf16-on-cpu",
)  # fmt: skip
"""Those that Python beside the trainer's own configuration can."""


class Refusal(NamedTuple):
    """What a trainer cannot express (the law and the value), and the way out."""

    law: str
    way_out: str


def as_torch(setting: TrainSetting) -> Mapping[str, Any]:
    """Options of a parallelism as PyTorch and DeepSpeed set them: none are of the trainer's own."""
    return {}


SYNC = frozenset(("gradient_sync",))
DDP_OPTIONS = frozenset(("ddp_bucket_view", "ddp_compression"))
FSDP_OPTIONS = frozenset(("fsdp_reshard", "fsdp_param_dtype", "fsdp_reduce_dtype"))


class Parallel(NamedTuple):
    """How a trainer runs one parallelism.

    `writes` are the options (fields of a Distribution) that its files say. `own` are those that it
    sets by itself where nobody says otherwise, unlike PyTorch and DeepSpeed.
    `needs_gpu`: it does not on CPUs.
    """

    writes: frozenset[str] = frozenset()
    own: Callable[[TrainSetting], Mapping[str, Any]] = as_torch
    needs_gpu: bool = False


@dataclass(frozen=True)
class Trainer:
    """A trainer that `emit` can write for; each has a file of its own.

    `name` is what --for takes, `filename` the usual name of what is written. `library` is the one
    whose Swin it builds, or None where it trains any module; `models` names the package that Swin
    comes from, where that is not the library. `expresses` names the levers that it can
    express, and the others are refused; `refusals` are what else it cannot express.

    `loads_by_itself` are the fields of a LoaderSetting that it has no word for, with the values it
    loads with. `reads` says how it reads pictures, None where the data set is the user's;
    `pipelines` are the measured ones that it runs by itself. `parallel` are the parallelisms that
    it can run. `trains_named`: it also trains any classifier of its library, given the name.
    """

    name: str
    title: str
    filename: str
    write: Callable[[Plan], Written]
    expresses: tuple[LeverName, ...]
    refusals: Callable[[Plan], list[Refusal]] = lambda plan: []
    library: Library | None = None
    models: str | None = None
    always_ddp: bool = False
    parallel: Mapping[Parallelism, Parallel] = field(default_factory=lambda: {"ddp": Parallel()})
    loads_by_itself: Mapping[str, Any] = field(default_factory=dict)
    reads: str | None = None
    pipelines: tuple[Pipeline, ...] = ()
    trains_named: bool = False

    def names(self, plan: Plan) -> bool:
        """Whether it trains the model of `plan` by its name alone, from images to logits."""
        return self.trains_named and isinstance(plan.model, NamedModel) and plan.model.is_plain


def refused(*cases: tuple[object, str, str]) -> list[Refusal]:
    """One for each of `cases` (whether it is asked, the law, what --set takes to do without)."""
    return [Refusal(law, way_out(change)) for asked, law, change in cases if asked]


def refuse(trainer: str, refusals: Iterable[Refusal]) -> None:
    """Raises UnsupportedError with every refusal and each one's way out, if there are any."""
    given = list(refusals)
    if given:
        _raise(trainer, given)


def _raise(trainer: str, refusals: list[Refusal]) -> NoReturn:
    laws = [refusal.law for refusal in refusals]
    several = [f"{trainer} cannot express this setting:", *laws]
    message = f"{trainer}: {laws[0]}" if len(laws) == 1 else "\n  ".join(several)
    ways = list(dict.fromkeys(refusal.way_out for refusal in refusals))
    raise UnsupportedError(message, "\n".join(ways))


def way_out(change: str = "") -> str:
    """The ways out that always exist: another value (then unmeasured), or the plain script."""
    script = "emit the plain script, which can: --for pytorch"
    return f"Emit with --set {change} (not measured), or {script}." if change else f"Or {script}."
