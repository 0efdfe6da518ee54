"""Which weights of a model are trained: frozen first stages, and low-rank adapters (LoRA).

Given by the names of parameters and modules in the real module, which are the same on shapes.
Imports no torch: `adapters.py` does it to a real module, `adapters_on_shapes.py` on shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from planner.schema import TrainSetting

# The linear layers in and out of attention, as timm, native, torchvision and the authors call them,
# and as transformers does in versions 1 and 2.
_ATTENTION_LINEAR = re.compile(
    r"(^|\.)(attn|attention)\.(qkv|proj|[qkvo]_proj|self\.(query|key|value)|output\.dense)$"
)
# The classifier is trained beside adapters: its classes are those of the new task.
HEADS = ("head", "classifier")
LORA_SCALE = 1.0  # alpha / rank with alpha = rank; its value moves no byte

FrozenNames = Callable[[int], tuple[str, ...]]


def stem_and_layers(num_stages: int) -> tuple[str, ...]:
    """The names that freezing `num_stages` freezes in most libraries: the embedding, `layers.N`."""
    if num_stages == 0:
        return ()
    stem = ("patch_embed", "absolute_pos_embed")
    return (*stem, *(f"layers.{stage}" for stage in range(num_stages)))


@dataclass(frozen=True)
class Trainable:
    """What a setting trains; `frozen` are the names of modules and parameters it freezes."""

    frozen: tuple[str, ...]
    lora_rank: int

    @classmethod
    def of(cls, setting: TrainSetting, frozen_names: FrozenNames) -> Trainable:
        return cls(frozen_names(setting.frozen_stages), setting.lora_rank)

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter called `name` (before adapters are in place) is not trained."""
        if self.lora_rank and not _is_within(name, HEADS):
            return True
        return _is_within(name, self.frozen)

    def is_adapted(self, name: str) -> bool:
        """Whether the linear layer called `name` gets an adapter: not in a frozen stage."""
        if not self.lora_rank or _is_within(name, self.frozen):
            return False
        return bool(_ATTENTION_LINEAR.search(name))


def _is_within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
