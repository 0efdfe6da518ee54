"""What trainers' files say of several devices: launch lines, options, refusals, what they do
by themselves."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import yaml

from planner import resolve_model
from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.schema.distribution import PARALLELISMS
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import Emitted, emit_setting
from planner.trainers.engine import ZERO_PARALLEL
from planner.trainers.parallelism import by_default
from planner.trainers.registry import TRAINERS, find_trainer
from tests.trainers.cases import GIB, FakeEstimator, executed, tiny

declare_missing_operators()

PRECISION = {"microsoft": "fp16"}
SWIN_B = resolve_model("timm:swin_base_patch4_window7_224")


def emitted(target: str, **fields: Any) -> Emitted:
    library = TRAINERS[target].library or "native"
    given = {"batch_size": 2, "precision": PRECISION.get(target, "bf16"), **fields}
    model = tiny(library, num_classes=1000)
    return emit_setting(model, TrainSetting(**given), target, estimator=FakeEstimator())


@pytest.mark.parametrize("target", TRAINERS)
def test_every_trainer_is_launched_on_one_machine_and_on_several(target: str) -> None:
    one, several = emitted(target, world_size=8), emitted(target, world_size=16, nodes=2)
    if target == "deepspeed":
        assert "--num_gpus 8" in one.launch
        assert "--hostfile HOSTFILE --num_nodes 2 --num_gpus 8" in several.launch
    elif target == "accelerate":
        assert "--machine_rank" not in one.launch
        assert "--machine_rank RANK --main_process_ip HOST" in several.launch
        values = yaml.safe_load(several.text)
        assert (values["num_machines"], values["num_processes"]) == (2, 16)
    else:
        assert "torchrun --standalone --nproc-per-node 8 --max-restarts=0" in one.launch
        meeting = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        assert f"{meeting} --nproc-per-node 8 --max-restarts=0" in several.launch
    asked = "HOSTFILE" if target == "deepspeed" else "each of the 2 machines"
    assert any(asked in warning for warning in several.warnings)
    assert not any("machines" in warning for warning in one.warnings)


@pytest.mark.parametrize("target", TRAINERS)
def test_a_parallelism_is_written_or_refused_with_those_who_can(target: str) -> None:
    for parallelism in PARALLELISMS[1:]:
        if parallelism in TRAINERS[target].parallel:
            assert emitted(target, world_size=4, nodes=2, parallelism=parallelism).text
            continue
        with pytest.raises(UnsupportedError, match=f"does not train under {parallelism}") as raised:
            emitted(target, world_size=4, nodes=2, parallelism=parallelism)
        assert "--for " in str(raised.value)


@pytest.mark.parametrize(
    ("target", "fields", "own"),
    [
        ("transformers", {"parallelism": "fsdp"},
         {"fsdp_param_dtype": "bf16", "fsdp_reduce_dtype": "bf16"}),
        ("microsoft", {"parallelism": "ddp"}, {"gradient_sync": "every"}),
        ("accelerate", {"parallelism": "fsdp", "precision": "fp32"}, {}),
        ("lightning", {"parallelism": "fsdp"}, {"gradient_sync": "every"}),
        ("deepspeed", {"parallelism": "zero2"}, {"gradient_sync": "every"}),
        ("pytorch", {"parallelism": "ddp"}, {}),
    ],
)  # fmt: skip
def test_what_a_trainer_does_where_nobody_says(
    target: str, fields: dict[str, Any], own: dict[str, Any]
) -> None:
    setting = TrainSetting(world_size=2, accumulate=2, **fields)
    assert by_default(find_trainer(target), setting).differences(setting) == own


def test_what_no_trainer_can() -> None:
    several = {"world_size": 2, "accumulate": 2}
    plain = {"parallelism": "fsdp", "fsdp_param_dtype": "bf16", "precision": "fp32"}
    with pytest.raises(UnsupportedError, match="multiplies fp32 with them"):
        emitted("pytorch", attention="eager", **plain, **several)
    assert emitted("pytorch", attention="sdpa", **plain, **several).text
    cpu = DeviceInfo(kind="cpu", name="a processor", total_bytes=16 * GIB)
    setting = TrainSetting(precision="fp32", parallelism="zero2", **several)
    with pytest.raises(UnsupportedError, match="on GPUs only"):
        emit_setting(tiny(), setting, "accelerate", device=cpu, estimator=FakeEstimator())


DDP = {
    "world_size": 2, "parallelism": "ddp", "ddp_bucket_view": True, "ddp_compression": "bf16",
}  # fmt: skip


def test_options_of_ddp_reach_each_trainer() -> None:
    script = emitted("pytorch", **DDP).text
    assert executed(script)["DDP"] == {"gradient_as_bucket_view": True}
    assert "wrapped.register_comm_hook(None, bf16_compress_hook)" in script
    code = emitted("accelerate", **DDP).code
    assert "DistributedDataParallelKwargs(gradient_as_bucket_view=True" in code
    assert "comm_hook=DDPCommunicationHookType.BF16" in code
    strategy = executed(emitted("lightning", **DDP).text)["TRAINER"]["strategy"]
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is True
    assert strategy._ddp_comm_hook.__name__ == "bf16_compress_hook"
    config = executed(emitted("mmengine", **DDP).text)
    assert config["model_wrapper_cfg"]["gradient_as_bucket_view"] is True


def test_transformers_takes_its_arguments(tmp_path: Any) -> None:
    from transformers import TrainingArguments

    names = executed(emitted("transformers", gradient_sync="every", **DDP).text)
    given = {**names["ARGUMENTS"], "output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    arguments = TrainingArguments(**{k: v for k, v in given.items() if k != "tf32"})
    assert arguments.ddp_find_unused_parameters is False
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    for fields in ({"parallelism": "fsdp", "fsdp_reshard": False}, {"parallelism": "zero3"}):
        names = executed(emitted("transformers", world_size=2, **fields).text)
        assert set(names["ARGUMENTS"]) <= set(inspect.signature(TrainingArguments).parameters)
    assert names["ARGUMENTS"]["bf16"] is False, "DeepSpeed would convert the model"
    assert names["ARGUMENTS"]["deepspeed"]["torch_autocast"]["dtype"] == "bfloat16"
    given = executed(emitted("transformers", world_size=2, parallelism="fsdp").text)["ARGUMENTS"]
    given |= {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    plugin = TrainingArguments(**given).fsdp_plugin_args
    assert plugin["fsdp_version"] == 2
    assert plugin["transformer_cls_names_to_wrap"] == "SwinLayer"


@pytest.mark.parametrize("stage", ZERO_PARALLEL)
def test_deepspeed_has_the_keys_it_knows(stage: str) -> None:
    config = json.loads(emitted("deepspeed", world_size=8, parallelism=stage).text)
    zero = config["zero_optimization"]
    assert zero["stage"] == int(stage[-1])
    assert zero["overlap_comm"] is (stage == "zero3"), "DeepSpeed's own, written out"
    assert zero["reduce_bucket_size"] == 6_553_600, "25 MiB of fp32"
    deepspeed = pytest.importorskip("deepspeed.runtime.zero.config")
    read = deepspeed.DeepSpeedZeroConfig(**zero)
    fields = type(read).model_fields
    assert set(zero) <= {info.alias or name for name, info in fields.items()} | set(fields)
