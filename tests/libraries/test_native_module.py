"""Our own Swin beside timm's, on the same weights."""

import math
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.native import native_swin
from planner.libraries.native.native_swin import Attention, PadOrder, SwinTransformer
from planner.libraries.native.spec import class_arguments
from planner.libraries.torchvision import declare_missing_operators
from planner.training.levers import checkpoint_model
from tests.covering import covering
from tests.steps import build_real
from tests.trainers.cases import tiny

TOLERANCE = 1e-5  # the law: equal in fp32, up to the order of sums


class Case(NamedTuple):
    """An image and a window; two blocks a stage, so that the second is shifted where it can be.
    timm shifts before it pads, and we so only where we are asked to."""

    image: int | tuple[int, int]
    window: int
    timm_pad_order: Literal["before-shift", "after-shift"] = "before-shift"


CASES = {
    "divides": Case(56, 7),
    "padded": Case(64, 7, "after-shift"),
    "non-square-padded": Case((72, 104), 5, "after-shift"),
    "one-window": Case(32, 8),
    "clamped": Case(48, 8, "after-shift"),
    "padded-unshifted": Case((28, 52), 14),
}
VERSIONS = [1, 2]
ATTENTIONS = ["eager", "sdpa"]


def build_swin(
    config: SwinConfig, attention: Attention = "sdpa", pad_order: PadOrder = "before-shift"
) -> SwinTransformer:
    own = native_swin.SwinConfig(**class_arguments(config))
    return native_swin.build_swin(own, attention, pad_order)


def small(version: int, image: int | tuple[int, int], window: int, **fields: object) -> SwinConfig:
    shape = {"image_size": image, "window_size": window, "num_heads": (2, 4), **fields}
    return tiny("native", version, **shape)


def randomised(model: SwinTransformer) -> SwinTransformer:
    """Every parameter away from its initial zeros and ones, so that each of them shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = math.log(10.0) if name.endswith("logit_scale") else float("norm" in name) / 2
            parameter.copy_(centre + 0.1 * torch.randn_like(parameter))
    return model.eval()


def timm_model(config: SwinConfig, weights: dict[str, Tensor]) -> nn.Module:
    declare_missing_operators()
    from timm.models import swin_transformer, swin_transformer_v2

    of = swin_transformer if config.version == 1 else swin_transformer_v2
    model = build_real(config.model_copy(update={"library": "timm"}), TrainSetting())
    model.load_state_dict(of.checkpoint_filter_fn(weights, model))
    return model.eval()


def images_for(config: SwinConfig) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, config.in_channels, *config.image_size)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "version", "attention"), covering(CASES, VERSIONS, ATTENTIONS, pairs=[(1, 2)])
)
def test_equals_timm(case: str, version: int, attention: Attention) -> None:
    """Logits and gradients, through timm's own reading of original checkpoints, so that the names
    are the original ones."""
    pretrained = {"pretrained_window_size": (4, 2)} if case == "one-window" else {}
    config = small(version, CASES[case].image, CASES[case].window, **pretrained)
    model = build_swin(config, attention, pad_order=CASES[case].timm_pad_order)
    ours = randomised(model)
    theirs = timm_model(config, ours.state_dict())
    images, labels = images_for(config), torch.arange(3)
    logits = ours(images), theirs(images)
    assert_equal(*logits)
    for found in logits:
        nn.functional.cross_entropy(found, labels).backward()
    assert_equal(*(model.patch_embed.proj.weight.grad for model in (ours, theirs)))


def test_refuses_images_of_another_size() -> None:
    with pytest.raises(ValueError, match="32x32 pixels, not 64x32"):
        build_swin(small(1, 32, 4))(torch.zeros(1, 3, 64, 32))


@pytest.mark.compiler
@pytest.mark.parametrize("version", [1, 2])
def test_compiles_without_graph_breaks(version: int) -> None:
    config = small(version, 64, 7)
    model = randomised(build_swin(config)).train()
    checkpoint_model(model, "blocks")
    images = images_for(config)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(images), model(images))
