"""Templates of emitted scripts, which read like the script that they write."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """A file of `templates/` with `values` in it."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def macro(name: str, template: str = "learning.j2", /, **values: object) -> str:
    """Functions of a file of `templates/`, as a trainer's file holds them."""
    module = _environment().get_template(template).make_module(values)
    return str(getattr(module, name)())
