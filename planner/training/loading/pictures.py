"""One picture's bytes decoded to RGB by PIL, and what PIL does not convert well."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

from planner.core.errors import PlannerError

# Pillow's modes of one channel with more than 8 bits, and the value that is white in them
# (Pillow, docs/handbook/concepts.rst: I;16 has 16 bits; PNG of 16 bits opens as I;16, formerly I).
_DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_WHITE_16 = 65535


class BadItemError(PlannerError):
    """One item of the data cannot be loaded, for a `reason`; others may."""

    def __init__(self, reason: str, item: str = "") -> None:
        super().__init__(f"{item}: {reason}" if item else reason)
        self.reason = reason


def decode_with_pil(data: bytes) -> Any:
    """A PIL image in mode RGB. Raises BadItemError where the bytes are no whole picture.

    As torchvision's `pil_loader` (`Image.open(f).convert("RGB")`), and beyond it: 16 bits are
    scaled to 8, where `convert` would clip them to white, and transparency is dropped quietly.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise BadItemError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data))
            return to_rgb(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadItemError(_too_large(data)) from None
    except UnidentifiedImageError:
        raise BadItemError("no picture that PIL knows") from None
    except (OSError, SyntaxError, ValueError, EOFError, OverflowError) as error:
        raise BadItemError(f"{type(error).__name__}: {error}") from None


def to_rgb(image: Any) -> Any:
    """Any PIL image in mode RGB."""
    if image.mode in _DEEP_MODES or image.mode == "F":
        image = _to_8_bits(image)
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _to_8_bits(image: Any) -> Any:
    """One channel of 16 bits, or of floats from 0 to 1 or to 255, as mode L."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image, dtype=np.float32)
    if image.mode == "F":
        white = 1.0 if values.size and values.max() <= 1 else 255.0
    else:
        white = float(_WHITE_16)
    return Image.fromarray((values / white * 255).clip(0, 255).astype(np.uint8))


def _too_large(data: bytes) -> str:
    """Its sides, which PIL reads without decoding it."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS or 0
    return f"more than {limit:,} pixels (a decompression bomb, says PIL; {len(data):,} bytes)"
