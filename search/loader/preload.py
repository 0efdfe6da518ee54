"""Imported by a server before the libraries of the pipelines: they then import beside any torch."""

from planner.libraries.missing_operators import declare_missing_operators

declare_missing_operators()
