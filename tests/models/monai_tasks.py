"""Models of monai, small and as people train them.

Legend: B batch, S side of a volume.
"""

from typing import Any

import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss
from monai.networks import nets
from torch import Tensor, nn
from torch.nn import functional as F


class Volumes:
    """A class of each place of volumes [B, 1, S, S, S], by Dice and cross-entropy."""

    side, classes = 32, 3

    def batch(self, size: int, device: torch.device) -> Any:
        shape = (size, 1, *(self.side,) * 3)
        volumes = torch.randn(shape, device=device)
        return volumes, torch.randint(self.classes, shape, device=device)

    def loss(self, module: Any, batch: Any) -> Tensor:
        volumes, places = batch
        return DiceCELoss(to_onehot_y=True, softmax=True)(module(volumes), places)


class UNet(Volumes):
    def module(self) -> Any:
        return nets.UNet(3, 1, self.classes, (16, 32, 64), (2, 2), num_res_units=2, norm="batch")


class AttentionUnet(Volumes):
    def module(self) -> Any:
        return nets.AttentionUnet(3, 1, self.classes, (16, 32, 64), (2, 2))


class SegResNet(Volumes):
    def module(self) -> Any:
        return nets.SegResNet(init_filters=8, out_channels=self.classes, dropout_prob=0.2)


class UNETR(Volumes):
    def module(self) -> Any:
        return nets.UNETR(
            1, self.classes, (self.side,) * 3, feature_size=8, hidden_size=96, mlp_dim=192,
            num_heads=4,
        )  # fmt: skip


class SwinUNETR(Volumes):
    side = 64

    def module(self) -> Any:
        return nets.SwinUNETR(1, self.classes, feature_size=12)


class DynUNet(Volumes):
    """nnU-Net, whose coarser levels are held to the same places."""

    def module(self) -> Any:
        return nets.DynUNet(
            3, 1, self.classes, (3,) * 4, (1, 2, 2, 2), (2, 2, 2), filters=(8, 16, 32, 64),
            deep_supervision=True, deep_supr_num=2,
        )  # fmt: skip

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        volumes, places = batch
        dice = DeepSupervisionLoss(DiceCELoss(to_onehot_y=True, softmax=True))
        return dice(list(module(volumes).unbind(1)), places)


class MedNeXt(Volumes):
    def module(self) -> Any:
        return nets.MedNeXt(
            init_filters=8, out_channels=self.classes, encoder_expansion_ratio=2,
            decoder_expansion_ratio=2, blocks_down=(1, 1, 1), blocks_bottleneck=1,
            blocks_up=(1, 1, 1), norm_type="group",
        )  # fmt: skip


class DenseNet(Volumes):
    """A class of each volume."""

    def module(self) -> Any:
        return nets.DenseNet121(3, 1, self.classes, init_features=16, growth_rate=8)

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        volumes, places = batch
        return F.cross_entropy(module(volumes), places[:, 0, 0, 0, 0])
