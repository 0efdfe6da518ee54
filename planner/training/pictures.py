# Written by 'planner emit', which replaces files that begin with this line.
"""Pictures in folders of classes, as tensors: by torchvision's transforms, or by timm's.

`train.py` beside this file trains on them, and `planner data` measures a loader of them. `setting`
is that file's `Setting`.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet's pixels


class Seeded(Dataset[Any]):
    """Pictures by (index, place in the order of all): what is random in one depends on its place
    only, so that a training that was resumed sees what an uninterrupted one sees."""

    def __init__(self, data: Dataset[Any], seed: int) -> None:
        self.data, self.seed = data, seed

    def __getitem__(self, drawn: tuple[int, int]) -> Any:
        index, place = drawn
        before = random.getstate()
        random.seed(self.seed + place)
        if (numpy := sys.modules.get("numpy")) is not None:  # which timm's RandAugment draws from
            numpy.random.seed((self.seed + place) % 2**32)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed + place)
            item = self.data[index]
        random.setstate(before)
        return item


class Endless(Sampler[tuple[int, int]]):
    """A rank's pictures from the place `first` on, epoch after epoch, each in its own order and
    none left out: no worker starts over between two, every batch is whole, and one may begin in
    one epoch and end in the next."""

    def __init__(self, num_images: int, seed: int, first: int, world_size: int) -> None:
        self.num_images, self.seed = num_images, seed
        self.first, self.world_size = first, world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        drawn, order = -1, torch.empty(0)
        for place in itertools.count(self.first, self.world_size):
            epoch, at = divmod(place, self.num_images)
            if epoch != drawn:
                seeded = torch.Generator().manual_seed(self.seed + epoch)
                drawn, order = epoch, torch.randperm(self.num_images, generator=seeded)
            yield int(order[at]), place


def transform(setting: Any, train: bool) -> Any:
    """From a picture to a tensor of the model's size, cropped and changed at random to train."""
    size = (setting.height, setting.width)
    augmented = train and setting.auto_augment
    if setting.pipeline == "timm":  # bytes as far as the device, where `prepared` does the rest
        import PIL
        from timm.data import create_transform

        # Pillow 13 does not posterize to no bits, which level 10 asks for at random: there it is 9.
        capped = "-mmax9" if int(PIL.__version__.partition(".")[0]) >= 13 else ""
        return create_transform(
            (setting.channels, *size), is_training=train, use_prefetcher=True,
            auto_augment=setting.auto_augment + capped if augmented else None,
            interpolation=setting.interpolation, crop_pct=setting.crop_share,
        )  # fmt: skip
    from torchvision.transforms import v2

    how: dict[str, Any] = {"interpolation": v2.InterpolationMode(setting.interpolation)}
    if train:
        changed = [v2.RandomResizedCrop(size, antialias=True, **how), v2.RandomHorizontalFlip()]
    else:
        side = int(max(size) / setting.crop_share)
        changed = [v2.Resize(side, antialias=True, **how), v2.CenterCrop(size)]
    if augmented:  # timm's rand-m9 in torchvision's words: two changes, at level 9 of 10, each half
        # of the time; without noise in the level, Invert and SolarizeAdd.
        grey = [round(255 * part) for part in MEAN]
        augment = v2.RandAugment(1, magnitude=9, num_magnitude_bins=11, fill=grey)
        changed += [v2.RandomApply([augment], 0.5)] * 2
    changed += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    if train and setting.erasing:
        changed.append(v2.RandomErasing(setting.erasing, value="random"))
    return v2.Compose([v2.ToImage(), *changed])


def pictures(folder: Path, setting: Any, train: bool) -> tuple[Any, Any]:
    """Those of `folder`, and what makes a batch of them (None: torch's default). It has train/ (or
    the classes themselves) and val/; None, None where there is nothing to validate."""
    names = ("train", "training") if train else ("val", "valid", "validation", "test")
    parts = [folder / name for name in names if (folder / name).is_dir()]
    if not train and not parts:
        return None, None
    try:
        from torchvision.datasets import ImageFolder

        found = ImageFolder(parts[0] if parts else folder, transform(setting, train))
        collate: Any = None
        if setting.pipeline == "timm":
            from timm.data.loader import fast_collate

            collate = fast_collate
    except (ImportError, RuntimeError) as error:  # the latter where it was built for another torch
        law = f"pictures are read with {setting.pipeline}, which cannot be imported: {error}"
        raise SystemExit(f"{law}. Install that of this torch, or try --synthetic.") from error
    except FileNotFoundError as error:  # no folder, no class, no picture
        raise SystemExit(str(error)) from error
    if len(found.classes) > setting.num_classes:
        law = f"{found.root} has {len(found.classes)} classes, the model {setting.num_classes}"
        raise SystemExit(law)
    return found, collate


@lru_cache
def on_pixels(device: torch.device, erasing: float) -> tuple[Tensor, Tensor, Any]:
    """Mean and deviation of bytes, copied to the device once, and what erases rectangles there."""
    from timm.data.random_erasing import RandomErasing

    mean, std = torch.tensor([MEAN, STD], device=device).mul(255).view(2, -1, 1, 1)
    return mean, std, RandomErasing(erasing, mode="pixel", device=str(device))


def from_bytes(images: Tensor, erasing: float) -> Tensor:
    """Bytes [B, C, H, W] on their device as what a model takes, a share of them erased in parts."""
    mean, std, erase = on_pixels(images.device, erasing)
    found: Tensor = erase(images.float().sub_(mean).div_(std))
    return found
