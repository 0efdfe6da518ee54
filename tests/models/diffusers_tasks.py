"""Models of diffusers, small and as people train them.

Legend: B batch, N tokens, S side of an image or a latent.
"""

from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = 64  # width of a text encoder's tokens


class Noise:
    """The noise that a scheduler added to images or latents [B, channels, S, S], by its square."""

    channels, side = 4, 16

    def __init__(self) -> None:
        self.scheduler = diffusers.DDPMScheduler()

    def batch(self, size: int, device: torch.device) -> Any:
        return {
            "latents": torch.randn(size, self.channels, self.side, self.side, device=device),
            "classes": torch.randint(10, (size,), device=device),
            "text": torch.randn(size, 16, TEXT, device=device),
            "pooled": torch.randn(size, TEXT, device=device),
        }

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        return module(noised, times).sample

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        times = torch.randint(1000, (len(latents),), device=latents.device)
        noised = self.scheduler.add_noise(latents, noise, times)
        return F.mse_loss(self.predict(module, noised, times, batch).float(), noise)


class Pixels(Noise):
    """DDPM's U-Net, without a condition."""

    channels, side = 3, 32

    def module(self) -> Any:
        return diffusers.UNet2DModel(
            sample_size=self.side, block_out_channels=(32, 64), layers_per_block=1,
            norm_num_groups=8, attention_head_dim=16,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip


class TextToImage(Noise):
    """Stable Diffusion's U-Net, which attends to tokens of a text."""

    def module(self) -> Any:
        return diffusers.UNet2DConditionModel(
            sample_size=self.side, block_out_channels=(32, 64), layers_per_block=1,
            norm_num_groups=8, attention_head_dim=4, cross_attention_dim=TEXT,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        return module(noised, times, batch["text"]).sample


class DiT(Noise):
    def module(self) -> Any:
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4,
            num_layers=3, sample_size=self.side, norm_num_groups=4, num_embeds_ada_norm=10,
        )  # fmt: skip

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        return module(noised, times, batch["classes"]).sample


class PixArt(Noise):
    def module(self) -> Any:
        return diffusers.PixArtTransformer2DModel(
            num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4,
            num_layers=3, sample_size=self.side, norm_num_groups=4, cross_attention_dim=96,
            caption_channels=TEXT, use_additional_conditions=False,
        )  # fmt: skip

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        conditions = {"resolution": None, "aspect_ratio": None}
        return module(noised, batch["text"], times, added_cond_kwargs=conditions).sample


class Controlled(Noise):
    """A ControlNet beside the U-Net of TextToImage, which is frozen."""

    def module(self) -> Any:
        frozen = TextToImage().module().requires_grad_(False)
        control = diffusers.ControlNetModel.from_unet(
            frozen, conditioning_embedding_out_channels=(8, 16)
        )
        return nn.ModuleDict({"frozen": frozen, "control": control})

    def batch(self, size: int, device: torch.device) -> Any:
        side = 2 * self.side
        images = torch.randn(size, 3, side, side, device=device)
        return {**super().batch(size, device), "images": images}

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        text = batch["text"]
        found = module["control"](noised, times, text, batch["images"])
        return module["frozen"](
            noised, times, text,
            down_block_additional_residuals=found.down_block_res_samples,
            mid_block_additional_residual=found.mid_block_res_sample,
        ).sample  # fmt: skip


class Flow(Noise):
    """The velocity from latents to noise: rectified flow."""

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        latents = batch["latents"]
        noise, shares = torch.randn_like(latents), torch.rand(len(latents), device=latents.device)
        noised = torch.lerp(latents, noise, shares[:, None, None, None])
        return F.mse_loss(self.predict(module, noised, shares, batch).float(), noise - latents)


class SD3(Flow):
    def module(self) -> Any:
        return diffusers.SD3Transformer2DModel(
            sample_size=self.side, in_channels=4, out_channels=4, num_layers=3,
            attention_head_dim=24, num_attention_heads=4, joint_attention_dim=TEXT,
            caption_projection_dim=96, pooled_projection_dim=TEXT, pos_embed_max_size=16,
        )  # fmt: skip

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        return module(noised, batch["text"], batch["pooled"], times * 1000).sample


class Flux(Flow):
    """Latents as tokens [B, N, 16] of 2 x 2 places each, with where each is."""

    def module(self) -> Any:
        return diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=24,
            num_attention_heads=4, joint_attention_dim=TEXT, pooled_projection_dim=TEXT,
            axes_dims_rope=(8, 8, 8),
        )  # fmt: skip

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        side = self.side // 2
        places = torch.zeros(side, side, 3, device=noised.device)
        places[..., 1] += torch.arange(side, device=noised.device)[:, None]
        places[..., 2] += torch.arange(side, device=noised.device)
        text = batch["text"]
        found = module(
            F.pixel_unshuffle(noised, 2).flatten(2).mT, text, batch["pooled"], times,
            img_ids=places.flatten(0, 1), txt_ids=places.new_zeros(text.shape[1], 3),
        ).sample  # fmt: skip
        return F.pixel_shuffle(found.mT.unflatten(2, (side, side)), 2)


class Sana(Flow):
    """Linear attention, and convolutions between its layers."""

    def module(self) -> Any:
        return diffusers.SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=24,
            num_layers=3, num_cross_attention_heads=4, cross_attention_head_dim=24,
            cross_attention_dim=96, caption_channels=TEXT, sample_size=self.side,
        )  # fmt: skip

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        return module(noised, batch["text"], times * 1000).sample


class Wan(Flow):
    """Video: latents [B, 4, 3, S, S]."""

    def module(self) -> Any:
        return diffusers.WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4,
            text_dim=TEXT, freq_dim=64, ffn_dim=192, num_layers=3, rope_max_seq_len=32,
        )  # fmt: skip

    def predict(self, module: Any, noised: Tensor, times: Tensor, batch: Any) -> Tensor:
        video = noised.unsqueeze(2).repeat(1, 1, 3, 1, 1)
        return module(video, times * 1000, batch["text"]).sample.mean(2)


class Latents(Noise):
    """A variational autoencoder's images again, and how far its latents are from a Gaussian."""

    channels, side = 3, 32

    def module(self) -> Any:
        return diffusers.AutoencoderKL(
            block_out_channels=(32, 64), norm_num_groups=8, sample_size=self.side,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip

    def loss(self, module: Any, batch: Any) -> Tensor:
        images = batch["latents"]
        found = module.encode(images).latent_dist
        again = module.decode(found.sample()).sample
        return F.mse_loss(again, images) + 1e-6 * found.kl().mean()
