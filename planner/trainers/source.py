"""Python source that several trainers' files share: the model, its checkpointing, its precision."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent
from typing import Any

from planner.core.schema import FactoryModel, Model, NamedModel, SwinConfig, TrainSetting
from planner.libraries.limits import FLOAT8_LEAST, FLOAT8_MULTIPLE
from planner.libraries.microsoft.arguments import class_arguments as microsoft_arguments
from planner.libraries.torchvision.arguments import class_arguments as torchvision_arguments
from planner.libraries.transformers.arguments import config_arguments
from planner.trainers.copies import Source, before_return, compiled_blocks, copied
from planner.trainers.templates import macro

MODEL = "model.j2"


def model_source(model: Model, setting: TrainSetting) -> Source:
    """The source of `build_model() -> nn.Module`, checkpointing, attention and the compilation of
    blocks as in `setting`; and of the context that moves saved activations, where it needs it."""
    found = _source_of(model, setting)
    if setting.offload != "none":
        helper = copied("planner.training.offloading")
        found = Source((*found.imports, *helper.imports), helper.body + found.body)
    if setting.activation_memory_budget < 1:
        found = found._replace(imports=(*found.imports, BUDGET_IMPORT))
    if setting.compile_scope == "model":
        return found
    return compiled_blocks(found, arguments(setting.compile_arguments))


def _source_of(model: Model, setting: TrainSetting) -> Source:
    if isinstance(model, FactoryModel):
        return _factory(model, setting)
    if isinstance(model, NamedModel):
        return _named(model, setting)
    writers = {
        "native": _native,
        "timm": _timm,
        "torchvision": _torchvision,
        "transformers": _transformers,
        "microsoft": _microsoft,
    }
    return writers[model.library](model, setting)


def literal(value: Any) -> str:
    """`value` as Python source, strings in double quotes."""
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, tuple):
        inner = ", ".join(literal(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


def _quoted(text: str) -> str:
    """A Python string in double quotes; what does not print is escaped."""
    inner = repr(f"'{text}")[2:-1]  # a leading quote makes repr choose double quotes, if it can
    return f'"{inner}"' if '"' not in text else repr(text)


def call(name: str, arguments: dict[str, Any], positional: tuple[str, ...] = ()) -> str:
    """`name(positional, key=value, …)`, one argument a line, to stand inside a function."""
    lines = [f"        {p},\n" for p in positional]
    lines += [f"        {k}={literal(v)},\n" for k, v in arguments.items()]
    return f"{name}(\n{''.join(lines)}    )" if lines else f"{name}()"


def arguments(values: Mapping[str, Any]) -> str:
    """`key=value, …`, as in a call."""
    return ", ".join(f"{key}={literal(value)}" for key, value in values.items())


def mapping(name: str, values: dict[str, Any]) -> str:
    """`name = {…}` at the top of a file, one key a line."""
    return f"{name} = {_entries(values, '')}\n"


def _entries(values: Mapping[str, Any], margin: str) -> str:
    """`{…}`, one key a line; what is in it too where its line would be too long."""
    inner, lines = f"{margin}    ", ""
    for key, value in values.items():
        line = f"{inner}{literal(key)}: {literal(value)},\n"
        if len(line) > 101 and isinstance(value, dict):
            line = f"{inner}{literal(key)}: {_entries(value, inner)},\n"
        lines += line
    return f"{{\n{lines}{margin}}}"


def _function(lines: str) -> str:
    return f"def build_model() -> nn.Module:\n{lines}    return model\n"


def _factory(model: FactoryModel, setting: TrainSetting) -> Source:
    module, name = model.parts
    outermost = name.partition(".")[0]
    return _any(
        "import sys",
        '    sys.path.insert(0, "")  # your module is found where you stand\n'
        f"    from {module} import {outermost}\n\n"
        f"    model: nn.Module = {name}()\n",
        setting,
    )


def _named(model: NamedModel, setting: TrainSetting) -> Source:
    """A classifier of timm's, as `planner.libraries.timm.by_name` builds it."""
    given = {"in_chans": model.in_channels, "num_classes": model.num_classes}
    created = call("timm.create_model", given, (literal(model.name), "**sized"))
    switch = "timm.layers.set_fused_attn(False)  # read while the model is built\n"
    switched = f"    {switch}" if setting.attention == "eager" else ""
    weights = f"timm.models.get_pretrained_cfg({literal(model.name)})"
    return _any(
        "import timm",
        f"    weights = {weights}\n"
        "    fixed = weights is not None and weights.fixed_input_size\n"
        f'    sized = {{"img_size": {model.image_size}}} if fixed else {{}}\n'
        f"{switched}    model: nn.Module = {created}\n",
        setting,
    )


def _any(line: str, built: str, setting: TrainSetting) -> Source:
    """The source of a model whose blocks are found, and wrapped from outside."""
    if setting.checkpointing == "none":
        return Source((line,), _function(built))
    helper = copied("planner.libraries.checkpointing")
    wrapped = f"    checkpoint_blocks({_blocks_to_wrap(setting)})\n"
    return Source((line, *helper.imports), helper.body + _function(built + wrapped))


def _blocks_to_wrap(setting: TrainSetting) -> str:
    """The arguments of `checkpoint_blocks`."""
    if setting.chosen_blocks is None:
        return "model"
    selective = ", selective=True" if setting.checkpointing == "selective" else ""
    return f"model, {_chosen('repeated_blocks(model)', setting)}{selective}"


def _chosen(blocks: str, setting: TrainSetting) -> str:
    """Those of `blocks`, the source of a list, that are wrapped."""
    chosen = setting.chosen_blocks
    if chosen is None or chosen == slice(None):
        return blocks
    return f"{blocks}[:{chosen.stop}]" if chosen.step is None else f"{blocks}[::{chosen.step}]"


def offloaded(lines: str, setting: TrainSetting, module: str, batch: str) -> str:
    """`lines` of a forward and its loss, in a context that moves what backward needs where the
    setting says so; `module` and `batch` (tensors) stay on the device."""
    if setting.offload == "none":
        return lines
    margin = " " * (len(lines) - len(lines.lstrip(" ")))
    return (
        f"{margin}kept = (*{module}.parameters(), *{module}.buffers(), {batch})\n"
        f"{margin}with offload_activations(kept):\n" + indent(lines, "    ")
    )


def _native(model: SwinConfig, setting: TrainSetting) -> Source:
    fields = model.model_dump(exclude_defaults=True, exclude={"name", "library"})
    attention = "eager" if setting.attention == "eager" else "sdpa"
    in_parts = setting.chosen_blocks is not None
    checkpointing = literal("none" if in_parts else setting.checkpointing)
    imports = ("from native_swin import SwinConfig, build_swin",)
    built = (
        f"    config = {call('SwinConfig', fields)}\n"
        f"    model: nn.Module = build_swin(config, {literal(attention)}, {checkpointing})\n"
    )
    if in_parts:
        return _wrapped(imports, built, "model.layers", setting)
    return Source(imports, _function(built))


def _timm(model: SwinConfig, setting: TrainSetting) -> Source:
    from planner.trainers.timm import create_model_arguments

    name, arguments = create_model_arguments(model)
    imports = ["import timm"]
    attention = ""
    if setting.attention != "library":
        imports.append("from timm.layers import set_fused_attn")
        fused = "True, experimental=True" if setting.attention == "sdpa" else "False"
        attention = f"    set_fused_attn({fused})  # read while the model is built\n"
    created = call("timm.create_model", arguments, (literal(name),))
    built = f"{attention}    model: nn.Module = {created}\n"
    if setting.checkpointing == "blocks":
        own = "    model.set_grad_checkpointing(True)\n"
        return Source(tuple(imports), _function(built + own))
    return _wrapped(tuple(imports), built, "model.layers", setting)


def _torchvision(model: SwinConfig, setting: TrainSetting) -> Source:
    block = "SwinTransformerBlock" if model.version == 1 else "SwinTransformerBlockV2"
    merging = "PatchMerging" if model.version == 1 else "PatchMergingV2"
    created = call("SwinTransformer", torchvision_arguments(model)).removesuffix("    )")
    created += f"        block={block},\n        downsample_layer={merging},\n    )"
    names = sorted({"SwinTransformer", block, merging})
    imports = f"from torchvision.models.swin_transformer import {', '.join(names)}"
    # features: patches, then by turns a stage's blocks and a patch merging
    built = f"    model: nn.Module = {created}\n"
    return _wrapped((imports,), built, "model.features[1::2]", setting, "stage")


def _loop(stages: str, blocks: str, setting: TrainSetting) -> str:
    """Lines that checkpoint the modules that `setting` names: stages, those chosen of them, or
    blocks. `blocks` are those of a `stage`."""
    chosen = setting.checkpointed_stages
    if chosen is None:
        every = f"[block for stage in {stages} for block in {blocks}]"
        where = stages if setting.checkpointing == "stages" else _chosen(every, setting)
        return f"    for module in {where}:\n        recompute(module)\n"
    return (
        f"    stages = list({stages})\n"
        f"    for index in {literal(chosen)}:\n"
        "        recompute(stages[index])\n"
    )


def _wrapped(
    imports: tuple[str, ...],
    built: str,
    stages: str,
    setting: TrainSetting,
    blocks: str = "stage.blocks",
) -> Source:
    """The source of a model whose library does not checkpoint this way by itself."""
    if setting.checkpointing == "none":
        return Source(imports, _function(built))
    more = [
        "from functools import cache",
        "from typing import Any",
        "from torch.utils.checkpoint import checkpoint",
    ]
    definitions, selective = "", setting.checkpointing == "selective"
    if selective:
        more += [
            "from torch import Tensor",
            "from torch.utils.checkpoint import CheckpointPolicy",
            "from torch.utils.checkpoint import create_selective_checkpoint_contexts",
        ]
        definitions = copied(
            "planner.libraries.checkpointing",
            "KEPT_OPERATIONS",
            "Keep",
            "_storages",
            "keep",
            "_leave_results",
        ).body
    wrapper = macro("recompute", MODEL, selective=selective)
    loop = _loop(stages, blocks, setting)
    return Source((*imports, *more), definitions + wrapper + _function(f"{built}{loop}"))


def _transformers(model: SwinConfig, setting: TrainSetting) -> Source:
    kind = "SwinConfig" if model.version == 1 else "Swinv2Config"
    attention = (
        ""
        if setting.attention == "library"
        else f", attn_implementation={literal(setting.attention)}"
    )
    lines = f"    config = {call(kind, config_arguments(model))}\n"
    lines += (
        "    model: nn.Module = AutoModelForImageClassification.from_config(\n"
        f"        config{attention}\n    )\n"
        if attention
        else "    model: nn.Module = AutoModelForImageClassification.from_config(config)\n"
    )
    imports = (f"from transformers import AutoModelForImageClassification, {kind}",)
    stages = f"model.{'swin' if model.version == 1 else 'swinv2'}.encoder.layers"
    return _wrapped(imports, lines, stages, setting)


def _microsoft(model: SwinConfig, setting: TrainSetting) -> Source:
    suffix = "" if model.version == 1 else "_v2"
    kind = "SwinTransformer" if model.version == 1 else "SwinTransformerV2"
    built = (
        "    # There is no package: set SWIN_TRANSFORMER_CHECKOUT to what `git clone` made.\n"
        '    sys.path.insert(0, os.environ["SWIN_TRANSFORMER_CHECKOUT"])\n'
        f"    from models.swin_transformer{suffix} import {kind}\n\n"
        f"    model: nn.Module = {call(kind, microsoft_arguments(model, setting))}\n"
    )
    imports = ("import os", "import sys")
    if setting.checkpointing == "blocks":
        return Source(imports, _function(built))
    return _wrapped(imports, built, "model.layers", setting)


def benchmark_source(setting: TrainSetting) -> str:
    """Whether cuDNN chooses its convolution by trying them, as in the probe."""
    return f"torch.backends.cudnn.benchmark = {setting.cudnn_benchmark}\n"


_FUSED = ("flash", "mem_efficient", "cudnn")  # kernels of scaled_dot_product_attention


def process_source(setting: TrainSetting, model: Model) -> str:
    """What is set once in a process: the precision of fp32 matrices, cuDNN's choice, what the
    compiler keeps of activations, and that no fused kernel attends where a model has no switch."""
    kept = budget_source(setting)
    if setting.attention == "eager" and not isinstance(model, SwinConfig):
        kept += "".join(f"torch.backends.cuda.enable_{fused}_sdp(False)\n" for fused in _FUSED)
    benchmark = benchmark_source(setting)
    if setting.precision not in ("fp32", "tf32"):
        return benchmark + kept
    tf32 = setting.precision == "tf32"
    return (
        f'torch.set_float32_matmul_precision("{"high" if tf32 else "highest"}")\n'
        f"torch.backends.cudnn.allow_tf32 = {tf32}\n{benchmark}{kept}"
    )


BUDGET_IMPORT = "import torch._functorch.config"


def budget_source(setting: TrainSetting) -> str:
    """The line that lets the compiler recompute more than is fastest; "" where it is not to."""
    if setting.activation_memory_budget == 1:
        return ""
    budget = literal(setting.activation_memory_budget)
    return f"torch._functorch.config.activation_memory_budget = {budget}\n"


def placed(body: str, setting: TrainSetting) -> str:
    """`body` with the model brought into the setting's dtype and memory format at its end, and its
    linear layers into 8 bits."""
    lines = ""
    if setting.precision == "pure-bf16":
        lines += "    model.to(torch.bfloat16)\n"
    if setting.memory_format == "channels_last":
        lines += "    model.to(memory_format=torch.channels_last)\n"
    if setting.precision == "fp8":
        sizes = {"least": FLOAT8_LEAST, "multiple": FLOAT8_MULTIPLE}
        lines += macro("convert_to_float8", MODEL, **sizes)
    return before_return(body, lines)


def image_lines(setting: TrainSetting) -> tuple[str, ...]:
    """What a loop does to the images of a batch, where the setting asks it."""
    found = []
    if setting.precision == "pure-bf16":
        found.append("images = images.to(torch.bfloat16)")
    if setting.memory_format == "channels_last":
        found.append("images = images.contiguous(memory_format=torch.channels_last)")
    return tuple(found)


# Where a script computes unless it is told, by whether it was planned for a GPU.
SCRIPT_DEVICE = {True: '"cuda" if torch.cuda.is_available() else "cpu"', False: '"cpu"'}


def compiles_whole(setting: TrainSetting) -> bool:
    """Whether a script compiles the model itself, not `build_model` its blocks."""
    return setting.compile != "off" and setting.compile_scope == "model"
