"""Tasks of one's own, small and as people train them: what no library has by a name. The last two
train models of other packages, which are imported where they are built.

Legend: B batch, C channels, N tokens, D their width, S side of an image or a volume.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, WIDTH, HEADS, DEPTH = 10, 192, 6, 4


class Block(nn.Module):
    """A transformer's block over [B, N, D]; scale, shift and gates come with a condition [B, D]."""

    def __init__(self, conditioned: bool = False, causal: bool = False, key_heads: int = HEADS):
        super().__init__()
        self.causal, self.key_heads = causal, key_heads
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        head = WIDTH // HEADS
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * key_heads * head)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.modulate = nn.Linear(WIDTH, 6 * WIDTH) if conditioned else None

    def attend(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.key_value(x).unflatten(-1, (2 * self.key_heads, -1)).chunk(2, dim=-2)
        found = F.scaled_dot_product_attention(
            query, key.transpose(1, 2), value.transpose(1, 2),
            is_causal=self.causal, enable_gqa=self.key_heads != HEADS,
        )  # fmt: skip
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        if self.modulate is None:
            x = x + self.attend(self.norms[0](x))
            return x + self.mlp(self.norms[1](x))
        assert condition is not None
        parts = self.modulate(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        x = x + parts[2] * self.attend(self.norms[0](x) * (1 + parts[0]) + parts[1])
        return x + parts[5] * self.mlp(self.norms[1](x) * (1 + parts[3]) + parts[4])


class Images:
    """Images and the class of each."""

    side = 64

    def batch(self, size: int, device: torch.device) -> Any:
        images = torch.randn(size, 3, self.side, self.side, device=device)
        return images, torch.randint(CLASSES, (size,), device=device)

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        images, classes = batch
        return F.cross_entropy(module(images), classes)


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions of a U-Net, each normalized."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Segmenting(nn.Module):
    """A U-Net of three levels: [B, 3, S, S] to a class for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in pairwise((3, 16, 32, 64)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(c, c // 2, 2, stride=2) for c in (64, 32))
        self.merge = nn.ModuleList(double(c, c // 2) for c in (64, 32))
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        for up, merge, skip in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = merge(torch.cat([up(x), skip], dim=1))
        return self.head(x)


class UNet(Images):
    """Cross-entropy and Dice over a class of each pixel."""

    def module(self) -> nn.Module:
        return Segmenting()

    def batch(self, size: int, device: torch.device) -> Any:
        places = torch.randint(CLASSES, (size, self.side, self.side), device=device)
        return torch.randn(size, 3, self.side, self.side, device=device), places

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        images, classes = batch
        logits = module(images)
        shares, wanted = logits.softmax(1), F.one_hot(classes, CLASSES).movedim(-1, 1)
        dims = tuple(range(2, logits.dim()))
        both = (shares * wanted).sum(dims)
        dice = 1 - (2 * both + 1) / (shares.sum(dims) + wanted.sum(dims) + 1)
        return F.cross_entropy(logits, classes) + dice.mean()


class Denoiser(nn.Module):
    """A DiT: noised latents [B, 4, 16, 16], how noised each is [B], classes [B] to the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 2, stride=2)
        self.places = nn.Parameter(torch.zeros(1, 64, WIDTH))
        self.times = nn.Sequential(nn.Linear(64, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(CLASSES + 1, WIDTH)
        self.layers = nn.ModuleList(Block(conditioned=True) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, latents: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        waves = torch.exp(-torch.arange(32, device=times.device) / 4) * times[:, None]
        condition = self.times(torch.cat([waves.sin(), waves.cos()], 1)) + self.classes(classes)
        x = self.patches(latents).flatten(2).mT + self.places
        for layer in self.layers:
            x = layer(x, condition)
        return F.pixel_shuffle(self.head(x).mT.unflatten(2, (8, 8)), 2)


class Diffusion:
    """Predicts the noise that was added to latents."""

    def module(self) -> nn.Module:
        return Denoiser()

    def batch(self, size: int, device: torch.device) -> Any:
        latents = torch.randn(size, 4, 16, 16, device=device)
        return latents, torch.randint(CLASSES, (size,), device=device)

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        latents, classes = batch
        noise, times = torch.randn_like(latents), torch.rand(len(latents), device=latents.device)
        share = times[:, None, None, None]
        return F.mse_loss(module(latents * (1 - share) + noise * share, times, classes), noise)

    def blocks(self, module: Any) -> list[nn.Module]:
        return list(module.layers)


def generator() -> nn.Module:
    """DCGAN's: noise [B, 64, 1, 1] to images [B, 3, 64, 64]."""
    widths, layers = (64, 128, 64, 32, 16), list[nn.Module]()
    for index, (a, b) in enumerate(pairwise(widths)):
        stride, padding = (2, 1) if index else (1, 0)
        layers += [nn.ConvTranspose2d(a, b, 4, stride, padding, bias=False), nn.BatchNorm2d(b)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh())


def critic() -> nn.Module:
    """[B, 3, 64, 64] to how real each image is [B, 1]."""
    layers = list[nn.Module]()
    for a, b in pairwise((3, 16, 32, 64, 128)):
        made = nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 4, 2, 1))
        layers += [made, nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 1))


class Pair(nn.Module):
    """One network that is trained and one that is frozen."""

    def __init__(self, trained: nn.Module, frozen: nn.Module) -> None:
        super().__init__()
        self.trained, self.frozen = trained, frozen.requires_grad_(False)


class Generator(Images):
    """A GAN's generator, through a frozen critic."""

    def module(self) -> nn.Module:
        return Pair(generator(), critic())

    def loss(self, module: Any, batch: Any) -> Tensor:
        images, _ = batch
        noise = torch.randn(len(images), 64, 1, 1, device=images.device)
        return F.softplus(-module.frozen(module.trained(noise))).mean()


class Critic(Images):
    """The critic of the same, on real images and on those of a frozen generator."""

    def module(self) -> nn.Module:
        return Pair(critic(), generator())

    def loss(self, module: Any, batch: Any) -> Tensor:
        images, _ = batch
        with torch.no_grad():
            made = module.frozen(torch.randn(len(images), 64, 1, 1, device=images.device))
        real, false = module.trained(images), module.trained(made)
        return F.softplus(-real).mean() + F.softplus(false).mean()


class Vision(nn.Module):
    """A small vision transformer: images [B, 3, 64, 64] to [B, outputs]."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Words(nn.Module):
    """Token ids [B, N] through blocks to [B, N, D]."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, WIDTH)
        self.layers = nn.ModuleList(Block(**arguments) for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.words = Vision(128), Words()
        self.project = nn.Linear(WIDTH, 128, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))


class TwoTowers(Images):
    """CLIP's loss: all images of a batch with all texts."""

    def module(self) -> nn.Module:
        return Towers()

    def batch(self, size: int, device: torch.device) -> Any:
        images, _ = super().batch(size, device)
        return images, torch.randint(1000, (size, 32), device=device)

    def loss(self, module: Any, batch: Any) -> Tensor:
        images, tokens = batch
        left = F.normalize(module.images(images), dim=-1)
        right = F.normalize(module.project(module.words(tokens).mean(1)), dim=-1)
        logits = module.scale.exp() * left @ right.T
        target = torch.arange(len(images), device=images.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class Teacher(Images):
    """DINO's: a student and a teacher that follows it, each on two views."""

    def module(self) -> nn.Module:
        return Pair(Vision(256), Vision(256))

    def loss(self, module: Any, batch: Any) -> Tensor:
        images, _ = batch
        with torch.no_grad():
            for ours, theirs in zip(
                module.frozen.parameters(), module.trained.parameters(), strict=True
            ):
                ours.lerp_(theirs, 0.01)
            wanted = (module.frozen(torch.cat([images, images.flip(3)])) / 0.04).softmax(-1)
        found = (module.trained(torch.cat([images, images.flip(2)])) / 0.1).log_softmax(-1)
        return -(wanted.roll(len(images), 0) * found).sum(-1).mean()


class Frozen(Images):
    """Only the last blocks and the head of a vision transformer."""

    def module(self) -> nn.Module:
        module = Vision()
        for part in (module.patches, *module.layers[: DEPTH // 2]):
            part.requires_grad_(False)
        module.first.requires_grad_(False)
        return module


class Language(Words):
    """The words' own weights give the logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(super().forward(tokens), self.words.weight)


class Decoder:
    """A causal language model with fewer heads of keys than of queries."""

    def module(self) -> nn.Module:
        return Language(causal=True, key_heads=2)

    def batch(self, size: int, device: torch.device) -> Tensor:
        return torch.randint(1000, (size, 129), device=device)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def blocks(self, module: Any) -> list[nn.Module]:
        return list(module.layers)


class Cloud(nn.Module):
    """PointNet: points [B, 3, N] to logits."""

    def __init__(self) -> None:
        super().__init__()
        layers = list[nn.Module]()
        for a, b in pairwise((3, 64, 128, 512)):
            layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
        self.shared = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, CLASSES)
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.shared(points).amax(2))


class Points(Images):
    def module(self) -> nn.Module:
        return Cloud()

    def batch(self, size: int, device: torch.device) -> Any:
        classes = torch.randint(CLASSES, (size,), device=device)
        return torch.randn(size, 3, 1024, device=device), classes


class TextToImage:
    """Stable Diffusion's U-Net of diffusers, which attends to tokens [B, 16, 64] of a text, to the
    noise that a scheduler added to latents."""

    def __init__(self) -> None:
        import diffusers

        self.scheduler = diffusers.DDPMScheduler()

    def module(self) -> nn.Module:
        import diffusers

        return diffusers.UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1,
            norm_num_groups=8, attention_head_dim=4, cross_attention_dim=64,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip

    def batch(self, size: int, device: torch.device) -> Any:
        return {
            "latents": torch.randn(size, 4, 16, 16, device=device),
            "classes": torch.randint(10, (size,), device=device),
            "text": torch.randn(size, 16, 64, device=device),
            "pooled": torch.randn(size, 64, device=device),
        }

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        times = torch.randint(1000, (len(latents),), device=latents.device)
        noised = self.scheduler.add_noise(latents, noise, times)
        return F.mse_loss(module(noised, times, batch["text"]).sample.float(), noise)


class UNETR:
    """monai's, to a class of each place of volumes [B, 1, S, S, S], by Dice and cross-entropy."""

    side, classes = 32, 3

    def module(self) -> nn.Module:
        from monai.networks import nets

        return nets.UNETR(
            1, self.classes, (self.side,) * 3, feature_size=8, hidden_size=96, mlp_dim=192,
            num_heads=4,
        )  # fmt: skip

    def batch(self, size: int, device: torch.device) -> Any:
        shape = (size, 1, *(self.side,) * 3)
        volumes = torch.randn(shape, device=device)
        return volumes, torch.randint(self.classes, shape, device=device)

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        from monai.losses import DiceCELoss

        volumes, places = batch
        return DiceCELoss(to_onehot_y=True, softmax=True)(module(volumes), places)
