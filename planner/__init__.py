"""How to train a Swin Transformer as fast as the card allows without running out of memory."""

__version__ = "0.1.0"
