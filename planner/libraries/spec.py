"""A library's spec: its names, what it can do, and the way to its real module. Imports no torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from planner.errors import PlannerError, UnsupportedError
from planner.libraries.drift import drift_notes, package_folder
from planner.libraries.limits import limit_of
from planner.libraries.trainable import FrozenNames, Trainable, stem_and_layers
from planner.schema import Library, SwinConfig, TrainSetting

if TYPE_CHECKING:
    from torch import nn

    from planner.step.nn import Module
    from planner.step.tensor import Device

    BuildOnShapes = Callable[[Device], Module]

Attention = Literal["eager", "sdpa"]


def _no_faults(config: SwinConfig) -> list[str]:
    return []


def calls_its_linears(config: SwinConfig) -> bool:
    """Version 2 has the projection to queries, keys and values computed by a function in most
    libraries, beside the layer that holds its weight: an adapter around it would not run."""
    return config.version == 1


@dataclass(frozen=True)
class LibrarySpec:
    """What is known of one library without importing it.

    `attentions` gives what it can compute attention with, its own default on CUDA first;
    `checkpointings` what can be checkpointed, by the library or by wrapping its modules;
    `faults` what keeps this library from building a configuration, one line each. `tagged` are
    names that are understood but not listed; `refused` maps a pattern of names to why not.
    `frozen_names` gives what freezing so many stages freezes; `takes_adapters` whether attention
    calls its linear layers; `reentrant` are the checkpointings of PyTorch's reentrant kind.
    `installed` finds the folder of its source, where that is not the package of its name.
    """

    name: Library
    title: str
    published: Mapping[str, SwinConfig]
    attentions: Callable[[SwinConfig], tuple[Attention, ...]]
    checkpointings: Callable[[SwinConfig], tuple[str, ...]]
    faults: Callable[[SwinConfig], list[str]] = _no_faults
    tagged: Mapping[str, SwinConfig] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    frozen_names: FrozenNames = stem_and_layers
    takes_adapters: Callable[[SwinConfig], bool] = calls_its_linears
    reentrant: tuple[str, ...] = ()
    installed: Callable[[], Path | None] | None = None

    def default_attention(self, config: SwinConfig) -> Attention:
        """What the library does by itself on CUDA."""
        return self.attentions(config)[0]

    def drift(self, config: SwinConfig) -> tuple[str, ...]:
        """What to say where the installed library is not the transcribed one (never imported)."""
        folder = self.installed() if self.installed else package_folder(self.name)
        return drift_notes(self.name, config.version, folder)

    def find(self, name: str) -> SwinConfig | None:
        """The configuration published as `name`, if any. Raises UnsupportedError for a known other
        model."""
        for pattern, reason in self.refused.items():
            if re.search(pattern, name):
                raise UnsupportedError(f"{self.name}:{name} {reason}", OWN_FACTORY)
        return self.published.get(name) or self.tagged.get(name)

    def check(self, config: SwinConfig) -> None:
        """Raises UnsupportedError, with every fault, for what this library cannot build."""
        faults = self.faults(config)
        if faults:
            lines = "\n".join(f"  {fault}" for fault in faults)
            raise UnsupportedError(
                f"{self.title} cannot build {config.title}:\n{lines}",
                "Change these fields, or the library: native refuses least.",
            )

    def resolve_setting(self, config: SwinConfig, setting: TrainSetting) -> TrainSetting:
        """`setting` with the attention that will run. Raises UnsupportedError."""
        setting.check_optimizer()
        self._check_trainable(config, setting)
        attention = self._attention(config, setting.attention)
        checkpointing = self._checkpointing(config, setting.checkpointing)
        limit = limit_of(config, setting, attention)
        if limit is not None:
            raise limit.error()
        return setting.model_copy(update={"attention": attention, "checkpointing": checkpointing})

    def build(self, config: SwinConfig, setting: TrainSetting) -> nn.Module:
        """The library's real module, freshly initialised, in training mode. Imports torch.

        Raises UnsupportedError, or PlannerError where the library is not installed.
        """
        self.check(config)
        setting = self.resolve_setting(config, setting)
        module = importlib.import_module(f"planner.libraries.{self.name}.module")
        try:
            built: nn.Module = module.build(config, setting)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in EXTRAS:
                raise
            extra = self.name if self.name in EXTRAS else missing
            raise PlannerError(
                f"{self.title} needs {missing}, which is not installed."
                if missing != self.name
                else f"{self.title} is not installed.",
                f"Install it with: pip install 'planner[{extra}]'",
            ) from error
        if setting.frozen_stages or setting.lora_rank:
            from planner.libraries.adapters import choose_trainable

            choose_trainable(built, Trainable.of(setting, self.frozen_names))
        return built.train()

    def on_shapes(self, config: SwinConfig, setting: TrainSetting) -> BuildOnShapes:
        """How to build the library's Swin on shapes (`planner.step`). Imports no torch.

        Raises UnsupportedError. `setting` is resolved here.
        """
        self.check(config)
        setting = self.resolve_setting(config, setting)
        shapes = importlib.import_module(f"planner.libraries.{self.name}.shapes")

        def build(device: Device) -> Module:
            module: Module = shapes.build_on_shapes(device, config, setting)
            if setting.frozen_stages or setting.lora_rank:
                from planner.libraries.adapters_on_shapes import choose_trainable

                choose_trainable(device, module, Trainable.of(setting, self.frozen_names))
            return module

        return build

    def _check_trainable(self, config: SwinConfig, setting: TrainSetting) -> None:
        if setting.frozen_stages > config.num_stages:
            raise UnsupportedError(
                f"frozen_stages is {setting.frozen_stages}, and the model has "
                f"{config.num_stages} stages.",
                f"Freeze at most {config.num_stages}, which leaves the classifier to train.",
            )
        if setting.lora_rank and not self.takes_adapters(config):
            raise UnsupportedError(
                f"{self.title}'s attention does not call its linear layers in Swin version "
                f"{config.version}, so adapters (lora_rank={setting.lora_rank}) would not run.",
                "Use transformers, or version 1 of native, timm or microsoft.",
            )
        partly = "frozen_stages" if setting.frozen_stages else "lora_rank"
        if setting.checkpointing in self.reentrant and (setting.frozen_stages or setting.lora_rank):
            raise UnsupportedError(
                f"{self.title} checkpoints {setting.checkpointing} with PyTorch's reentrant kind, "
                f"which gives no gradients where its input wants none ({partly}).",
                "Choose checkpointing none or stages.",
            )

    def _attention(self, config: SwinConfig, wanted: str) -> Attention:
        if wanted == "library":
            return self.default_attention(config)
        for attention in self.attentions(config):
            if attention == wanted:
                return attention
        known = ", ".join(self.attentions(config))
        raise UnsupportedError(
            f"{self.title} has no {wanted} attention for Swin version {config.version}.",
            f"Choose --attention {known}, or native, which has both.",
        )

    def _checkpointing(self, config: SwinConfig, wanted: str) -> str:
        kind = wanted.partition(":")[0]
        if kind not in self.checkpointings(config):
            raise UnsupportedError(
                f"{self.title} has no checkpointing {wanted!r} for Swin version {config.version}.",
                f"Choose one of {', '.join(self.checkpointings(config))}.",
            )
        _, _, listed = wanted.partition(":")
        beyond = [stage for stage in listed.split(",") if stage and int(stage) >= config.num_stages]
        if beyond:
            raise UnsupportedError(
                f"checkpointing {wanted!r} names stage {beyond[0]}, and the model has "
                f"{config.num_stages} stages, counted from 0.",
                "Name stages that exist, or all of them with --checkpointing stages.",
            )
        return wanted


EXTRAS = ("timm", "torchvision", "transformers")  # of our own package, each named as its library
OWN_FACTORY = (
    "Name a factory of your own, package.module:factory, and use --trace or 'planner tune'."
)


def at_least_blocks(config: SwinConfig) -> tuple[str, ...]:
    """What can be checkpointed in every library, since modules can be wrapped."""
    return ("none", "blocks", "stages")


def one_window(config: SwinConfig) -> Sequence[str]:
    """The fault of a library that has one window for all stages."""
    if len(set(config.windows)) == 1:
        return ()
    return (f"window_size: one number for all stages, not {list(config.windows)}",)


def no_pretrained_window(config: SwinConfig) -> Sequence[str]:
    """The fault of a version 1, which has no use for it."""
    if config.version == 2 or not any(config.pretrained_windows):
        return ()
    return ("pretrained_window_size: belongs to version 2",)


def required(config: SwinConfig, **values: object) -> Sequence[str]:
    """The faults of a library that has no choice in these fields."""
    return [
        f"{name}: always {value} there, not {getattr(config, name)}"
        for name, value in values.items()
        if getattr(config, name) != value
    ]
