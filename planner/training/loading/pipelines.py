"""How a picture becomes a tensor, in the ways that people use. Each library is imported on first
use, and what is not available is said with its reason.

Training pictures are augmented as a Swin's authors do it (`Augmentation`), by torchvision and timm:
a loader is to cost in a probe what it costs in the training.

H, W height and width of what comes out, in pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from planner.core.augmentation import Augmentation
from planner.core.errors import UnsupportedError
from planner.core.schema.loading import Pipeline
from planner.libraries.missing_operators import declare_missing_operators
from planner.training.loading.pictures import BadItemError, decode_with_pil

# timm/data/constants.py: IMAGENET_DEFAULT_MEAN and _STD; torchvision's reference training has them.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AUGMENTATION = Augmentation()
_JPEG_MAGIC = b"\xff\xd8\xff"
_LIBRARY_OF = {
    "torchvision": "torchvision", "torchvision-jpeg": "torchvision", "timm": "timm",
    "transformers": "transformers",
}  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """What is done with one picture: its bytes decoded, then transformed to a tensor [3, H, W].

    `collate` makes a batch of items (None: torch's default); `on_device` wraps the loader where
    something is left to be done on the device.
    """

    decode: Callable[[bytes], Any]
    transform: Callable[[Any], Any]
    collate: Callable[[list[Any]], Any] | None = None
    on_device: Callable[[Any, torch.device], Any] | None = None


def steps_of(pipeline: Pipeline, size: tuple[int, int], train: bool = True) -> Steps:
    """The steps of a pipeline for pictures of `size` (H, W). Raises UnsupportedError where its
    library is not available or does not work here."""
    why = why_unsupported(pipeline)
    if why is not None:
        raise UnsupportedError(*why)
    return _MAKERS[pipeline](size, train)


@lru_cache(maxsize=8)
def why_unsupported(pipeline: Pipeline) -> tuple[str, str] | None:
    """Why a pipeline cannot run here, and the way out; None where it can."""
    if pipeline == "own":
        return (
            "the pipeline 'own' is what a Dataset of your own does by itself.",
            "Pass MODULE:FACTORY as data, or name another pipeline.",
        )
    library = _LIBRARY_OF[pipeline]
    declare_missing_operators()
    try:
        importlib.import_module(library)
        _CHECKS[pipeline]()
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        return (
            f"the pipeline {pipeline!r} does not work here: {type(error).__name__}: {said}.",
            f"Install the {library} that belongs to torch {torch.__version__}, or omit it.",
        )
    return None


def _check_transforms() -> None:
    importlib.import_module("torchvision.transforms.v2")


def _check_jpeg() -> None:
    """Decodes one pixel: the extension may be absent, or be built for another torch."""
    from PIL import Image

    buffer = BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "JPEG")
    _decode_whole(buffer.getvalue())


def _check_timm() -> None:
    importlib.import_module("timm.data")


def _check_processor() -> None:
    _processor((32, 32))


_CHECKS: dict[str, Callable[[], None]] = {
    "torchvision": _check_transforms,
    "torchvision-jpeg": _check_jpeg,
    "timm": _check_timm,
    "transformers": _check_processor,
}


def _torchvision(size: tuple[int, int], train: bool) -> Steps:
    """As the script of the trainer `pytorch` does it."""
    return Steps(decode_with_pil, _v2(size, train))


def _torchvision_jpeg(size: tuple[int, int], train: bool) -> Steps:
    return Steps(_decode_jpeg, _v2(size, train))


def _v2(size: tuple[int, int], train: bool) -> Callable[[Any], Tensor]:
    from torchvision.transforms import v2

    how = v2.InterpolationMode(AUGMENTATION.interpolation)
    scaled = v2.ToDtype(torch.float32, scale=True)
    normalized = v2.Normalize(list(MEAN), list(STD))
    if train:
        # Two operations at level 9 of 10, each of them half of the time, as timm's rand-m9; without
        # noise in the level, Invert and SolarizeAdd.
        augment = v2.RandAugment(1, magnitude=9, num_magnitude_bins=11)
        steps = [
            v2.RandomResizedCrop(size, interpolation=how, antialias=True),
            v2.RandomHorizontalFlip(),
            *[v2.RandomApply([augment], 0.5)] * 2,
            scaled,
            normalized,
            v2.RandomErasing(AUGMENTATION.erasing, value="random"),
        ]
    else:
        resized = int(max(size) / AUGMENTATION.crop_share)
        steps = [v2.Resize(resized, how, antialias=True), v2.CenterCrop(size), scaled, normalized]
    return v2.Compose([v2.ToImage(), *steps])  # type: ignore[no-any-return]


def _decode_jpeg(data: bytes) -> Tensor:
    """uint8 [3, height, width] by torchvision's decoder; what is no JPEG by PIL."""
    from torchvision.transforms.v2 import functional as F

    if data[: len(_JPEG_MAGIC)] != _JPEG_MAGIC:
        return F.pil_to_tensor(decode_with_pil(data))  # type: ignore[no-any-return]
    try:
        return _decode_whole(data)
    except RuntimeError as error:
        raise BadItemError(" ".join(str(error).split("\n", 1)[0].split())) from None


def _decode_whole(data: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return decode_jpeg(encoded, mode=ImageReadMode.RGB)  # type: ignore[no-any-return]


def _rand_augment() -> str:
    """The authors' own in timm's words. Pillow 13 does not posterize to no bits, which is what its
    level 10 asks for, at random: there no level is above 9."""
    import PIL

    capped = int(PIL.__version__.partition(".")[0]) >= 13
    return f"{AUGMENTATION.auto_augment}{'-mmax9' if capped else ''}"


def _timm(size: tuple[int, int], train: bool) -> Steps:
    """What timm's `create_loader` makes with its prefetcher: uint8 as far as the device, where
    `PrefetchLoader` normalises and erases."""
    from timm.data import create_transform
    from timm.data.loader import PrefetchLoader, fast_collate

    def on_device(loader: Any, device: torch.device) -> Any:
        return PrefetchLoader(
            loader, mean=MEAN, std=STD, device=device,
            re_prob=AUGMENTATION.erasing if train else 0.0, re_mode="pixel",
        )  # fmt: skip

    transform = create_transform(
        (3, *size), is_training=train, use_prefetcher=True,
        auto_augment=_rand_augment(), interpolation=AUGMENTATION.interpolation,
        crop_pct=AUGMENTATION.crop_share,
    )  # fmt: skip
    return Steps(decode_with_pil, transform, fast_collate, on_device)


def _transformers(size: tuple[int, int], train: bool) -> Steps:
    """The image processor of transformers' Swin, by itself: resized and normalised, no crop."""
    processor = _processor(size)

    def transform(picture: Any) -> Tensor:
        return processor(picture, return_tensors="pt")["pixel_values"][0]  # type: ignore[no-any-return]

    return Steps(decode_with_pil, transform)


def _processor(size: tuple[int, int]) -> Any:
    """ViTImageProcessor, which the published Swins of transformers name; since transformers 5 it is
    the fast one, of torchvision's functions."""
    from transformers import ViTImageProcessor

    height, width = size
    return ViTImageProcessor(
        size={"height": height, "width": width}, image_mean=list(MEAN), image_std=list(STD)
    )


_MAKERS: dict[str, Callable[[tuple[int, int], bool], Steps]] = {
    "torchvision": _torchvision,
    "torchvision-jpeg": _torchvision_jpeg,
    "timm": _timm,
    "transformers": _transformers,
}
