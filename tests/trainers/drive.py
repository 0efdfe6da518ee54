"""Runs an emitted script of one or many ranks on 16 fixed images: `drive.py SCRIPT ARGUMENT…`.

What lets PyPI's torchvision import beside a CPU torch is done for the script from outside.
DRIVE_MEMORY names a file (a rank puts `.0` or `.1` behind it) for the bytes that an optimizer step
holds at its peak above those at its start: the least of the third step and those after it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.libraries.missing_operators import declare_missing_operators

declare_missing_operators()
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from planner.trace.run import collector_off  # noqa: E402
from tests.cpu_memory import peak_bytes  # noqa: E402


def fixed_images(options: Any, train: bool) -> TensorDataset | None:
    """In place of a folder of pictures, whose crops are drawn anew each time."""
    if not train:
        return None
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(16, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.arange(16) % 10)


def peak_of(step: Callable[..., Any], file: str) -> Callable[..., Any]:
    """`step`, which from its third call on writes the lowest of its peaks into `file`."""
    peaks: list[int] = []

    def called(*arguments: Any) -> Any:
        with collector_off(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
            result = step(*arguments)
        peaks.append(peak_bytes(p))
        Path(f"{file}.{os.environ['RANK']}").write_text(str(min(peaks[2:], default=0)))
        return result

    return called


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    names: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    names["dataset"] = fixed_images
    if "DRIVE_MEMORY" in os.environ:
        names["optimizer_step"] = peak_of(names["optimizer_step"], os.environ["DRIVE_MEMORY"])
    names["main"]()
    # Autograd's threads let go of Python's objects after a backward has returned; a Python 3.11
    # that ends meanwhile aborts ("terminate called without an active exception", torch 2.13). A
    # rank ended so once with torch 2.14, the same cause by its looks: it ends without tidying up.
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
