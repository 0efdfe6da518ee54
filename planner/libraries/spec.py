"""A library's spec: its names, what it can do, and the way to its real module. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from planner.core.errors import PlannerError, UnsupportedError, alternatives
from planner.core.schema import Library, ResolvedSetting, SwinConfig, TrainSetting
from planner.libraries.limits import SettingFault, block_limit, limit_of
from planner.libraries.maps import Trainable

if TYPE_CHECKING:
    from torch import nn

    from planner.step.nn import Module
    from planner.step.tensor import Device

    BuildOnShapes = Callable[[Device], Module]


# The published sizes, which every library shares; each library's `spec.py` adds its own defaults.
#
# Sources: arXiv 2103.14030 §3.3 and 2111.09883 §3.5 (channels, depths), the authors' configuration
# files (heads: 32 channels each).

SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
    "large": {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48)},
}
IMAGENET_1K, IMAGENET_22K = 1000, 21841  # classes

# Fine-tuned in version 2 with larger windows than in pre-training, at 192 pixels.
PRETRAINED_192 = (12, 12, 12, 6)


def published(
    library: Library, name: str, size: str, version: int, image: int, window: int, **own: Any
) -> SwinConfig:
    """The model that `library` publishes as `name`; `own` is what it sets otherwise."""
    fields = {
        "library": library,
        "name": name,
        "version": version,
        "image_size": image,
        "window_size": window,
        **SIZES[size],
        **own,
    }
    return SwinConfig.model_validate(fields)


def by_name(configs: Iterable[SwinConfig]) -> dict[str, SwinConfig]:
    return {config.name: config for config in configs if config.name is not None}


# Whether an installed library is still the one that was transcribed.
#
# Each library's shapes were written beside one version's source files. `transcribed.json` in its
# folder has the sha256 of those files, for each version of Swin; here the installed files are read
# and compared, without importing the library.

HASHES = "transcribed.json"


@cache
def drift_notes(library: str, swin_version: int, folder: Path | None) -> tuple[str, ...]:
    """What to say where a file below `folder` is not the one that was transcribed.

    `folder` is the installed library's, or None where it is not installed, which says nothing.
    """
    transcribed = _read(library)
    if folder is None or transcribed is None:
        return ()
    differing = [
        name.rpartition("/")[2]
        for name, digest in transcribed["files"][str(swin_version)].items()
        if _digest(folder / name) != digest
    ]
    if not differing:
        return ()
    source, verb = transcribed["source"], "differs" if len(differing) == 1 else "differ"
    return (
        f"transcribed from {source} {transcribed['version']}; {_installed(library)} is installed "
        f"and its {', '.join(differing)} {verb}: check with --record",
    )


def package_folder(package: str) -> Path | None:
    """Where a package is installed, without importing it; None where it is not."""
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # somebody put a module without a spec into sys.modules
        return None
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def _read(library: str) -> Mapping[str, Any] | None:
    """None for our own Swin, which is transcribed from nothing."""
    file = Path(__file__).parent / library / HASHES
    if not file.is_file():
        return None
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _digest(file: Path) -> str | None:
    """None where the library has no such file any more."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _installed(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes longer than the hashes

    try:
        return version(library)
    except PackageNotFoundError:  # a checkout, or a folder on PYTHONPATH
        return "another version"


Attention = Literal["eager", "sdpa"]
_Module = TypeVar("_Module")


def _no_faults(config: SwinConfig) -> list[str]:
    return []


@dataclass(frozen=True)
class LibrarySpec:
    """What is known of one library without importing it.

    `attentions` gives what it can compute attention with, its own default on CUDA first;
    `faults` what keeps this library from building a configuration, one line each. `tagged` are
    names that are understood but not listed; `refused` maps a pattern of names to why not.
    `reentrant` are the checkpointings of PyTorch's reentrant kind.
    `installed` finds the folder of its source, where that is not the package of its name.
    `block_classes` are what its blocks are called, real ones and those on shapes.
    `spec.py` of its folder has the `build` of its real module, `shapes.py` that of the same on
    shapes, imported on first use.
    """

    name: Library
    title: str
    published: Mapping[str, SwinConfig]
    attentions: Callable[[SwinConfig], tuple[Attention, ...]]
    faults: Callable[[SwinConfig], list[str]] = _no_faults
    tagged: Mapping[str, SwinConfig] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    reentrant: tuple[str, ...] = ()
    installed: Callable[[], Path | None] | None = None
    block_classes: tuple[str, ...] = ("SwinTransformerBlock", "SwinTransformerBlockV2")

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
                "Change these fields, or use native, which accepts most.",
            )

    def resolve(self, config: SwinConfig, setting: TrainSetting) -> ResolvedSetting:
        """`setting` as this library runs it with `config`. Raises UnsupportedError with every
        fault: of the configuration, else of the setting."""
        self.check(config)
        setting.check_optimizer()
        faults = self.setting_faults(config, setting)
        if faults:
            raise UnsupportedError(
                "\n".join(f"{fault.message}." for fault in faults),
                "\n".join(dict.fromkeys(fault.way_out for fault in faults)),
            )
        attention = self._attention(config, setting)
        told = setting.with_recipe(of_swin=True)
        return ResolvedSetting(told.model_copy(update={"attention": attention}))

    def setting_faults(self, config: SwinConfig, setting: TrainSetting) -> list[SettingFault]:
        """What of `setting` this library cannot run."""
        swin = f"{self.name}'s Swin version {config.version}"
        faults = [
            *self._trainable_faults(config, setting, swin),
            *self._attention_faults(config, setting, swin),
            *self._checkpointing_faults(config, setting, swin),
        ]
        limit = limit_of(config, setting, self._attention(config, setting))
        return faults if limit is None else [*faults, limit]

    def build(self, config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
        """The library's real module, freshly initialised, in training mode, as it is without any
        lever of `setting` but attention. Imports torch.

        Raises PlannerError where the library is not installed.
        """
        assert setting.attention != "library", "a setting is resolved before a module is built"
        try:
            built: nn.Module = self._file("spec").build(config, setting.attention)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in EXTRAS:
                raise
            raise self._not_installed(missing) from error
        return built.train()

    def on_shapes(self, config: SwinConfig, setting: ResolvedSetting) -> BuildOnShapes:
        """How to build the library's Swin on shapes (`planner.step`). Imports no torch."""
        assert setting.attention != "library", "a setting is resolved before a module is built"
        file = self._file("shapes")

        def build(device: Device) -> Module:
            module: Module = file.build(device, config, _without_parts(setting))
            blocks = self._blocks(module.descendants())
            for block in blocks:
                block.is_block = True
            if setting.chosen_blocks is not None:
                from planner.libraries.shared import checkpoint_in_place

                chosen = blocks[setting.chosen_blocks]
                checkpoint_in_place(chosen, setting.checkpointing == "selective")
            if setting.frozen_stages or setting.lora_rank:
                from planner.libraries.shared import choose_trainable

                choose_trainable(device, module, Trainable.of(setting))
            return module

        return build

    def _file(self, name: str) -> Any:
        return import_module(f"planner.libraries.{self.name}.{name}")

    def _blocks(self, modules: Iterable[_Module]) -> list[_Module]:
        """The blocks among all modules of a model, which come in forward order."""
        return [
            module
            for module in modules
            if any(kind.__name__ in self.block_classes for kind in type(module).__mro__)
        ]

    def _not_installed(self, missing: str) -> PlannerError:
        extra = self.name if self.name in EXTRAS else missing
        return PlannerError(
            f"{self.title} needs {missing}, which is not installed."
            if missing != self.name
            else f"{self.title} is not installed.",
            f"Install it with: pip install 'planner[{extra}]'",
        )

    def _attention(self, config: SwinConfig, setting: TrainSetting) -> str:
        wanted = setting.attention
        return self.default_attention(config) if wanted == "library" else wanted

    def _trainable_faults(
        self, config: SwinConfig, setting: TrainSetting, swin: str
    ) -> Iterator[SettingFault]:
        if setting.frozen_stages > config.num_stages:
            yield SettingFault(
                f"the model has {config.num_stages} stages",
                f"frozen_stages is {setting.frozen_stages}",
                f"Freeze at most {config.num_stages}, which leaves the classifier to train.",
            )
        if setting.lora_rank and config.version == 2:
            # A function computes queries, keys and values, beside the layer that holds the weight.
            yield SettingFault(
                f"{swin} has an attention that does not call its linear layers, so adapters would "
                "not run",
                f"lora_rank is {setting.lora_rank}",
                "Use version 1.",
            )
        partly = "frozen_stages" if setting.frozen_stages else "lora_rank"
        if setting.checkpointing in self.reentrant and getattr(setting, partly):
            yield SettingFault(
                f"{swin} checkpoints {setting.checkpointing} with PyTorch's reentrant kind, "
                "which computes no gradients where its input needs none",
                f"{partly} is {getattr(setting, partly)}",
                "Choose checkpointing none or stages.",
            )

    def _attention_faults(
        self, config: SwinConfig, setting: TrainSetting, swin: str
    ) -> Iterator[SettingFault]:
        known = self.attentions(config)
        if setting.attention != "library" and setting.attention not in known:
            yield SettingFault(
                f"{swin} has only {alternatives(known)} attention",
                f"attention is {setting.attention}",
                f"Choose --attention {alternatives(known)}, or native, which has both.",
                field="attention",
                instead=known[0],
            )

    def _checkpointing_faults(
        self, config: SwinConfig, setting: TrainSetting, swin: str
    ) -> Iterator[SettingFault]:
        too_many = block_limit(swin, sum(config.depths), setting)
        if too_many is not None:
            yield too_many
        if max(setting.checkpointed_stages or (0,)) >= config.num_stages:
            yield SettingFault(
                f"the model has {config.num_stages} stages, counted from 0",
                f"checkpointing is {setting.checkpointing}",
                "Name stages that exist, or all of them with --checkpointing stages.",
                field="checkpointing",
                instead="stages",
            )


def _without_parts(setting: ResolvedSetting) -> ResolvedSetting:
    """What a library builds before chosen blocks of it are wrapped."""
    if setting.chosen_blocks is None:
        return setting
    return ResolvedSetting(setting.model_copy(update={"checkpointing": "none"}))


EXTRAS = ("timm", "torchvision", "transformers")  # of our own package, each named as its library
OWN_FACTORY = (
    "Name a factory of your own, package.module:factory, and use --record or 'planner tune'."
)


def only_eager(config: SwinConfig) -> tuple[Attention, ...]:
    """The attentions of a library that writes it out, and no more."""
    return ("eager",)


def one_window(config: SwinConfig) -> list[str]:
    """The fault of a library that has one window for all stages."""
    if len(set(config.windows)) == 1:
        return []
    return [f"window_size: must be one number for all stages, not {list(config.windows)}"]


def no_pretrained_window(config: SwinConfig) -> list[str]:
    """Version 1 has no pretrained_window_size."""
    if config.version == 2 or not any(config.pretrained_windows):
        return []
    return ["pretrained_window_size: only version 2 has it"]


def required(config: SwinConfig, **values: object) -> list[str]:
    """The faults of a library in which these fields have one value."""
    return [
        f"{name}: must be {value}, not {getattr(config, name)}"
        for name, value in values.items()
        if getattr(config, name) != value
    ]
