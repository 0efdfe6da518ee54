"""Readers of ledgers: the bytes that a step holds and what a device reserves for them."""
