"""What every trainer's file gets, and what it gives back."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, NamedTuple, NoReturn

from planner.errors import UnsupportedError, UsageError
from planner.schema import Library, Model, NamedModel, SwinConfig, TrainSetting
from planner.trainers.comments import comment


@dataclass(frozen=True)
class Emitted:
    """What to write into a trainer. `text` is a whole file, for which `filename` is the usual name.

    `launch` is the command that trains with it. `code` is Python for the user's own script where
    the trainer's file cannot hold it all (model, checkpointing wrapper, optimizer), else "".
    """

    target: str
    filename: str
    text: str
    launch: str
    warnings: tuple[str, ...] = ()
    code: str = ""
    code_filename: str = ""


@dataclass(frozen=True)
class Plan:
    """A model of the trainer's own library, the setting to run it with, and what is known of it.

    `heading` says where the setting comes from, a comment's line each; `warnings` are said on
    standard error too. `device` is what was probed, and `allocator` the configuration of torch's
    caching allocator there (None: its own). `output` is where the file will be written, None where
    that is not known: then it is called by its usual name. `unit` is what a task calls an
    item of its batch, None where images go in and logits come out.
    """

    model: Model
    setting: TrainSetting
    heading: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    device: Literal["cuda", "cpu"] = "cuda"
    allocator: str | None = None
    output: PurePath | None = None
    unit: str | None = None

    @property
    def swin(self) -> SwinConfig:
        """The model of a trainer that builds it by itself (`port_model` has refused factories)."""
        assert isinstance(self.model, SwinConfig)
        return self.model

    @property
    def is_task(self) -> bool:
        """Whether its step is a task's: a factory's own, or that of a model of a library."""
        return self.unit is not None or isinstance(self.model, NamedModel)

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


class Refusal(NamedTuple):
    """What a trainer cannot express (the law and the value), and the way out."""

    law: str
    way_out: str


@dataclass(frozen=True)
class Trainer:
    """A trainer that `emit` can write for; each has a file of its own.

    `name` is what --for takes, `filename` the usual name of what is written. `library` is the one
    whose Swin it builds, or None where it trains any module; `models` names the package that Swin
    comes from, where that is not the library. `refusals` are what the trainer cannot express.
    """

    name: str
    title: str
    filename: str
    write: Callable[[Plan], Emitted]
    refusals: Callable[[Plan], list[Refusal]]
    library: Library | None = None
    models: str | None = None
    always_ddp: bool = False


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


def blocks_only(setting: TrainSetting, trainer: str) -> list[Refusal]:
    """The refusal of a trainer that checkpoints every block or none."""
    if setting.checkpointing in ("none", "blocks"):
        return []
    law = f"{trainer} checkpoints blocks or none, not {setting.checkpointing}"
    return [Refusal(law, way_out("checkpointing=blocks"))]


def compile_refusals(setting: TrainSetting, trainer: str, *said: str) -> list[Refusal]:
    """Refusals for what a trainer cannot say of compilation, except the fields in `said`."""
    found = {
        "compile_scope": (f"{trainer} compiles the whole model, not its blocks", "model"),
        "compile_dynamic": (f"{trainer} cannot ask for graphs of any batch", "false"),
        "compile_fullgraph": (f"{trainer} cannot refuse graph breaks", "false"),
        "activation_memory_budget": (f"{trainer} sets no activation memory budget", "1"),
    }
    asked = setting.differences(TrainSetting())
    return [
        Refusal(f"{law} ({field}={asked[field]})", way_out(f"{field}={instead}"))
        for field, (law, instead) in found.items()
        if field in asked and field not in said
    ]


def usual_refusals(setting: TrainSetting, trainer: str, *said: str) -> list[Refusal]:
    """Refusals for the fields that most trainers cannot express, except those in `said`."""
    found = []
    if setting.ema and "ema" not in said:
        found.append(
            Refusal(f"{trainer} keeps no average of the weights (ema)", way_out("ema=false"))
        )
    if setting.frozen_stages and "frozen_stages" not in said:
        found.append(
            Refusal(
                f"{trainer} cannot freeze stages (frozen_stages={setting.frozen_stages})",
                way_out("frozen_stages=0"),
            )
        )
    if setting.lora_rank and "lora_rank" not in said:
        found.append(
            Refusal(
                f"{trainer} has no adapters (lora_rank={setting.lora_rank})",
                way_out("lora_rank=0"),
            )
        )
    if setting.optimizer_in_backward and "optimizer_in_backward" not in said:
        found.append(
            Refusal(
                f"{trainer} has one optimizer, which steps after backward (no "
                "optimizer_in_backward)",
                way_out("optimizer_in_backward=false"),
            )
        )
    if not setting.zero_grad_to_none and "zero_grad_to_none" not in said:
        found.append(
            Refusal(
                f"{trainer} always sets gradients to None (it has no zero_grad_to_none=false)",
                way_out("zero_grad_to_none=true"),
            )
        )
    if setting.offload != "none" and "offload" not in said:
        law = f"{trainer} has no place for activations in host memory (offload={setting.offload})"
        found.append(Refusal(law, way_out("offload=none")))
    if setting.precision == "fp8" and "fp8" not in said:
        law = f"{trainer} converts no linear layers to 8 bits"
        found.append(Refusal(law, way_out("precision=bf16")))
    if setting.precision == "pure-bf16" and "pure-bf16" not in said:
        found.append(Refusal(f"{trainer} has no pure bf16 training", way_out("precision=bf16")))
    return found
