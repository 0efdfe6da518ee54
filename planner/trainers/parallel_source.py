"""Python source of what wraps a model over several devices: DDP, FSDP2, and what each asks of a
loop: a last micro-batch that sums gradients, and weights gathered for a checkpoint."""

from __future__ import annotations

from typing import Any

from planner.core.schema import Library, SwinConfig, TrainSetting
from planner.core.schema.distribution import SHARDED
from planner.trainers.copies import Source, block_finding
from planner.trainers.source import mapping
from planner.trainers.templates import macro

_TEMPLATE = "parallel.j2"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def ddp_arguments(setting: TrainSetting) -> dict[str, Any]:
    """Those of DistributedDataParallel that are not PyTorch's own."""
    return {"gradient_as_bucket_view": True} if setting.ddp_bucket_view else {}


def compression_hook(setting: TrainSetting) -> tuple[str, str]:
    """(the import, the name) of the hook that sends gradients in 16 bits."""
    name = f"{setting.ddp_compression}_compress_hook"
    module = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    return f"from {module} import {name}", name


def policy_source(setting: TrainSetting) -> str:
    """The arguments of MixedPrecisionPolicy. Gradients without a `reduce_dtype` are reduced in
    `param_dtype` up to torch 2.14, and from 2.15 on in their own dtype."""
    reduced = f"reduce_dtype={DTYPES[setting.fsdp_reduce_dtype]}"
    if setting.fsdp_param_dtype == "fp32":
        return reduced
    return f"param_dtype={DTYPES[setting.fsdp_param_dtype]}, {reduced}"


def distribute_source(setting: TrainSetting) -> Source:
    """`distribute(model, call, device)`: what is called in the model's place on several devices,
    and `model` itself sharded where it is to be. Nothing on one device."""
    if setting.parallelism == "ddp":
        return _ddp(setting)
    if setting.parallelism in SHARDED:
        return _fsdp(setting)
    return Source()


def _ddp(setting: TrainSetting) -> Source:
    given = ddp_arguments(setting)
    imports, hook = ["from torch.nn.parallel import DistributedDataParallel"], ""
    if setting.ddp_compression != "none":
        line, hook = compression_hook(setting)
        imports.append(line)
    options = mapping("DDP", given) if given else ""
    return Source(tuple(imports), macro("ddp", _TEMPLATE, options=options, hook=hook))


def sharding_source(setting: TrainSetting) -> Source:
    """`shard(model, mesh)` by fully_shard; nothing where weights are not sharded."""
    if setting.parallelism not in SHARDED:
        return Source()
    finding = block_finding()
    imports = (
        *finding.imports,
        "from torch.distributed.device_mesh import DeviceMesh",
        "from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard",
    )
    body = macro("shard", _TEMPLATE, setting=setting, policy=policy_source(setting))
    return Source(imports, finding.body + body)


def without_twice(body: str, sharding: str) -> str:
    """`body` without the search for blocks that `sharding` defines too."""
    finding = block_finding().body
    return body.replace(finding, "") if finding in sharding else body


def _fsdp(setting: TrainSetting) -> Source:
    imports, shard = sharding_source(setting)
    more = (
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.checkpoint.state_dict import StateDictOptions",
        "from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict",
        *(("from torch.distributed.tensor import distribute_tensor",) if setting.ema else ()),
    )
    body = macro("distribute_shards", _TEMPLATE, setting=setting)
    return Source((*imports, *more), shard + body)


_BLOCKS: dict[tuple[Library, int], str] = {
    ("timm", 1): "SwinTransformerBlock", ("timm", 2): "SwinTransformerV2Block",
    ("torchvision", 1): "SwinTransformerBlock", ("torchvision", 2): "SwinTransformerBlockV2",
    ("transformers", 1): "SwinLayer", ("transformers", 2): "Swinv2Layer",
    ("microsoft", 1): "SwinTransformerBlock", ("microsoft", 2): "SwinTransformerBlock",
    ("native", 1): "BlockV1", ("native", 2): "BlockV2",
}  # fmt: skip


def block_classes(model: SwinConfig, setting: TrainSetting) -> list[str]:
    """What the classes of its blocks are called: those that `build_model` lets recompute have a
    class of their own (`recompute` in templates/model.j2)."""
    name, chosen = _BLOCKS[model.library, model.version], setting.chosen_blocks
    total = sum(model.depths)
    by_library = model.library in ("timm", "native", "microsoft")
    wrapped = len(range(total)[chosen]) if chosen is not None else 0
    if setting.checkpointing == "blocks" and not by_library:
        wrapped = total
    plain = [name] if wrapped < total else []
    return plain + ([f"Recomputed{name}"] if wrapped else [])


def synchronised(setting: TrainSetting, body: str) -> str:
    """The lines of one micro-batch, `body`, that sum gradients only in the last one of a step."""
    once = setting.accumulate > 1 and setting.gradient_sync == "last"
    if not once or setting.parallelism == "none":
        return body
    last = "        last = index == ACCUMULATE - 1\n"
    if setting.parallelism in SHARDED:
        return f"{last}        model.set_requires_gradient_sync(last)\n{body}"
    inner = "".join(f"    {line}\n" for line in body.splitlines())
    return (
        f"{last}        assert isinstance(call, DistributedDataParallel)\n"
        f"        with nullcontext() if last else call.no_sync():\n{inner}"
    )
