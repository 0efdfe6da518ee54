"""The commands that repeat a search: on a device, and over what was measured."""

from __future__ import annotations

import json
import shlex

from planner.files import TUNE_PROBES
from planner.libraries.registry import find_library
from planner.page.contents import Copyable, Part, Text
from planner.schema import FactoryModel, Model, SwinConfig
from search.report.run import Run

MODEL_FILE = "model.json"


def search_again(run: Run) -> list[Part]:
    """What to type; nothing where records of several models lie together."""
    if len(run.parts) > 1:
        return []
    parts: list[Part] = []
    if run.found is not None:
        parts += _on_a_device(run, run.found.model)
    probes = run.folder / (run.name or TUNE_PROBES)
    if probes.suffix == ".jsonl" and probes.is_file():
        command = shlex.join(["planner", "tune", "--replay", str(probes)])
        parts.append(Copyable(command, "Search again in the recorded probes, without a device"))
    return parts


def _on_a_device(run: Run, model: Model) -> list[Part]:
    """The command, and the model as a file where a name does not say it."""
    named = _name(model)
    command = shlex.join(["planner", "tune", named or MODEL_FILE, "--output", str(run.folder)])
    parts: list[Part] = [Copyable(command, "Search again")]
    if not named:
        fields = model.model_dump(mode="json", exclude_defaults=True)
        parts.append(Copyable(json.dumps(fields, indent=2), MODEL_FILE))
    said = (
        "Give it the same options as before (--budget, --memory, the values of an axis …): it goes "
        "on from the study in that folder."
    )
    return [*parts, Text(said, "note")]


def _name(model: Model) -> str:
    """A model as one types it; "" where that would be another model of the same name."""
    if isinstance(model, FactoryModel):
        return model.factory if model == FactoryModel(factory=model.factory) else ""
    if not isinstance(model, SwinConfig):
        return model.title
    return model.title if find_library(model.library).find(model.name or "") == model else ""
