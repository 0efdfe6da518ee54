"""A matrix file, from text to what is to be seen and measured, in order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from planner.errors import UsageError
from planner.files import parse_yaml, read_text
from planner.schema import parse
from planner.units import MIB, parse_seconds
from search.validation.matrix import Matrix, MatrixFile, expand
from search.validation.order import order_rows

EXAMPLE = "See tests/truth/memory.yaml."
MAX_MATRIX_BYTES = MIB


def read_matrix(path: Path) -> Matrix:
    """All that a matrix file asks for; its rows most telling per second first, and one named twice
    once.

    Combinations that a library cannot do are left out. Raises UsageError for a file that cannot be
    read as a matrix.
    """
    data = parse_yaml(read_text(path, MAX_MATRIX_BYTES), str(path))
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not a matrix: it has no groups.", EXAMPLE)
    found = parse(MatrixFile, data, str(path))
    names = Counter(observation.name for observation in found.observations)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UsageError(f"{path}: two observations are called {twice[0]!r}.")
    budget = parse_seconds(found.budget) if found.budget is not None else None
    return Matrix(tuple(order_rows(expand(found.groups))), tuple(found.observations), budget)
