"""Tasks of vision models that do not compute their loss: images, clips, dense targets, boxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.core.errors import ContractError
from planner.core.schema import Model, NamedModel, TrainSetting
from planner.core.schema.setting import LABEL_SMOOTHING
from planner.training.tasks.contract import WRITE_A_TASK, describe, in_memory_format

# Objects of one image: COCO's have 7.3 on average (arXiv 1405.0312 §5: 2.5 million in 328,000).
NUM_OBJECTS = 8
AUXILIARY_WEIGHT = 0.5  # of torchvision's reference training (references/segmentation/train.py)


class Classification:
    """Images [B, C, H, W], or clips [B, C, T, H, W], to logits [B, classes]; or to an output with
    `.logits`.

    Its batches are as `setting` trains them, and may be made of fake tensors. `model` gives the
    sizes, and its title stands in the error for a step of another kind.
    """

    def __init__(self, module: nn.Module, model: Model, setting: TrainSetting) -> None:
        assert model.image_size is not None
        assert model.in_channels is not None
        assert model.num_classes is not None
        self._module, self.title, self.setting = module, model.title, setting
        frames = model.num_frames if isinstance(model, NamedModel) else None
        self.unit = "images" if frames is None else "clips"
        self.shape = (model.in_channels, *([] if frames is None else [frames]), *model.image_size)
        self.num_classes = model.num_classes

    def module(self) -> nn.Module:
        return self._module

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random images and targets ([B] int64, or soft [B, classes] fp32)."""
        images = self._convert(torch.randn(size, *self.shape, device=device))
        if self.setting.loss == "soft-target":
            targets = torch.rand(size, self.num_classes, device=device)
            return images, targets / targets.sum(dim=1, keepdim=True)
        return images, torch.randint(self.num_classes, (size,), device=device)

    def loaded(self, images: Tensor, labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """A batch as `batch` makes it, from images and labels that a loader has on the host. Soft
        targets are one-hot labels: the mixing of images by a recipe is not counted."""
        images = self._convert(images.to(device, non_blocking=True))
        labels = labels.to(device, non_blocking=True)
        if self.setting.loss == "soft-target" and labels.dim() == 1:
            return images, F.one_hot(labels, self.num_classes).float()
        return images, labels

    def _convert(self, images: Tensor) -> Tensor:
        if self.setting.precision == "pure-bf16":
            images = images.to(torch.bfloat16)
        return in_memory_format(images, self.setting)

    def loss(self, module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        smoothing = LABEL_SMOOTHING if self.setting.loss == "label-smoothing" else 0.0
        return F.cross_entropy(self.logits(module, batch[0]), batch[1], label_smoothing=smoothing)

    def logits(self, module: Any, images: Tensor) -> Tensor:
        """The module's logits of `images`. Raises ContractError if they are not [B, classes]."""
        output = module(images)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise self._fault(images, output)
        if logits.dim() != 2 or logits.shape[0] != images.shape[0]:
            raise self._fault(images, logits)
        if logits.shape[1] < self.num_classes:
            raise ContractError(
                f"{self.title} returned logits of {logits.shape[1]} classes, and num_classes is "
                f"{self.num_classes}.",
                f"Add --num-classes {logits.shape[1]}.",
            )
        return logits

    def _fault(self, images: Tensor, output: object) -> ContractError:
        return ContractError(
            f"{self.title} made {describe(output)} of images {list(images.shape)}: its step is not "
            f"images -> logits [{images.shape[0]}, classes].",
            WRITE_A_TASK,
        )


class Segmentation:
    """Images to `{"out": [B, classes, H, W]}`, as torchvision's models return it, with a class for
    each pixel as target. An auxiliary output `aux` counts half."""

    unit = "images"

    def __init__(self, module: nn.Module, model: NamedModel) -> None:
        assert model.image_size is not None
        assert model.num_classes is not None
        self._module, self.num_classes, self.size = module, model.num_classes, model.image_size

    def module(self) -> nn.Module:
        return self._module

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random images and a random class of each pixel, [B, H, W]."""
        images = torch.randn(size, 3, *self.size, device=device)
        return images, torch.randint(self.num_classes, (size, *self.size), device=device)

    def loss(self, module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, classes = batch
        output = module(images)
        loss = F.cross_entropy(output["out"], classes)
        if "aux" in output:
            loss = loss + AUXILIARY_WEIGHT * F.cross_entropy(output["aux"], classes)
        return loss


Images = tuple[list[Tensor], list[dict[str, Tensor]]]


class Detection:
    """Lists of images and of their objects to a dict of losses, as in torchvision's detectors."""

    unit = "images"

    def __init__(self, module: nn.Module, model: NamedModel) -> None:
        assert model.image_size is not None
        assert model.num_classes is not None
        self._module, self.num_classes, self.size = module, model.num_classes, model.image_size
        self.has_masks = model.name.startswith("maskrcnn")

    def module(self) -> nn.Module:
        return self._module

    def batch(self, size: int, device: torch.device) -> Images:
        """Random images [3, H, W], each with `NUM_OBJECTS` boxes and labels, and with masks if the
        model learns them."""
        images = [torch.rand(3, *self.size, device=device) for _ in range(size)]
        return images, [self._objects(device) for _ in range(size)]

    def loss(self, module: Any, batch: Images) -> Tensor:
        losses: dict[str, Tensor] = module(*batch)
        return torch.stack(list(losses.values())).sum()

    def _objects(self, device: torch.device) -> dict[str, Tensor]:
        height, width = self.size
        limits = torch.tensor([width, height] * 2, device=device) / 2
        corners = torch.rand(NUM_OBJECTS, 4, device=device)
        # Upper left corners in the first half, lower right ones in the second: no box is empty.
        offset = torch.tensor([0.0, 0.0, 1.0, 1.0], device=device)
        objects = {
            "boxes": (corners + offset) * limits,
            "labels": torch.randint(1, self.num_classes, (NUM_OBJECTS,), device=device),
        }
        if self.has_masks:
            objects["masks"] = torch.ones(NUM_OBJECTS, height, width, device=device).to(torch.uint8)
        return objects
