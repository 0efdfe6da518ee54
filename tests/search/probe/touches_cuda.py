"""A library that initialises CUDA as it is imported: torch's forks know that they are bad then."""

import sys
from types import SimpleNamespace

sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]
    cuda=SimpleNamespace(_is_in_bad_fork=lambda: True)
)
