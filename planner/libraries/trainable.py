"""Which weights of a model are trained: frozen first stages, and low-rank adapters (LoRA).

Given as patterns of the names in the real module, which are the same on shapes: `levers.py` does
it to a real module, `adapters_on_shapes.py` on shapes. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from planner.core.schema import TrainSetting

# The linear layers in and out of attention, and those of the MLP, as timm, native, torchvision and
# the authors call them, and as transformers does in versions 1 and 2.
_ATTENTION = r"(attn|attention)\.(qkv|proj|[qkvo]_proj|self\.(query|key|value)|output\.dense)"
_MLP = r"mlp\.fc[12]|blocks\.[0-9]+\.(intermediate|output)\.dense"
# The classifier is trained beside adapters: its classes are those of the new task.
HEADS = ("head", "classifier")

FrozenNames = Callable[[int], tuple[str, ...]]


def stem_and_layers(num_stages: int) -> tuple[str, ...]:
    """The names that freezing `num_stages` freezes in most libraries: the embedding, `layers.N`."""
    if num_stages == 0:
        return ()
    stem = ("patch_embed", "absolute_pos_embed")
    return (*stem, *(f"layers.{stage}" for stage in range(num_stages)))


@dataclass(frozen=True)
class Trainable:
    """What a setting trains, in patterns.

    `frozen` is a pattern that matches the beginning of the names of the parameters that are not
    trained, before adapters are in place. `adapted` matches the whole names of the linear layers
    that get an adapter, as peft's `target_modules` does where it is a string; "" matches none.
    """

    frozen: str
    adapted: str
    lora_rank: int

    @classmethod
    def of(cls, setting: TrainSetting, frozen_names: FrozenNames) -> Trainable:
        stages = _beginning(frozen_names(setting.frozen_stages))
        if not setting.lora_rank:
            return cls(stages, "", 0)
        kinds = _ATTENTION if setting.lora_targets == "attention" else f"{_ATTENTION}|{_MLP}"
        elsewhere = f"(?!{stages})" if setting.frozen_stages else ""
        adapted = rf"{elsewhere}(.*\.)?({kinds})"
        return cls(f"(?!{_beginning(HEADS)})", adapted, setting.lora_rank)

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter called `name` (before adapters are in place) is not trained."""
        return re.match(self.frozen, name) is not None

    def is_adapted(self, name: str) -> bool:
        """Whether the linear layer called `name` gets an adapter: not in a frozen stage."""
        return re.fullmatch(self.adapted, name) is not None


def _beginning(modules: tuple[str, ...]) -> str:
    r"""The pattern of all names in `modules`: "(layers\.0|head)(\.|$)"."""
    return rf"({'|'.join(re.escape(module) for module in modules)})(\.|$)"
