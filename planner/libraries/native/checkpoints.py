"""The original Swin checkpoints, loaded into native's Swin. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from planner.core.errors import PlannerError


def load_original_checkpoint(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load weights in the naming of the original Swin checkpoints (github.com/microsoft).

    Takes the file's dictionary, with or without its outer "model" key. Buffers that the original
    stores and this module makes (indices, coordinates, masks) are left out. Nothing is
    interpolated: a missing, unknown or differently shaped entry raises PlannerError, naming them.
    """
    weights = state_dict.get("model", state_dict)
    weights = {name: w for name, w in weights.items() if name.split(".")[-1] not in MADE_BUFFERS}
    own = module.state_dict()
    faults = [f"missing: {name}" for name in own if name not in weights]
    faults += [f"unknown: {name}" for name in weights if name not in own]
    faults += [
        f"{name}: {tuple(weights[name].shape)} in the checkpoint, {tuple(own[name].shape)} here"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if faults:
        shown = faults[:10] + ([f"and {len(faults) - 10} more"] if len(faults) > 10 else [])
        raise PlannerError(
            "the checkpoint does not fit this model:\n" + "\n".join(f"  {f}" for f in shown),
            "Choose the architecture, image size, window and classes the checkpoint was made with; "
            "nothing is interpolated here.",
        )
    module.load_state_dict(weights)


MADE_BUFFERS = frozenset(
    {"relative_position_index", "relative_coords_table", "attn_mask", "k_bias"}
)
