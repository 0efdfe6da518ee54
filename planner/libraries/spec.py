"""A library's spec: its names, its abilities, and how to build its Swin, real or on shapes.

First the published models, then whether an installed library is still the one that was transcribed,
then `LibrarySpec`, then faults that several libraries share. Imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner.core.errors import Fault, PlannerError, UnsupportedError, alternatives, refuse_faults
from planner.core.schema import Library, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.model import NAMED_LIBRARIES
from planner.core.torch_version import installed_version
from planner.libraries.limits import block_faults, swin_faults
from planner.libraries.maps import Trainable

if TYPE_CHECKING:
    from torch import nn

    from planner.step.nn import Module
    from planner.step.tensor import Device

    BuildOnShapes = Callable[[Device], Module]


# The models that each library publishes (`published.json`), whose sizes are shared.
#
# Sources: arXiv 2103.14030 §3.3 and 2111.09883 §3.5 (channels, depths), the authors' configuration
# files (heads: 32 channels each). Ours have the drop path that the authors trained each size with
# on ImageNet-1k from scratch; large was only fine-tuned from ImageNet-22k, with 0.2.

_PUBLISHED: Mapping[str, Mapping[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)


def published_fields(group: str) -> dict[str, dict[str, Any]]:
    """The fields of each model of a group in `published.json`, by name."""

    def fields(size: str, **own: Any) -> dict[str, Any]:
        return {**_PUBLISHED["sizes"][size], **own}

    return {name: fields(**row) for name, row in _PUBLISHED[group].items()}


def published(library: Library, group: str = "") -> dict[str, SwinConfig]:
    """The Swins that `library` publishes, by name; those of a `group` of its own."""
    return {
        name: SwinConfig.model_validate({"library": library, "name": name, **fields})
        for name, fields in published_fields(group or library).items()
    }


# Whether an installed library is still the one that was transcribed.
#
# Each library's shapes were written beside the source files of one version. `transcribed.json` in
# its folder has the sha256 of those files, for each version of Swin. The installed files are
# compared with them, without importing the library.

HASHES = "transcribed.json"


@cache
def drift_notes(library: str, swin_version: int, folder: Path | None) -> tuple[str, ...]:
    """A note if a file below `folder` is not the one that was transcribed.

    `folder` is that of the installed library; None if it is not installed, and there is no note.
    """
    transcribed = _read_transcribed(library)
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
    found = installed_version(library) or "another version"  # of a checkout, or on PYTHONPATH
    return (
        f"transcribed from {source} {transcribed['version']}; {found} is "
        f"installed and its {', '.join(differing)} {verb}: check with --record",
    )


def package_folder(package: str) -> Path | None:
    """The folder of an installed package, found without an import; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # somebody put a module without a spec into sys.modules
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders))) if folders else None


def _read_transcribed(library: str) -> Mapping[str, Any] | None:
    """The content of `transcribed.json`; None for our own Swin, which is no transcription."""
    file = Path(__file__).parent / library / HASHES
    if not file.is_file():
        return None
    transcribed: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return transcribed


def _digest(file: Path) -> str | None:
    """The sha256 of a file; None if the library no longer has it."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


Attention = Literal["eager", "sdpa"]


def _no_faults(config: SwinConfig) -> list[str]:
    return []


@dataclass(frozen=True)
class LibrarySpec:
    """What is known of one library without importing it.

    `attentions` returns the attentions of a configuration, the library's default on CUDA first;
    `faults` why this library cannot build a configuration, one line each. `tagged` are names that
    are understood but not listed; `refused` maps a pattern of names to the reason.
    `reentrant` are the checkpointings of PyTorch's reentrant kind.
    `find_source` finds the folder of its source, if that is not the package of its name.
    `block_classes` are the class names of its blocks, real and on shapes.
    `spec.py` in its folder has the `build` of its real module, `shapes.py` that of the same on
    shapes. Both are imported on first use.
    """

    name: Library
    title: str
    published: Mapping[str, SwinConfig]
    attentions: Callable[[SwinConfig], tuple[Attention, ...]]
    faults: Callable[[SwinConfig], list[str]] = _no_faults
    tagged: Mapping[str, SwinConfig] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    reentrant: tuple[str, ...] = ()
    find_source: Callable[[], Path | None] | None = None
    block_classes: tuple[str, ...] = ("SwinTransformerBlock", "SwinTransformerBlockV2")

    def default_attention(self, config: SwinConfig) -> Attention:
        """The attention that the library chooses on CUDA."""
        return self.attentions(config)[0]

    def drift(self, config: SwinConfig) -> tuple[str, ...]:
        """The notes if the installed library is not the transcribed one. It is never imported."""
        folder = self.find_source() if self.find_source else package_folder(self.name)
        return drift_notes(self.name, config.version, folder)

    def find(self, name: str) -> SwinConfig | None:
        """The configuration published as `name`, if any. Raises UnsupportedError for a refused
        model."""
        for pattern, reason in self.refused.items():
            if re.search(pattern, name):
                raise UnsupportedError(f"{self.name}:{name} {reason}", OWN_FACTORY)
        return self.published.get(name) or self.tagged.get(name)

    def check(self, config: SwinConfig) -> None:
        """Raises UnsupportedError, with every fault, if this library cannot build `config`."""
        faults = self.faults(config)
        if faults:
            lines = "\n".join(f"  {fault}" for fault in faults)
            raise UnsupportedError(
                f"{self.title} cannot build {config.title}:\n{lines}",
                "Change these fields."
                if self.name == "native"
                else "Change these fields, or use native, which accepts most.",
            )

    def resolve(self, config: SwinConfig, setting: TrainSetting) -> ResolvedSetting:
        """`setting` as this library runs it with `config`. Raises UnsupportedError with all faults
        of the configuration, or, if it has none, of the setting."""
        self.check(config)
        setting.check_optimizer()
        refuse_faults(self.setting_faults(config, setting))
        attention = self._attention(config, setting)
        with_recipe = setting.with_recipe(of_swin=True)
        return ResolvedSetting(with_recipe.model_copy(update={"attention": attention}))

    def setting_faults(self, config: SwinConfig, setting: TrainSetting) -> list[Fault]:
        """Why this library cannot run `setting` with `config`."""
        swin = f"{self.name}'s Swin version {config.version}"
        return [
            *self._trainable_faults(config, setting, swin),
            *self._attention_faults(config, setting, swin),
            *self._checkpointing_faults(config, setting, swin),
            *swin_faults(config, setting, self._attention(config, setting)),
        ]

    def build(self, config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
        """The library's real module, freshly initialised, in training mode. Of all levers of
        `setting` only the attention is applied. Imports torch.

        Raises PlannerError where the library is not installed.
        """
        assert setting.attention != "library", "a setting is resolved before a module is built"
        try:
            module: nn.Module = self._import("spec").build(config, setting.attention)
        except ModuleNotFoundError as error:
            raise not_installed(self.name, error) from error
        return module.train()

    def on_shapes(self, config: SwinConfig, setting: ResolvedSetting) -> BuildOnShapes:
        """The function that builds the library's Swin on shapes (`planner.step`). Imports no
        torch."""
        assert setting.attention != "library", "a setting is resolved before a module is built"
        shapes = self._import("shapes")

        def build(device: Device) -> Module:
            library_setting = setting
            if setting.chosen_blocks is not None:  # these are checkpointed below
                library_setting = setting.model_copy(update={"checkpointing": "none"})
            module: Module = shapes.build(device, config, library_setting)
            blocks = [part for part in module.descendants() if self._is_block(part)]
            for block in blocks:
                block.is_block = True
            if setting.chosen_blocks is not None:
                from planner.libraries.shared import checkpoint_in_place

                chosen = blocks[setting.chosen_blocks]
                checkpoint_in_place(chosen, setting.checkpointing == "selective")
            if setting.frozen_stages or setting.lora_rank:
                from planner.libraries.shared import apply_trainable

                apply_trainable(device, module, Trainable.from_setting(setting))
            return module

        return build

    def _import(self, name: str) -> Any:
        return import_module(f"planner.libraries.{self.name}.{name}")

    def _is_block(self, module: Module) -> bool:
        return any(kind.__name__ in self.block_classes for kind in type(module).__mro__)

    def _attention(self, config: SwinConfig, setting: TrainSetting) -> str:
        attention = setting.attention
        return self.default_attention(config) if attention == "library" else attention

    def _trainable_faults(
        self, config: SwinConfig, setting: TrainSetting, swin: str
    ) -> Iterator[Fault]:
        if setting.frozen_stages > config.num_stages:
            yield Fault(
                f"the model has {config.num_stages} stages",
                f"frozen_stages is {setting.frozen_stages}",
                f"Freeze at most {config.num_stages}, which leaves the classifier to train.",
            )
        if setting.lora_rank and config.version == 2:
            # A function computes queries, keys and values, beside the layer that holds the weight.
            yield Fault(
                f"{swin} has an attention that does not call its linear layers, so adapters would "
                "not run",
                f"lora_rank is {setting.lora_rank}",
                "Use version 1.",
            )
        field = "frozen_stages" if setting.frozen_stages else "lora_rank"
        if setting.checkpointing in self.reentrant and getattr(setting, field):
            yield Fault(
                f"{swin} checkpoints {setting.checkpointing} with PyTorch's reentrant kind, "
                "which computes no gradients where its input needs none",
                f"{field} is {getattr(setting, field)}",
                "Choose checkpointing none or stages.",
            )

    def _attention_faults(
        self, config: SwinConfig, setting: TrainSetting, swin: str
    ) -> Iterator[Fault]:
        supported = self.attentions(config)
        if setting.attention != "library" and setting.attention not in supported:
            yield Fault(
                f"{swin} has only {alternatives(supported)} attention",
                f"attention is {setting.attention}",
                f"Choose --attention {alternatives(supported)}, or native, which has both.",
                change=f"attention={supported[0]}",
            )

    def _checkpointing_faults(
        self, config: SwinConfig, setting: TrainSetting, swin: str
    ) -> Iterator[Fault]:
        yield from block_faults(swin, sum(config.depths), setting)
        if max(setting.checkpointed_stages or (0,)) >= config.num_stages:
            yield Fault(
                f"the model has {config.num_stages} stages, counted from 0",
                f"checkpointing is {setting.checkpointing}",
                "Name stages that exist, or all of them with --checkpointing stages.",
                change="checkpointing=stages",
            )


def not_installed(library: str, error: ModuleNotFoundError) -> PlannerError:
    """The error where a library, or torch or the library that it needs, is not installed. Raises
    `error` where another module is missing."""
    missing = (error.name or "").partition(".")[0]
    if missing not in (*NAMED_LIBRARIES, "torch"):
        raise error
    needs = "" if missing == library else f" needs {missing}, which"
    extra = library if library in NAMED_LIBRARIES else missing
    package = f"'planner[{extra}]'" if extra in NAMED_LIBRARIES else extra
    return PlannerError(f"{library}{needs} is not installed.", f"pip install {package}")


OWN_FACTORY = (
    "Name a factory of your own, package.module:factory, and use --record or 'planner tune'."
)


def eager_attention(config: SwinConfig) -> tuple[Attention, ...]:
    """The attentions of a library whose code writes attention out."""
    return ("eager",)


def check_one_window(config: SwinConfig) -> list[str]:
    """The fault of several windows, in a library with one window for all stages."""
    if len(set(config.windows)) == 1:
        return []
    return [f"window_size: must be one number for all stages, not {list(config.windows)}"]


def check_pretrained_window(config: SwinConfig) -> list[str]:
    """The fault of a pretrained_window_size, which version 1 does not have."""
    if config.version == 2 or not any(config.pretrained_windows):
        return []
    return ["pretrained_window_size: only version 2 has it"]


def check_values(config: SwinConfig, **values: object) -> list[str]:
    """The faults of other `values`, in a library in which these fields have one value."""
    return [
        f"{name}: must be {value}, not {getattr(config, name)}"
        for name, value in values.items()
        if getattr(config, name) != value
    ]
