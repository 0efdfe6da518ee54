"""Benchmarks of parts of a model, on the device at hand."""
