"""Lightning: a Python file with a LightningModule and `build_trainer()`.

Argument names as in Lightning 2.6, `Trainer`. Batch, workers, checkpointing, compilation and the
optimizer have no argument there: they are user code, and so in this file.
"""

from __future__ import annotations

from typing import Any

from planner.core.schema import TrainSetting
from planner.core.schema.distribution import DEEPSPEED
from planner.estimation.recipe import learning_rate_note
from planner.trainers.building import shown
from planner.trainers.copies import Source, sections
from planner.trainers.engine import ZERO_PARALLEL, engine_source, on_gpus, zero_notes
from planner.trainers.fine_tuning import trained_source
from planner.trainers.imports import import_block
from planner.trainers.launch import launch, nodes_notes, torchrun
from planner.trainers.parallel_source import (
    compression_hook,
    ddp_arguments,
    sharding_source,
    without_twice,
)
from planner.trainers.plan import (
    DDP_OPTIONS,
    FSDP_OPTIONS,
    IN_A_SCRIPT,
    Parallel,
    Plan,
    Refusal,
    Trainer,
    Written,
    refused,
)
from planner.trainers.pretrained import fine_tuning_notes, weights_name
from planner.trainers.source import (
    arguments,
    compiles_whole,
    image_lines,
    mapping,
    offloaded,
    placed,
    process_source,
)
from planner.trainers.steps import loader_source, rate_source, step_source
from planner.trainers.templates import render

FILENAME = "training_lightning.py"
PRECISIONS = {
    # Lightning's names: "mixed" is autocast; "true" converts the model and its inputs.
    "fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed",
    "pure-bf16": "bf16-true", "fp8": "bf16-mixed",
}  # fmt: skip


def write(plan: Plan) -> Written:
    """`training_lightning.py`: `TRAINER`, `build_model()`, `Training` (a LightningModule)."""
    run = launch(plan, torchrun("your_script.py", plan))
    found = (learning_rate_note(plan.setting, plan.model), *nodes_notes(plan.setting))
    notes = (*found, *zero_notes(plan.setting), *fine_tuning_notes(plan.model, plan.setting))
    return Written(_text(plan, run, notes), run, notes)


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """The keyword arguments of `Trainer` for the setting."""
    setting, recipe = plan.setting, plan.recipe
    # DeepSpeed autocasts by itself: for "mixed" Lightning would let it convert the model.
    by_deepspeed = setting.parallelism in DEEPSPEED
    values: dict[str, Any] = {
        "precision": "32-true" if by_deepspeed else PRECISIONS[setting.precision],
        "accumulate_grad_batches": setting.accumulate,
        "devices": setting.devices_per_node,
        "benchmark": setting.cudnn_benchmark,
    }
    if setting.nodes > 1:
        values["num_nodes"] = setting.nodes
    if plan.device == "cpu":
        values["accelerator"] = "cpu"
    if recipe.clip_norm is not None and not _clips_by_itself(setting):
        values |= {"gradient_clip_val": recipe.clip_norm, "gradient_clip_algorithm": "norm"}
    return values


def strategy_source(setting: TrainSetting) -> Source:
    """The strategy of `Trainer`: what is not PyTorch's own, of DDPStrategy
    (pytorch/strategies/ddp.py passes the rest on), ModelParallelStrategy or DeepSpeedStrategy."""
    if setting.parallelism == "none":
        return Source((), '"auto"')
    if setting.parallelism == "fsdp":
        name = "ModelParallelStrategy"
        sizes = {"data_parallel_size": setting.world_size, "tensor_parallel_size": 1}
        given = arguments({**sizes, "save_distributed_checkpoint": False})
    elif setting.parallelism in DEEPSPEED:
        name = "DeepSpeedStrategy"
        given = "config=DEEPSPEED"
    else:
        name = "DDPStrategy"
        given = arguments(ddp_arguments(setting))
    imports = [f"from lightning.pytorch.strategies import {name}"]
    if setting.ddp_compression != "none":
        line, hook = compression_hook(setting)
        imports.append(line)
        given = f"{given}, ddp_comm_hook={hook}" if given else f"ddp_comm_hook={hook}"
    return Source(tuple(imports), f"{name}({given})")


def _clips_by_itself(setting: TrainSetting) -> bool:
    """Whether the module clips: Lightning refuses to, for a fused optimizer under autocast.

    Read in Lightning 2.6, plugins/precision/amp.py: the fused ones "perform unscaling internally".
    With bf16 nothing is scaled, and the gradients are what they are.
    """
    fused = setting.optimizer_implementation == "fused"
    return bool(setting.clip_grad) and fused and setting.precision in ("bf16", "fp8")


def _text(plan: Plan, run: str, notes: tuple[str, ...]) -> str:
    setting, recipe = plan.setting, plan.recipe
    model = trained_source(plan.model, setting)
    strategy_imports, strategy = strategy_source(setting)
    sharding_imports, sharding = sharding_source(setting)
    step = step_source(plan)
    imports = (*model.imports, *step.imports, *strategy_imports, *sharding_imports)
    script = render(
        "lightning.j2", module=plan.module(FILENAME), rate=recipe.learning_rate is not None
    )
    head = (
        plan.comment(run, *shown(script, "for Lightning 2.6"), notes=notes),
        import_block((*imports, "import lightning")),
        "\n" + process_source(setting, plan.model),
        f"\nVALIDATION_BATCH_SIZE = {recipe.validation_batch_size}\n",
        f"NUM_CLASSES = {plan.model.num_classes}\n",
        f"EPOCHS = {recipe.epochs}\n",
        f"ACCUMULATE = {setting.accumulate}  # micro-batches of one optimizer step\n",
        rate_source(plan),
        loader_source(plan),
        engine_source(setting),
        mapping("TRAINER", trainer_arguments(plan)),
        _assigned('TRAINER["strategy"]', strategy),
    )
    built = placed(without_twice(model.body, sharding), _laid_out(setting))
    return sections("".join(head), built, sharding, step.body, _module(plan))


def _assigned(name: str, call: str) -> str:
    """`name = call`, the arguments on a line of their own where it would be too long."""
    line = f"{name} = {call}\n"
    if len(line) <= 101:
        return line
    function, _, given = call.removesuffix(")").partition("(")
    if len(given) <= 96:
        return f"{name} = {function}(\n    {given}\n)\n"
    lines = "".join(f"    {argument},\n" for argument in given.split(", "))
    return f"{name} = {function}(\n{lines})\n"


def _laid_out(setting: TrainSetting) -> TrainSetting:
    """What is left to bring model and images into: "bf16-true" converts both by itself."""
    kept = "fp8" if setting.precision == "fp8" else "bf16"
    return setting.model_copy(update={"precision": kept})


def _module(plan: Plan) -> str:
    setting = plan.setting
    return render(
        "lightning_module.j2",
        setting=setting,
        recipe=plan.recipe,
        pretrained=weights_name(plan.model, setting) is not None,
        compiled=arguments(setting.compile_arguments) if compiles_whole(setting) else None,
        image_lines=image_lines(_laid_out(setting)),
        offloaded=lambda lines: offloaded(lines, setting, "self.model", "images, targets"),
        clips=_clips_by_itself(setting),
    )


def refusals(plan: Plan) -> list[Refusal]:
    """Clipping that it would refuse when it runs, and fp16 for shards."""
    setting = plan.setting
    if setting.precision != "fp16":
        return []
    sharded, fused = setting.parallelism == "fsdp", setting.optimizer_implementation == "fused"
    clip = f"it does not clip the gradients of a fused optimizer in fp16 ({setting.optimizer})"
    foreach = f"optimizer={setting.optimizer_family}-foreach"
    return refused(
        (sharded, "its ModelParallelStrategy has no 16-mixed precision", "precision=bf16"),
        (setting.clip_grad and fused and not sharded, clip, foreach),
    )


TRAINER = Trainer(
    name="lightning",
    title="Lightning's Trainer",
    filename=FILENAME,
    write=write,
    expresses=(*IN_A_SCRIPT, "pure-bf16", "fp8"),
    refusals=refusals,
    parallel={
        "ddp": Parallel(DDP_OPTIONS),
        # ModelParallelStrategy has no `no_sync` (pytorch/strategies/parallel.py: of DDP only).
        "fsdp": Parallel(FSDP_OPTIONS, lambda _: {"gradient_sync": "every"}),
        **on_gpus(ZERO_PARALLEL),
    },
)
