"""What `planner bench attention` times: a shape, a library and a path each. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.core.schema import Library, SwinConfig, TrainSetting
from planner.libraries.maps import feature_maps
from planner.libraries.microsoft.checkout import named_checkout
from planner.libraries.registry import SPECS, find_library

# How attention is computed: written out, by one fused call, and either of them compiled.
PATHS = ("eager", "sdpa", "compiled-eager", "compiled-sdpa")
# A block whose patch embedding is never run: any patch will do.
_PATCH = 4


@dataclass(frozen=True)
class Case:
    """Window attention of one block: roll, partition, q k v, attention, projection, and back.

    `model` is a Swin of one stage and two blocks, of which the second is shifted.
    """

    shape: str
    model: SwinConfig
    setting: TrainSetting
    shifted: bool

    @property
    def path(self) -> str:
        compiled = "" if self.setting.compile == "off" else "compiled-"
        return f"{compiled}{self.setting.attention}"

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """[B, H, W, C]."""
        height, width = (side // _PATCH for side in self.model.image_size)
        return self.setting.batch_size, height, width, self.model.embed_dim

    @property
    def table(self) -> str:
        """What its table is of: `guide: [2, 56, 56, 96], window 7, 3 heads; fp32`."""
        window, heads = self.model.windows[0], self.model.num_heads[0]
        shape = f"{self.shape}: {list(self.input_shape)}, window {window}, {heads} heads"
        return f"{shape}; {self.setting.precision}"

    @property
    def row(self) -> str:
        """`timm version 1, shifted`."""
        windows = "shifted" if self.shifted else "plain"
        return f"{self.model.library} version {self.model.version}, {windows}"


def installed_libraries() -> tuple[Library, ...]:
    """Those whose module can be built here; native needs nothing but torch."""
    return tuple(spec.name for spec in SPECS.values() if is_installed(spec.name))


def is_installed(library: str) -> bool:
    if library == "microsoft" and named_checkout() is None:
        return False
    needed = {"native": "torch", "microsoft": "timm"}.get(library, library)
    return importlib.util.find_spec(needed) is not None


def shapes_of(model: SwinConfig | None, library: Library) -> Iterator[tuple[str, SwinConfig]]:
    """Each stage of `model`, by its name; without one what a guide measures, in both versions."""
    if model is None:
        for version in (1, 2):
            yield "guide", one_stage(library, version, (56, 56), 96, 3, 7)
        return
    for stage, feature_map in enumerate(feature_maps(model)):
        yield (
            f"{model.title} stage {stage + 1}",
            one_stage(
                library, model.version, feature_map, model.stage_channels(stage),
                model.num_heads[stage], model.windows[stage],
                pretrained_window_size=(model.pretrained_windows[stage],),
                qkv_bias=model.qkv_bias,
            ),
        )  # fmt: skip


def cases_of(
    shape: str,
    model: SwinConfig,
    batch_size: int,
    paths: Sequence[str] = PATHS,
    precisions: Sequence[str] = ("fp32",),
) -> Iterator[Case]:
    """Plain and shifted, on each path that the library has.

    Raises UnsupportedError where the library cannot build the shape.
    """
    library = find_library(model.library)
    library.check(model)
    # Where one window covers the map there is nothing to shift.
    shifts = (False, True) if min(feature_maps(model)[0]) > model.windows[0] else (False,)
    for precision in precisions:
        for shifted in shifts:
            for path in paths:
                compiled, _, attention = path.rpartition("-")
                if attention in library.attentions(model):
                    setting = {
                        "batch_size": batch_size,
                        "precision": precision,
                        "attention": attention,
                        "compile": "default" if compiled else "off",
                    }
                    yield Case(shape, model, TrainSetting.model_validate(setting), shifted)


def one_stage(
    library: Library, version: int, feature_map: tuple[int, int], channels: int, heads: int,
    window: int, **fields: object,
) -> SwinConfig:  # fmt: skip
    return SwinConfig.model_validate(
        {
            "library": library,
            "version": version,
            "image_size": tuple(side * _PATCH for side in feature_map),
            "patch_size": _PATCH,
            "num_classes": 1,
            "embed_dim": channels,
            "depths": (2,),
            "num_heads": (heads,),
            "window_size": window,
            "mlp_ratio": 1.0,
            "drop_path_rate": 0.0,
            **fields,
        }
    )
