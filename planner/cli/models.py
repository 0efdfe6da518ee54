"""`planner models`: the published models of each library, as MODEL arguments."""

from __future__ import annotations

import click

from planner.cli.command import Command
from planner.cli.output import print_json, print_table
from planner.core.errors import unknown_name
from planner.core.schema.model import LIBRARIES, SwinConfig

HEADERS = ("model", "version", "image", "window", "channels", "depths", "classes")


@click.command(
    cls=Command, examples=("planner models swin_tiny", "planner models --library timm --json")
)
@click.argument("text", required=False, default="")
@click.option("--library", metavar="LIBRARY", help=f"Only this one: {', '.join(LIBRARIES)}.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of model configs.")
def command(text: str, library: str | None, as_json: bool) -> None:
    """List the published models of each library, or those whose name contains TEXT."""
    models = [
        (f"{name}:{model}", config)
        for name in _libraries(library)
        for model, config in _published(name).items()
        if text.casefold() in f"{name}:{model}".casefold()
    ]
    if not models and text:
        known = [model for name in _libraries(library) for model in _published(name)]
        raise unknown_name("model", text, known, "List all models with 'planner models'.")
    if as_json:
        print_json([{"model": name, **config.model_dump(mode="json")} for name, config in models])
        return
    print_table([_row(name, config) for name, config in models], HEADERS)
    click.echo(f"\nNext: 'planner estimate {models[0][0]} --gpu NAME' says whether it fits.")


def _libraries(only: str | None) -> tuple[str, ...]:
    if only is None:
        return LIBRARIES
    if only not in LIBRARIES:
        raise unknown_name("library", only, LIBRARIES, f"Libraries: {', '.join(LIBRARIES)}.")
    return (only,)


def _published(library: str) -> dict[str, SwinConfig]:
    from planner.libraries.registry import find_library

    return dict(find_library(library).published)


def _row(name: str, config: SwinConfig) -> tuple[object, ...]:
    height, width = config.image_size
    window = config.window_size
    return (
        name,
        f"v{config.version}",
        f"{height}x{width}",
        window if isinstance(window, int) else ",".join(map(str, window)),
        config.embed_dim,
        ",".join(map(str, config.depths)),
        config.num_classes,
    )
