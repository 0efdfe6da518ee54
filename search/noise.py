"""How far apart two measured rates must be to be called different."""

from __future__ import annotations

from collections.abc import Sequence

from search.probe.interval import median_interval

REPEAT_SHARE = 0.01  # two processes of one setting differ by about this, whatever each one says


def rate_interval(images: int, samples: Sequence[float]) -> tuple[float, float]:
    """Images/s, (low, high): the samples' 95% interval, no narrower than processes repeat.

    `images` of one optimizer step, `samples` its seconds.
    """
    interval = median_interval(samples)
    margin = 1 + REPEAT_SHARE / 2
    return images / (interval.high * margin), images * margin / interval.low
