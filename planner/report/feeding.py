"""How a recommended step is fed, as one paragraph of text."""

from __future__ import annotations

import textwrap

from planner.core.schema.loading import DataSource, FedRecord, Feeding
from planner.report.terminal import width


def feeding_text(feeding: Feeding) -> list[str]:
    """The loader, the two together, which of them bounds and what follows."""
    alone = feeding.evidence.images_per_second or 0.0
    sentences = [
        f"{feeding.loader.title}: {alone:.4g} images/s by itself (measured).",
        together_text(feeding.together),
        *feeding.notes,
    ]
    text = " ".join(sentence for sentence in sentences if sentence)
    lines = textwrap.wrap(text, width() - 2, break_on_hyphens=False, break_long_words=False)
    return [f"Fed from {describe_data(feeding.evidence.data)}:", *(f"  {line}" for line in lines)]


def together_text(fed: FedRecord | None) -> str:
    """What step and loader reached together, "" where that was not measured."""
    if fed is None or fed.images_per_second is None:
        return ""
    computed = f"; computed {fed.predicted:.4g}" if fed.predicted else ""
    return (
        f"Both together trained {fed.images_per_second:.4g} images/s (measured, "
        f"{len(fed.step_seconds)} steps{computed})."
    )


def describe_data(source: DataSource) -> str:
    """`/data/imagenet (1,281,167 items in 1,000 classes)`."""
    if source.num_items is None:
        return source.location
    classes = f" in {source.num_classes:,} classes" if source.num_classes else ""
    return f"{source.location} ({source.num_items:,} items{classes})"
