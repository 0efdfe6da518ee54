"""What `planner bench attention` times: the shapes, the libraries that are installed, the paths.

Imports no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from planner.errors import UnsupportedError
from planner.libraries.maps import feature_maps
from planner.libraries.microsoft.checkout import named_checkout
from planner.libraries.registry import SPECS, find_library
from planner.schema import Library, SwinConfig
from planner.schema.bench import PATHS, BenchCase, BenchPrecision, Path

GUIDE = "guide"


@dataclass(frozen=True)
class Shape:
    """[batch_size, height, width, channels], and how it is cut."""

    name: str
    versions: tuple[int, ...]
    batch_size: int
    feature_map: tuple[int, int]
    channels: int
    heads: int
    window: int
    pretrained_window: int = 0
    qkv_bias: bool = True


# What a guide measures, and the first stage of Swin-T with it: 2 × 56 × 56 × 96, window 7, 3 heads.
GUIDE_SHAPE = Shape(GUIDE, (1, 2), 2, (56, 56), 96, 3, 7)


@dataclass(frozen=True)
class Wanted:
    """What was asked for: the first of each is the default."""

    libraries: tuple[Library, ...]
    shapes: tuple[Shape, ...] = (GUIDE_SHAPE,)
    versions: tuple[int, ...] = (1, 2)
    paths: tuple[Path, ...] = PATHS
    shifts: tuple[bool, ...] = (False, True)
    precisions: tuple[BenchPrecision, ...] = ("fp32",)


@dataclass(frozen=True)
class Cases:
    """In the order in which they are timed, and what is left out, one line each."""

    cases: tuple[BenchCase, ...]
    left_out: tuple[str, ...] = field(default=())


def installed_libraries() -> tuple[Library, ...]:
    """Those whose module can be built here; native needs nothing but torch."""
    return tuple(spec.name for spec in SPECS.values() if is_installed(spec.name))


def is_installed(library: str) -> bool:
    if library == "native":
        return True
    if library == "microsoft":
        return named_checkout() is not None and importlib.util.find_spec("timm") is not None
    return importlib.util.find_spec(library) is not None


def stages_of(config: SwinConfig, batch_size: int) -> tuple[Shape, ...]:
    """The shape of each stage of a model."""
    return tuple(
        Shape(
            name=f"{config.title} stage {stage + 1}",
            versions=(config.version,),
            batch_size=batch_size,
            feature_map=feature_map,
            channels=config.stage_channels(stage),
            heads=config.num_heads[stage],
            window=config.windows[stage],
            pretrained_window=config.pretrained_windows[stage],
            qkv_bias=config.qkv_bias,
        )
        for stage, feature_map in enumerate(feature_maps(config))
    )


def all_cases(wanted: Wanted) -> Cases:
    """Every case that was asked for and can be there. A library takes all of a shape in turn, so
    that its process is started once."""
    cases: list[BenchCase] = []
    left_out: list[str] = []
    for shape in wanted.shapes:
        for library in wanted.libraries:
            for version in wanted.versions:
                if version not in shape.versions:
                    continue
                found = list(_of_shape(shape, library, version, wanted))
                why = _why_not(found[0]) if found else None
                if why is not None:
                    left_out.append(f"{library} version {version}, {shape.name}: {why}")
                else:
                    cases += found
    left_out += _without(cases, wanted)
    return Cases(tuple(dict.fromkeys(cases)), tuple(left_out))


def _of_shape(shape: Shape, library: Library, version: int, wanted: Wanted) -> Iterator[BenchCase]:
    for precision in wanted.precisions:
        for shifted in wanted.shifts:
            if shifted and min(shape.feature_map) <= shape.window:
                continue  # one window covers the map: there is nothing to shift
            plain = BenchCase.model_validate(
                {
                    "library": library,
                    "version": version,
                    "shape": shape.name,
                    "batch_size": shape.batch_size,
                    "feature_map": shape.feature_map,
                    "channels": shape.channels,
                    "heads": shape.heads,
                    "window": shape.window,
                    "pretrained_window": shape.pretrained_window,
                    "qkv_bias": shape.qkv_bias,
                    "shifted": shifted,
                    "precision": precision,
                }
            )
            known = find_library(library).attentions(plain.model)
            for path in wanted.paths:
                if path.rpartition("-")[2] in known:
                    yield plain.model_copy(update={"path": path})


def _why_not(case: BenchCase) -> str | None:
    """Why its library cannot build the shape, in one line."""
    try:
        find_library(case.library).check(case.model)
    except UnsupportedError as error:
        return " ".join(str(error).split())
    return None


def _without(cases: Sequence[BenchCase], wanted: Wanted) -> Iterable[str]:
    """The paths that a library does not have, in one line each."""
    have: dict[tuple[str, int], set[str]] = {}
    for case in cases:
        have.setdefault((case.library, case.version), set()).add(case.path)
    for (library, version), paths in have.items():
        missing = [path for path in wanted.paths if path not in paths]
        if missing:
            yield f"{library} version {version} has no {', '.join(missing)}"
