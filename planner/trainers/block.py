"""`train.py` for a plan: the file that was probed, with the block at its top filled in.

The block names the setting and builds the model. Every other byte of the file stays as it is.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from planner.core.errors import unknown_name
from planner.core.schema import FactoryModel, Model, NamedModel, SwinConfig
from planner.core.schema.validation import UNIT
from planner.libraries.microsoft.spec import class_arguments as microsoft_arguments
from planner.libraries.names import HUB, find_library
from planner.libraries.native.spec import class_arguments as native_arguments
from planner.trainers.launch import train_loader
from planner.trainers.plan import Plan
from planner.trainers.recipe import WORKERS, Recipe, fine_tuned, is_fine_tuning
from planner.trainers.timm import create_model_arguments
from planner.training.setting import FIELD, step_values, train_source

BEGINS = "# ---- What is trained, and how ----"
ENDS = "# ---- The same in every file from here on ----"

# The fields in which a Swin of timm may differ from the published one whose weights it loads: timm
# fits position biases to other windows and the patch embedding to other channels.
_FREE = frozenset((
    "name", "num_classes", "image_size", "drop_rate", "attn_drop_rate", "drop_path_rate",
    "window_size", "in_channels",
))  # fmt: skip


def fill_block(plan: Plan, comment: str) -> str:
    """The text of `train.py` for `plan`, with `comment` (lines behind `#`) at the top of its
    block."""
    text, values = train_source(), script_values(plan)
    begin, end = text.index(BEGINS), text.index(ENDS)
    title, fields, _, _, task, batches, dataset = text[begin:end].strip().split("\n\n\n")
    if plan.is_task:
        task = f"def build_task() -> Any:\n{_task_body(plan)}"
    if (factory := dataset_factory(plan)) is not None:
        module, _, name = factory.partition(":")
        dataset = f"def own_dataset() -> Any:\n{_import_lines(module, name)}    return {name}()"
    parts = (
        f"{title}\n\n{comment.rstrip()}",
        "\n".join(_fill_field(line, values) for line in fields.splitlines()),
        f"SETTING = Setting()\nFINE_TUNING: dict[str, float] = {literal(_fine_tuning(plan))}",
        f"def build_model(pretrained: bool = False) -> nn.Module:\n{_model_body(plan)}".rstrip(),
        *(task, batches, dataset),
    )
    return text[:begin] + "\n\n\n".join(parts) + f"\n\n\n{text[end:]}"


def _fill_field(line: str, values: Mapping[str, Any]) -> str:
    match = FIELD.match(line)
    if match is None or match[1] not in values:
        return line
    return f"    {match[1]}: {match[2]} = {literal(values[match[1]])}{match[3]}"


def script_values(plan: Plan) -> dict[str, Any]:
    """The values of `train.Setting`: those that a probe reads, the recipe, the data and their
    loader. Imports no torch."""
    setting, recipe, model = plan.setting, plan.recipe, plan.model
    loader = train_loader(plan)
    values: dict[str, Any] = {
        **step_values(model, setting), **_recipe_values(recipe),
        "validation_batch": setting.batch_size,
        "unit": plan.unit if plan.unit and re.fullmatch(UNIT, plan.unit) else "images",
        "is_task": plan.is_task, "pipeline": loader.pipeline,
        "workers": loader.workers if plan.loader else WORKERS,
        "prefetch_factor": loader.prefetch_factor, "pin_memory": loader.pin_memory,
    }  # fmt: skip
    if (size := getattr(model, "image_size", None)) is not None:
        values |= {"height": size[0], "width": size[1]}
    for field, name in (("in_channels", "channels"), ("num_classes", "num_classes")):
        if (value := getattr(model, field, None)) is not None:
            values[name] = value
    return values


def _recipe_values(recipe: Recipe) -> dict[str, Any]:
    names = ("learning_rate", "weight_decay", "epochs", "warmup_epochs", "warmup_start",
             "final_share", "smoothing", "mixup", "cutmix", "switch")  # fmt: skip
    values = {name: getattr(recipe, name) for name in names}
    if recipe.augmentation is not None:
        for name in ("auto_augment", "erasing", "interpolation", "crop_share"):
            values[name] = getattr(recipe.augmentation, name)
    return values


def _fine_tuning(plan: Plan) -> dict[str, Any]:
    """The values that --pretrained sets where all of a published model is trained: the authors'
    recipe for weights of ImageNet-22k. Empty where a setting fine-tunes in another way."""
    if published_weights(plan.model) is None or is_fine_tuning(plan.setting):
        return {}
    recipe = fine_tuned(plan.recipe)
    durations = {"epochs": recipe.epochs, "warmup_epochs": recipe.warmup_epochs}
    rates = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay or None}
    return {**durations, **{name: value for name, value in rates.items() if value is not None}}


def _task_body(plan: Plan) -> str:
    model = plan.model.model_dump(mode="json", exclude_none=True)
    setting = plan.setting.model_dump(mode="json", exclude_defaults=True)
    return (
        "    from planner.training.tasks import load_task\n\n"
        f"    return load_task(\n        {literal(model)},\n        {literal(setting)},\n    )"
    )


def dataset_factory(plan: Plan) -> str | None:
    """MODULE:FACTORY of the user's Dataset, or None where the script reads a folder of pictures."""
    if plan.measured_data is None or not plan.measured_data.is_factory:
        return None
    return plan.measured_data.location


def _import_lines(module: str, name: str) -> str:
    return (
        '    import sys\n\n    sys.path.insert(0, "")  # your module is found where you stand\n'
        f"    from {module} import {name.partition('.')[0]}\n\n"
    )


def _model_body(plan: Plan) -> str:
    """The body of `build_model`."""
    model, attention = plan.model, plan.setting.attention
    if plan.is_task:
        return "    raise NotImplementedError(SETTING.unit)  # the task makes it\n"
    if isinstance(model, FactoryModel):
        module, name = model.parts
        return f"{_import_lines(module, name)}    model: nn.Module = {name}()\n    return model\n"
    writers: Mapping[str, Callable[[Any, str], str]]
    if isinstance(model, NamedModel):
        writers = {"timm": _write_named_timm, "torchvision": _write_torchvision,
                   "transformers": _write_transformers}  # fmt: skip
    else:
        writers = {"native": _write_native, "timm": _write_timm, "microsoft": _write_microsoft}
    return writers[model.library](model, attention)


def _write_native(model: SwinConfig, attention: str) -> str:
    kernel = "eager" if attention == "eager" else "sdpa"
    config = _call("SwinConfig", native_arguments(model))
    return (
        "    from native_swin import SwinConfig, build_swin\n\n"
        f"{_NO_WEIGHTS}    config = {config}\n    return build_swin(config, {literal(kernel)})\n"
    )


def _write_timm(model: SwinConfig, attention: str) -> str:
    name, arguments = create_model_arguments(model)
    weights = published_weights(model)
    if weights:
        arguments = {"pretrained": _Source("pretrained"), **arguments}
    created = _call("timm.create_model", arguments, (literal(weights or name),))
    start = f"    import timm\n\n{'' if weights else _NO_WEIGHTS}"
    return f"{start}    model: nn.Module = {created}\n{_attention_lines(attention, model)}"


def _write_named_timm(model: NamedModel, attention: str) -> str:
    """The model as `planner.libraries.timm.spec` builds it."""
    shape = {"in_chans": model.in_channels, "num_classes": model.num_classes}
    arguments = {"pretrained": _Source("pretrained"), **shape}
    created = _call("timm.create_model", arguments, (literal(model.name), "**sized"))
    return (
        "    import timm\n\n"
        f"    weights = timm.models.get_pretrained_cfg({literal(model.name)})\n"
        "    fixed = weights is not None and weights.fixed_input_size\n"
        f'    sized = {{"img_size": {literal(model.image_size)}}} if fixed else {{}}\n'
        f"    model: nn.Module = {created}\n{_attention_lines(attention, model)}"
    )


def _attention_lines(attention: str, model: Model) -> str:
    """The last lines for a model of timm: they set the switch in each of its attentions."""
    is_named = isinstance(model, NamedModel)
    if attention == "library" or not (is_named or getattr(model, "version", 1) == 1):
        return "    return model\n"
    return (
        "    for module in model.modules():\n"
        '        if hasattr(module, "fused_attn"):\n'
        f"            module.fused_attn = {attention == 'sdpa'}  # type: ignore[assignment]\n"
        "    return model\n"
    )


def _write_torchvision(model: NamedModel, attention: str) -> str:
    """The model as `planner.libraries.torchvision` builds it. `train.py` itself sets the
    attention."""
    assert model.image_size is not None
    size = model.image_size
    sizes: dict[str, Any] = {"vit": {"image_size": size[0]}, "maxvit": {"input_size": size}}
    size_argument = sizes.get(model.name.partition("_")[0], {})
    name = literal(model.name)
    created = _call("get_model", {"num_classes": model.num_classes, **size_argument}, (name,))
    return (
        "    from torchvision.models import get_model, get_model_weights\n\n"
        f"    model: nn.Module = {created}\n"
        "    if pretrained:  # all weights that have the model's shapes: not another classifier\n"
        f"        state = get_model_weights({name}).DEFAULT.get_state_dict(check_hash=True)\n"
        "        mine = model.state_dict()\n"
        "        same = {k: v for k, v in state.items() if k in mine and v.shape == mine[k].shape}"
        "\n        model.load_state_dict(same, strict=False)\n"
        "    return model\n"
    )


def _write_transformers(model: NamedModel, attention: str) -> str:
    """The model as `planner.libraries.transformers` builds it."""
    if model.name not in HUB:
        raise unknown_name("Swin of transformers", model.name, HUB, "Name a factory of your own.")
    assert model.image_size is not None
    height, width = model.image_size
    fields = {**HUB[model.name], "image_size": height if height == width else (height, width)}
    (kind,) = fields.pop("architectures")
    fields |= {"num_labels": model.num_classes, "num_channels": model.in_channels}
    if attention != "library":
        fields["attn_implementation"] = attention
    config = kind.partition("For")[0] + "Config"
    return (
        f"    from transformers import {config}, {kind}\n\n"
        f"    config = {_call(config, fields)}\n"
        f"    model: nn.Module = {kind}(config)\n"
        "    if pretrained:  # its classifier is new where it has other classes\n"
        f"        name = {literal(model.name)}\n"
        '        how = {"config": config, "ignore_mismatched_sizes": True}\n'
        f"        model = {kind}.from_pretrained(name, **how)\n"
        "    return model\n"
    )


def _write_microsoft(model: SwinConfig, attention: str) -> str:
    suffix, ending = ("", "") if model.version == 1 else ("_v2", "V2")
    created = _call(f"SwinTransformer{ending}", microsoft_arguments(model))
    return (
        "    import sys\n\n"
        "    # There is no package: set SWIN_TRANSFORMER_CHECKOUT to what `git clone` made.\n"
        '    sys.path.insert(0, os.environ["SWIN_TRANSFORMER_CHECKOUT"])\n'
        f"    from models.swin_transformer{suffix} import SwinTransformer{ending}\n\n"
        f"{_NO_WEIGHTS}    model: nn.Module = {created}\n    return model\n"
    )


_NO_WEIGHTS = (
    "    if pretrained:\n"
    '        raise SystemExit("no weights are published by this name: load yours here")\n'
)


def published_weights(model: Model) -> str | None:
    """The timm name of the published weights that fit a Swin of timm, or None if there are none."""
    if not isinstance(model, SwinConfig) or model.name is None or model.library != "timm":
        return None
    published = find_library("timm").find(model.name)
    differences = model.model_dump().items() - published.model_dump().items() if published else None
    return model.name if differences is not None and dict(differences).keys() <= _FREE else None


class _Source(str):
    """Python source, which `literal` does not quote."""


def literal(value: Any) -> str:
    """`value` as Python source. Strings are in double quotes, and characters that do not print are
    escaped."""
    if isinstance(value, _Source):
        return str(value)
    if isinstance(value, str):
        if "\\" in value and '"' not in value and value.isprintable():
            return f'r"{value}"' if not value.endswith("\\") else repr(value)
        inner = repr(f"'{value}")[2:-1]  # a leading quote makes repr choose double quotes
        return f'"{inner}"' if '"' not in value else repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(literal(v) for v in value)
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{inner}{',' * (isinstance(value, tuple) and len(value) == 1)}{right}"
    return repr(value)


def _call(name: str, arguments: Mapping[str, Any], positional: tuple[str, ...] = ()) -> str:
    """`name(positional, key=value, …)` with one argument a line, indented for a function's body."""
    lines = [f"        {p},\n" for p in positional]
    lines += [f"        {k}={literal(v)},\n" for k, v in arguments.items()]
    return f"{name}(\n{''.join(lines)}    )" if lines else f"{name}()"
