"""Every unusual picture is decoded to RGB, every broken one is named."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from planner.training.loading.pictures import BadItemError, decode_with_pil
from tests.loading.made import BROKEN, SIDE, UNUSUAL, encoded


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_picture_is_decoded(name: str) -> None:
    image = decode_with_pil(UNUSUAL[name]())
    assert (image.mode, image.size) == ("RGB", (SIDE, SIDE))


@pytest.mark.parametrize(("make", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_picture_is_refused_with_its_reason(make: Callable[[], bytes], said: str) -> None:
    with pytest.raises(BadItemError, match=said):
        decode_with_pil(make())


def test_16_bits_are_scaled_and_not_clipped() -> None:
    """PIL's own conversion makes everything above 255 white."""
    deep = np.asarray(decode_with_pil(encoded("I;16", "PNG")), dtype=int)
    plain = np.asarray(decode_with_pil(encoded("L", "PNG")), dtype=int)
    assert abs(deep - plain).max() <= 1


def test_cmyk_keeps_its_colours() -> None:
    red = Image.new("RGB", (8, 8), (200, 30, 30)).convert("CMYK")
    buffer = BytesIO()
    red.save(buffer, "JPEG", quality=95)
    pixel = decode_with_pil(buffer.getvalue()).getpixel((4, 4))
    assert all(abs(a - b) < 12 for a, b in zip(pixel, (200, 30, 30), strict=True))
