"""Readers of ledgers: the seconds that a step takes."""
