"""Any module's blocks are found and checkpointed: equal gradients, fewer saved bytes."""

import copy
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    SelectiveCheckpointContext,
)

from planner.core.errors import UnsupportedError  # noqa: E402
from planner.core.schema import FactoryModel, TrainSetting  # noqa: E402
from planner.libraries.torchvision import declare_missing_operators  # noqa: E402
from planner.training.assembly import check_blocks  # noqa: E402
from planner.training.levers import (  # noqa: E402
    KeepPolicy,
    checkpoint_model,
    plain_class,
    recompute,
    repeated_blocks,
)

IMAGES = FactoryModel(factory="tests:none", image_size=(32, 32), num_classes=10)
FP32 = TrainSetting(batch_size=8, precision="fp32", optimizer="sgd")


def resnet() -> nn.Module:
    """Of torchvision: four stages of two blocks, with what writes in place."""
    return torchvision.models.resnet18(num_classes=10)


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + F.dropout(F.softmax(scale * q @ k.transpose(1, 2), -1) @ v, 0.1)


class Block(nn.Module):
    """Called with a keyword; its dropout must draw the same numbers again."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.attention = Attention(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = self.attention(x, scale=scale)
        return x + self.mlp(x)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 24, 4, stride=4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x.mean(1))


def wrapped_kinds(module: nn.Module) -> list[str]:
    """Of the modules that recompute themselves, their classes as they were."""
    return [plain_class(m).__name__ for m in module.modules() if plain_class(m) is not type(m)]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "ResNet": (resnet, ["BasicBlock"] * 8),
    "ViT": (ViT, ["Block"] * 3),
}


def gradients(module: nn.Module, images: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    module(images).square().sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def saved_bytes(module: nn.Module, images: Tensor) -> int:
    """What forward holds for backward, each storage once."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(images)
    return sum(held.values())


@pytest.mark.parametrize("kind", ["blocks", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_and_fewer_bytes_are_saved(name: str, kind: str) -> None:
    """Batch normalisation, convolutions and dropout among them."""
    torch.manual_seed(0)
    plain = MODELS[name][0]()
    wrapped = copy.deepcopy(plain)
    checkpoint_model(wrapped, kind)
    assert wrapped_kinds(wrapped) == MODELS[name][1]
    images = torch.randn(4, 3, 32, 32)
    first, second = gradients(plain, images), gradients(wrapped, images)
    assert len(first) == len(second) == len(list(plain.parameters()))
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    assert saved_bytes(wrapped, images) < saved_bytes(plain, images)


def test_a_copy_checkpoints_its_own_blocks() -> None:
    """A copy for an average of weights must not call the original's blocks."""
    wrapped = ViT()
    checkpoint_model(wrapped, "blocks")
    copied = copy.deepcopy(wrapped)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.zero_()
    gradients(copied, torch.randn(2, 3, 32, 32))
    assert all(p.grad is None for p in wrapped.parameters())


@pytest.mark.parametrize(
    ("checkpointing", "expected"),
    [("blocks:1", [True, False, False]), ("blocks:every-2", [True, False, True])],
)
def test_blocks_are_chosen_in_the_order_in_which_the_module_holds_them(
    checkpointing: str, expected: list[bool]
) -> None:
    """Of those that are found, or of those that its task names; a library's switch stays off."""
    for is_named in (False, True):
        module = ViT()
        checkpoint_model(module, checkpointing, list(module.blocks) if is_named else None)
        assert [type(b) is not Block for b in module.blocks] == expected
    switched = Switched()
    checkpoint_model(switched, checkpointing)
    assert not switched.is_on


def test_more_blocks_than_there_are_is_refused_with_their_number() -> None:
    module, setting = ViT(), TrainSetting(checkpointing="blocks:4")
    for named in (None, lambda: list(module.blocks)):
        with pytest.raises(UnsupportedError, match="has 3 blocks: checkpointing is") as found:
            check_blocks(module, named, IMAGES, setting)
        assert "blocks:3 or fewer" in str(found.value.way_out)


class InPlace(nn.Module):
    """Writes into the product of two matrices, which is behind an unsafe view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.layer.weight
        scores += 1.0
        return scores.tanh()


def test_what_is_kept_must_not_change() -> None:
    """Torch itself would go on, with other gradients."""
    module, x = InPlace(), torch.randn(2, 3, 24, requires_grad=True)
    recompute(module, selective=True)
    with pytest.raises(RuntimeError, match=r"aten\.add_\.Tensor writes into one"):
        module(x)


def test_attention_that_drops_out_in_its_kernel_is_computed_again() -> None:
    """Passing over it would change what is drawn after it."""
    attend = torch.ops.aten._scaled_dot_product_efficient_attention.default
    for rate, policy in (
        (0.0, CheckpointPolicy.MUST_SAVE),
        (0.1, CheckpointPolicy.PREFER_RECOMPUTE),
    ):
        context = SelectiveCheckpointContext(is_recompute=False)
        assert KeepPolicy()(context, attend, None, None, None, None, True, rate) is policy


def test_what_is_no_block() -> None:
    """torch's layers, modules that stand alone, and those without layers of their own."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert repeated_blocks(nn.Sequential(Scale(), Scale())) == []
    assert repeated_blocks(nn.Sequential(Block(), nn.Linear(24, 24))) == []
    with pytest.raises(ValueError, match="no repeated blocks"):
        checkpoint_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "blocks")


class Switched(nn.Module):
    """A library's module with a switch of its own, within a module of the user's."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.refuses, self.is_on = refuses, False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        assert not self.refuses, "gradient checkpointing not supported"
        self.is_on = enable


def test_a_librarys_own_switch_comes_first() -> None:
    module = nn.Sequential(Switched(), nn.ModuleList([Attention(24), Attention(24)]))
    checkpoint_model(module, "blocks")
    assert wrapped_kinds(module) == ["Attention"] * 2
    assert module[0].is_on
    assert type(module[0].blocks[0]) is Block


def test_a_switch_that_refuses_leaves_the_blocks_to_us() -> None:
    module = Switched(refuses=True)
    checkpoint_model(module, "blocks")
    assert wrapped_kinds(module) == ["Block"] * 2


def test_transformers_layers_keep_no_cache() -> None:
    """GPT-2 keeps keys and values by default; a forward run again would append to them again."""
    declare_missing_operators()
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).train()
    checkpoint_model(model, "blocks")
    assert wrapped_kinds(model) == []
    assert model.config.use_cache is False
    ids = torch.randint(32, (2, 8))
    plain = transformers.GPT2LMHeadModel(config).train()
    plain.load_state_dict(model.state_dict())
    for m in (model, plain):
        torch.manual_seed(0)
        m(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
