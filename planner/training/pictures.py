# Written by 'planner emit', which replaces files that begin with this line.
"""Pictures in folders of classes, as tensors: by torchvision's transforms, or by timm's.

`train.py` beside this file trains on them, and `planner data` measures a loader of them. A
`setting` here is the `Setting` of train.py.
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
    """Pictures by (index, place in the order of the whole training). The random changes of a
    picture depend only on its place, so that a resumed training sees what an uninterrupted one
    would see."""

    def __init__(self, data: Dataset[Any], seed: int) -> None:
        self.data, self.seed = data, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, place = key
        state = random.getstate()
        random.seed(self.seed + place)
        if (numpy := sys.modules.get("numpy")) is not None:  # timm's RandAugment draws from it
            numpy.random.seed((self.seed + place) % 2**32)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed + place)
            item = self.data[index]
        random.setstate(state)
        return item


class Endless(Sampler[tuple[int, int]]):
    """One rank's pictures from the place `first` on, epoch after epoch. Each epoch has its own
    order, and no picture is left out. The workers never restart, and every batch is full: a batch
    may begin in one epoch and end in the next."""

    def __init__(self, num_images: int, seed: int, first: int, world_size: int) -> None:
        self.num_images, self.seed = num_images, seed
        self.first, self.world_size = first, world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        drawn_epoch, order = -1, torch.empty(0)
        for place in itertools.count(self.first, self.world_size):
            epoch, position = divmod(place, self.num_images)
            if epoch != drawn_epoch:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                drawn_epoch, order = epoch, torch.randperm(self.num_images, generator=generator)
            yield int(order[position]), place


def build_transform(setting: Any, train: bool) -> Any:
    """The transform from a picture to a tensor of the model's size; for training it crops and
    changes the picture at random."""
    size = (setting.height, setting.width)
    augments = train and setting.auto_augment
    if setting.pipeline == "timm":  # to bytes only: on the device `prepare_images` does the rest
        import PIL
        from timm.data import create_transform

        # Pillow 13 refuses to posterize to no bits, which level 10 does at times: so 9 at most.
        cap = "-mmax9" if int(PIL.__version__.partition(".")[0]) >= 13 else ""
        return create_transform(
            (setting.channels, *size), is_training=train, use_prefetcher=True,
            auto_augment=setting.auto_augment + cap if augments else None,
            interpolation=setting.interpolation, crop_pct=setting.crop_share,
        )  # fmt: skip
    from torchvision.transforms import v2

    options: dict[str, Any] = {"interpolation": v2.InterpolationMode(setting.interpolation)}
    if train:
        steps = [v2.RandomResizedCrop(size, antialias=True, **options), v2.RandomHorizontalFlip()]
    else:
        side = int(max(size) / setting.crop_share)
        steps = [v2.Resize(side, antialias=True, **options), v2.CenterCrop(size)]
    if augments:
        # timm's rand-m9 in torchvision's words: two changes at level 9 of 10, each half the time,
        # without noise in the level, Invert and SolarizeAdd.
        grey = [round(255 * part) for part in MEAN]
        augment = v2.RandAugment(1, magnitude=9, num_magnitude_bins=11, fill=grey)
        steps += [v2.RandomApply([augment], 0.5)] * 2
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    if train and setting.erasing:
        steps.append(v2.RandomErasing(setting.erasing, value="random"))
    return v2.Compose([v2.ToImage(), *steps])


def open_pictures(folder: Path, setting: Any, train: bool) -> tuple[Any, Any]:
    """The pictures of `folder`, and the function that makes a batch of them (None: torch's
    default). The folder has train/ (or the classes themselves) and val/. Both are None if there is
    nothing to validate."""
    names = ("train", "training") if train else ("val", "valid", "validation", "test")
    folders = [folder / name for name in names if (folder / name).is_dir()]
    if not train and not folders:
        return None, None
    try:
        from torchvision.datasets import ImageFolder

        data = ImageFolder(folders[0] if folders else folder, build_transform(setting, train))
        collate: Any = None
        if setting.pipeline == "timm":
            from timm.data.loader import fast_collate

            collate = fast_collate
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        law = f"pictures are read with {setting.pipeline}, which cannot be imported: {error}"
        raise SystemExit(f"{law}. Install that of this torch, or try --synthetic.") from error
    except FileNotFoundError as error:  # no folder, no class, no picture
        raise SystemExit(f"{error}\nDATA is a folder of train/CLASS/*.jpg.") from error
    if len(data.classes) > setting.num_classes:
        law = f"{data.root} has {len(data.classes)} classes, the model {setting.num_classes}"
        raise SystemExit(f"{law}: tune it with --num-classes {len(data.classes)}, and emit that")
    return data, collate


@lru_cache
def pixel_constants(device: torch.device, erasing: float) -> tuple[Tensor, Tensor, Any]:
    """The mean and the deviation of bytes, copied to the device once, and timm's random erasing."""
    from timm.data.random_erasing import RandomErasing

    mean, std = torch.tensor([MEAN, STD], device=device).mul(255).view(2, -1, 1, 1)
    return mean, std, RandomErasing(erasing, mode="pixel", device=str(device))


def normalize(images: Tensor, erasing: float) -> Tensor:
    """Bytes [B, C, H, W] on the device, normalized; rectangles are erased in a share of the
    pictures."""
    mean, std, erase = pixel_constants(images.device, erasing)
    result: Tensor = erase(images.float().sub_(mean).div_(std))
    return result
