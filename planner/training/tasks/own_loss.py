"""The task of a transformers model, which computes its loss by itself: what it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.core.schema import NamedModel
from planner.libraries.transformers.module import form_of

MASKED_SHARE = 0.6  # of the patches: SimMIM's best (arXiv 2111.09886 §4.1.2)


class OwnLoss:
    """`module(**batch).loss`: random inputs of the model's sizes, and labels of its configuration.

    Sequences are full: there is no padding, and so no attention mask.
    """

    def __init__(self, module: nn.Module, model: NamedModel) -> None:
        form = form_of(type(module))
        assert form is not None, "looked up"
        self._module, self.model, self.form = module, model, form
        self.config: Any = module.config
        is_text = model.sequence_length is not None
        self.unit = "sequences" if is_text else "clips" if model.num_frames else "images"

    def module(self) -> nn.Module:
        return self._module

    def batch(self, size: int, device: torch.device) -> dict[str, Tensor]:
        """Token ids [B, L], images [B, C, H, W] or clips [B, T, C, H, W], and their labels."""
        if self.model.sequence_length is not None:
            return self._tokens(size, self.model.sequence_length, device)
        return self._images(size, device)

    def loss(self, module: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = module(**batch).loss
        return loss

    def _tokens(self, size: int, length: int, device: torch.device) -> dict[str, Tensor]:
        ids = torch.randint(self.config.vocab_size, (size, length), device=device)
        if self.form == "ForSequenceClassification":
            labels = torch.randint(self.config.num_labels, (size,), device=device)
        elif self.form == "ForTokenClassification":
            labels = torch.randint(self.config.num_labels, (size, length), device=device)
        else:
            labels = torch.randint(self.config.vocab_size, (size, length), device=device)
        return {"input_ids": ids, "labels": labels}

    def _images(self, size: int, device: torch.device) -> dict[str, Tensor]:
        assert self.model.image_size is not None
        assert self.model.in_channels is not None
        height, width = self.model.image_size
        frames = () if self.model.num_frames is None else (self.model.num_frames,)
        shape = (size, *frames, self.model.in_channels, height, width)
        images = {"pixel_values": torch.randn(shape, device=device)}
        if self.form == "ForMaskedImageModeling":
            patches = (height // self.config.patch_size) * (width // self.config.patch_size)
            masked = torch.rand(size, patches, device=device) < MASKED_SHARE
            return {**images, "bool_masked_pos": masked}
        per_item = (height, width) if self.form == "ForSemanticSegmentation" else ()
        labels = torch.randint(self.config.num_labels, (size, *per_item), device=device)
        return {**images, "labels": labels}
