"""The authors' own Swin, from a checkout of github.com/microsoft/Swin-Transformer.

There is no package of it: set SWIN_TRANSFORMER_CHECKOUT to the folder that `git clone` made. Needs
torch and timm (which the authors' code imports).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

from torch import nn

from planner.core.errors import PlannerError
from planner.core.schema import SwinConfig
from planner.core.schema.setting import Attention
from planner.libraries.building import declare_missing_operators
from planner.libraries.microsoft.spec import CHECKOUT_VARIABLE, class_arguments, named_checkout

FILES = {1: "models/swin_transformer.py", 2: "models/swin_transformer_v2.py"}
CLASSES = {1: "SwinTransformer", 2: "SwinTransformerV2"}


def build(
    config: SwinConfig, attention: Attention, checkout: str | Path | None = None
) -> nn.Module:
    """The authors' classifier; `checkout` is their repository's folder, or the environment says.

    Checkpointing blocks is their `use_checkpoint` (PyTorch's reentrant kind). Raises PlannerError
    where there is no checkout.
    """
    folder = _find_checkout(checkout)
    source = _load(folder / FILES[config.version])
    built: nn.Module = getattr(source, CLASSES[config.version])(**class_arguments(config))
    return built


def _find_checkout(given: str | Path | None) -> Path:
    folder = Path(given) if given else named_checkout()
    if folder is None:
        raise PlannerError(
            "microsoft/Swin-Transformer is not a package, so its real module needs a checkout.",
            "git clone https://github.com/microsoft/Swin-Transformer, then set "
            f"{CHECKOUT_VARIABLE} to that folder; or use native, whose checkpoints are the same.",
        )
    missing = [name for name in FILES.values() if not (folder / name).is_file()]
    if missing:
        raise PlannerError(
            f"{folder} is not a checkout of microsoft/Swin-Transformer: it has no {missing[0]}.",
            f"Set {CHECKOUT_VARIABLE} to the folder that has {missing[0]}.",
        )
    return folder


def _load(file: Path) -> ModuleType:
    """Only one file of the checkout: its package would import every model and their kernels."""
    declare_missing_operators()
    name = f"_swin_transformer_checkout_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PlannerError(f"{file} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        # It prints a line about its optional kernels, and standard output may be a protocol's.
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore", FutureWarning)  # it imports timm.models.layers
            spec.loader.exec_module(module)
    finally:
        sys.path[:] = path  # it appends the folder above the working directory
    return module
