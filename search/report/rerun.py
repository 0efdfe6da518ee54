"""The commands that repeat a search: on a device, and over what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

from planner.core.errors import UsageError
from planner.core.schema import Model, SwinConfig
from planner.core.schema.result import Recommendation
from planner.libraries.registry import find_library
from planner.report.page.contents import Copyable, Part, Text
from search.loop.options import SearchOptions
from search.loop.request import model_flags, read_options, tune_command
from search.loop.study.study import is_replayed
from search.report.run import Run

MODEL_FILE = "model.json"
REPLAY = "Search again in the recorded probes, without a device"


def search_again(run: Run) -> list[Part]:
    """What to type."""
    options = _options(run.found)
    replay = options if options is not None and options.replay is not None else None
    replayed = any(map(is_replayed, run.records)) if run.records else replay is not None
    parts: list[Part] = []
    if run.found is not None:
        parts += _on_a_device(run, run.found.model, options, replayed)
    if replay is not None:
        parts.append(Copyable(tune_command("", replay), REPLAY))
    return parts


def _options(found: Recommendation | None) -> SearchOptions | None:
    """What was asked; None where no result keeps it, or one keeps what this planner does not
    read."""
    if found is None or found.asked is None:
        return None
    try:
        return read_options(found.asked)
    except UsageError:
        return None


def _on_a_device(
    run: Run, model: Model, options: SearchOptions | None, replayed: bool
) -> list[Part]:
    """The command, and the model as a file where a name does not say it. What was `replayed` is no
    search's to go on from: it begins anew, in a folder of its own."""
    named = _name(model)
    folder = None if replayed else run.folder
    asked = replace(options or SearchOptions(), replay=None, output=folder)
    command = tune_command(named or MODEL_FILE, asked, model_flags(model))
    label = "Search on a device" if replayed else "Search again"
    parts: list[Part] = [Copyable(command, label)]
    if not named:
        fields = model.model_dump(mode="json", exclude_defaults=True)
        parts.append(Copyable(json.dumps(fields, indent=2), MODEL_FILE))
    if replayed:
        return parts
    place = "that folder" if asked.storage is None else "that storage"
    said = (
        f"It goes on from the study in {place}: --trials and --budget count the probes that are "
        "there."
    )
    if options is None:
        said = (
            "Give it the same options as before (--budget, --memory, the values of an axis …): it "
            "goes on from the study in that folder."
        )
    if asked.storage is not None and ("***" in asked.storage or "…" in asked.storage):
        said += " Write the storage's address in full: its password is not kept."
    return [*parts, Text(said, "note")]


def _name(model: Model) -> str:
    """A model as one types it; "" where that would be another Swin of the same name."""
    if not isinstance(model, SwinConfig):
        return model.title
    return model.title if find_library(model.library).find(model.name or "") == model else ""
