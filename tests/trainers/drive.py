"""Runs an emitted script of one or many ranks on 16 fixed images: `drive.py SCRIPT ARGUMENT…`.

What lets PyPI's torchvision import beside a CPU torch is done for the script from outside.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from planner.libraries.missing_operators import declare_missing_operators

declare_missing_operators()
import torch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402


def fixed_images(options: Any, train: bool) -> TensorDataset | None:
    """In place of a folder of pictures, whose crops are drawn anew each time."""
    if not train:
        return None
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(16, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.arange(16) % 10)


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    names: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    names["dataset"] = fixed_images
    names["main"]()
    # Autograd's threads let go of Python's objects after a backward has returned; a Python 3.11
    # that ends meanwhile aborts ("terminate called without an active exception", torch 2.13). A
    # rank ended so once with torch 2.14, the same cause by its looks: it ends without tidying up.
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
