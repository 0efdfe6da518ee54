"""torchvision beside a torch that its compiled operators were not built for.

PyPI's torchvision is a CUDA build. Beside a CPU torch its library does not load, and
`import torchvision` fails because the operators it describes do not exist. Declaring their
schemas first is enough: torchvision and timm import, and their Swins never call them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# A library's declarations vanish with it, so it must live as long as the process.
_declared: list[torch.library.Library] = []


def declare_missing_operators() -> None:
    """Make `import torchvision` (and timm, which imports it) work; harmless where it did already.

    Call it before the first import of torchvision or timm. Raises nothing.
    """
    if _declared or _compiled_operators_load():
        return
    # FRAGMENT and not DEF: another program's declaration of the same library may stand already.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _declared.append(library)


def _compiled_operators_load() -> bool:
    """Whether torchvision is absent, or brings operators that this torch can load (tried here)."""
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return True
    folder = Path(found.submodule_search_locations[0])
    for library in sorted((*folder.glob("_C*.so"), *folder.glob("_C*.pyd"))):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False
