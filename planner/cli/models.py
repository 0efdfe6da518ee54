"""`planner models`: the published models of each library, as MODEL arguments."""

from __future__ import annotations

import click

from planner.cli.arguments import detail_flag
from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.core.errors import unknown_name
from planner.core.schema.model import LIBRARIES, SwinConfig
from planner.report.page.contents import Cell, Folded, Number, Part, Table, Text
from planner.report.text import parts_text

HEADERS = ("image", "classes", "version", "window", "channels", "depths", "model")
ANY = (
    "MODEL is any model of timm, torchvision or transformers (timm:resnet50), or a function of "
    "yours (file:name)."
)


@click.command(
    cls=Command, examples=("planner models swin_tiny", "planner models --library timm --json")
)
@click.argument("text", required=False, default="")
@click.option("--library", metavar="LIBRARY", help=f"Only this one: {', '.join(LIBRARIES)}.")
@detail_flag
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of model configs.")
def command(text: str, library: str | None, detail: bool, as_json: bool) -> None:
    """List the Swins that are estimated without torch, or those whose name contains TEXT."""
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
    rows = [_row(*model) for model in models]
    table = Table(("image", "classes", "model"), [[*row[:2], row[-1]] for row in rows])
    if not (text or library):
        table = Table(("library", "Swins", "for example"), [_count(name) for name in LIBRARIES])
    parts: list[Part] = [
        Text(f"{ANY}\nThese Swins are estimated without torch:"),
        table,
        Text(f"Next: 'planner estimate {models[0][0]} --gpu NAME' says whether it fits."),
        Folded("all of them and their shapes", [Table(HEADERS, rows)]),
    ]
    say(parts_text(parts, detail))


def _count(library: str) -> list[Cell]:
    names = list(_published(library))
    return [library, Number(len(names), str(len(names))), f"{library}:{names[0]}"]


def _libraries(only: str | None) -> tuple[str, ...]:
    if only is None:
        return LIBRARIES
    if only not in LIBRARIES:
        raise unknown_name("library", only, LIBRARIES, f"Libraries: {', '.join(LIBRARIES)}.")
    return (only,)


def _published(library: str) -> dict[str, SwinConfig]:
    from planner.libraries.registry import find_library

    return dict(find_library(library).published)


def _row(name: str, config: SwinConfig) -> list[Cell]:
    height, width = config.image_size
    window = config.window_size
    return [
        f"{height}x{width}",
        Number(config.num_classes, f"{config.num_classes}"),
        f"v{config.version}",
        str(window) if isinstance(window, int) else ",".join(map(str, window)),
        Number(config.embed_dim, str(config.embed_dim)),
        ",".join(map(str, config.depths)),
        name,
    ]
