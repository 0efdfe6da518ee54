"""Where the authors' repository lies: it is no package."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT_VARIABLE = "SWIN_TRANSFORMER_CHECKOUT"


def named_checkout() -> Path | None:
    """The folder that `git clone` made; None where the environment names none."""
    folder = os.environ.get(CHECKOUT_VARIABLE)
    return Path(folder) if folder else None
