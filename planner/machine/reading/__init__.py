"""Asks every layer of this machine, and judges nothing. Every tool has a deadline."""
