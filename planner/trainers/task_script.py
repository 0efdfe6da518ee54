"""A plain PyTorch script for a task: `python train.py --steps N`, on the batches of your loader.

Its step is that of `planner.training`, on the module, the batch and the loss of the task. It trains
on random or repeated batches until your own loader stands in its one marked place.
"""

from __future__ import annotations

from string import Template

from planner.schema import NamedModel, TrainSetting
from planner.trainers.copies import sections
from planner.trainers.imports import import_block
from planner.trainers.launch import launch, torchrun
from planner.trainers.loader import training_load
from planner.trainers.plan import Plan, Refusal, Written
from planner.trainers.source import (
    BUDGET_IMPORT,
    arguments,
    compiles_whole,
    literal,
    mapping,
    offloaded,
    process_source,
)
from planner.trainers.steps import optimizer_source, step_constants, update_source

RATE_NOTE = (
    "No learning rate is published for your model: set yours with --lr (a task that makes its own "
    "optimizer keeps its own)."
)


def write_task_script(plan: Plan, filename: str) -> Written:
    """`filename`, whole."""
    setting = plan.setting
    run = launch(plan, torchrun(plan.path(filename), plan, "--steps 20 --lr LR"))
    optimizer_imports, optimizer = optimizer_source(setting)
    loader = "your_loader" if plan.loader is None else "DataLoader(your_data, **LOADER)"
    head = (
        plan.comment(run, "Your loader goes into batches().", notes=(RATE_NOTE,)),
        import_block((*_imports(plan), *optimizer_imports), ("argparse",)),
        f"\n{_constants(plan)}{process_source(setting)}",
    )
    batches = _BATCHES.substitute(unit=plan.unit or "items", loader=loader)
    text = sections("".join(head), batches, optimizer, _step(setting), _main(plan))
    return Written(text, run, (RATE_NOTE,))


def task_refusals(plan: Plan) -> list[Refusal]:
    """One device only: how a task's module is called in parallel is the task's own matter."""
    if plan.setting.world_size == 1:
        return []
    return [
        Refusal(
            f"the script of a task trains on one device, not on {plan.setting.world_size}",
            "Emit with --set world_size=1, and wrap the module in DistributedDataParallel.",
        )
    ]


_IMPORTS = (
    "from collections.abc import Iterator",
    "from contextlib import nullcontext",
    "from typing import Any",
    "import torch",
    "from torch import Tensor, nn",
    "from planner.tasks import Task, task_for",
    "from planner.tasks.trees import prepare",
    "from planner.training import lay_out",
)


def _imports(plan: Plan) -> tuple[str, ...]:
    found = [*_IMPORTS, f"from planner.schema import {type(plan.model).__name__}, TrainSetting"]
    if plan.setting.checkpointing != "none":
        found.append("from planner.tasks.blocks import checkpoint_as_set")
    if plan.setting.offload != "none":
        found += [
            "from planner.offloading import offload_activations",
            "from planner.tasks.trees import tensors_of",
        ]
    if plan.setting.activation_memory_budget < 1:
        found.append(BUDGET_IMPORT)
    if plan.setting.compile_scope == "blocks":
        found.append("from planner.tasks.compiling import compile_as_set")
    return tuple(found)


def _constants(plan: Plan) -> str:
    model, setting = plan.model, plan.setting
    of_model = model.model_dump(mode="json", exclude_none=True)
    if not isinstance(model, NamedModel):
        of_model = model.model_dump(mode="json", exclude_defaults=True)
    of_setting = setting.model_dump(mode="json", exclude_defaults=True)
    lines = [
        _call(f"MODEL = {type(model).__name__}", of_model),
        _call("SETTING = TrainSetting", of_setting),
        f"BATCH_SIZE = {setting.batch_size}  # {plan.unit or 'items'} of one micro-batch",
        f"ACCUMULATE = {setting.accumulate}  # micro-batches of one optimizer step",
        *step_constants(setting),
    ]
    loader = mapping("LOADER", training_load(plan)) if plan.loader is not None else ""
    return "\n".join(lines) + f"\n{loader}"


def _call(name: str, fields: dict[str, object]) -> str:
    lines = "".join(f"    {field}={literal(value)},\n" for field, value in fields.items())
    return f"{name}(\n{lines})" if lines else f"{name}()"


_BATCHES = Template(
    '''def batches(task: Task, device: torch.device) -> Iterator[Any]:
    """Put your own loader here: it yields BATCH_SIZE $unit at a time, as task.batch() makes them.

    while True:
        for batch in $loader:
            yield prepare(batch, SETTING, device)
    """
    while True:
        yield prepare(task.batch(BATCH_SIZE, device), SETTING, device)
'''
)


def _step(setting: TrainSetting) -> str:
    divided = " / ACCUMULATE" if setting.accumulate > 1 else ""
    forward = f"            loss = task.loss(call, batch){divided}\n"
    return _STEP.substitute(
        update=update_source(setting, "module"),
        forward=offloaded(forward, setting, "module", "*tensors_of(batch)"),
        optimizer="" if setting.optimizer_in_backward else _OPTIMIZER,
        average_argument="    average: list[Tensor],\n" if setting.ema else "",
    )  # fmt: skip


_OPTIMIZER = "    optimizer: torch.optim.Optimizer,\n"
_STEP = Template(
    '''def optimizer_step(
    task: Task,
    module: nn.Module,
    call: nn.Module,
$optimizer    scaler: torch.amp.GradScaler | None,
$average_argument    data: Iterator[Any],
    device: torch.device,
) -> Tensor:
    """One optimizer step over ACCUMULATE micro-batches; returns the mean loss."""
    total = torch.zeros((), device=device)
    for _ in range(ACCUMULATE):
        batch = next(data)
        with torch.autocast(device.type, dtype=AUTOCAST) if AUTOCAST else nullcontext():
$forward        (scaler.scale(loss) if scaler is not None else loss).backward()
        total += loss.detach()
        del loss, batch
$update    return total
'''
)


def _main(plan: Plan) -> str:
    setting = plan.setting
    compiled = "module"
    if setting.compile_scope == "blocks":
        compiled = "compile_as_set(module, task, MODEL, SETTING)"
    elif compiles_whole(setting):
        compiled = f"torch.compile(module, {arguments(setting.compile_arguments)})"
    made = "    average = [p.detach().clone() for p in module.parameters()]\n"
    checkpointed = "    checkpoint_as_set(module, task, MODEL, SETTING)\n"
    cuda = '"cuda" if torch.cuda.is_available() else "cpu"'
    return _MAIN.substitute(
        dtype="torch.bfloat16" if setting.precision == "pure-bf16" else "None",
        compiled=compiled,
        checkpointed=checkpointed if setting.checkpointing != "none" else "",
        scaler="torch.amp.GradScaler(device.type)" if setting.precision == "fp16" else "None",
        average_made=made if setting.ema else "",
        average=", average" if setting.ema else "",
        average_kept=', "average": average' if setting.ema else "",
        built=_BUILT_IN_BACKWARD if setting.optimizer_in_backward else _BUILT,
        optimizer="" if setting.optimizer_in_backward else "optimizer, ",
        device=cuda if plan.device == "cuda" else '"cpu"',
    )


_BUILT = """    parameters = [p for p in module.parameters() if p.requires_grad]
    own = getattr(task, "optimizer", None)
    optimizer = build_optimizer(module, options.lr) if own is None else own(parameters)
"""
_BUILT_IN_BACKWARD = "    optimizers = build_optimizers(module, options.lr)  # to be kept\n"
_MAIN = Template(
    """def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--device", default=$device)
    parser.add_argument("--output", default=None, help="checkpoint file")
    options = parser.parse_args()
    device = torch.device(options.device)
    task = task_for(MODEL, SETTING)  # your module is found where you stand
    module = task.module().train()
$checkpointed    module.to(device=device, dtype=$dtype)
    lay_out(module, SETTING)
    call: Any = $compiled
$built    scaler: torch.amp.GradScaler | None = $scaler
$average_made    data = batches(task, device)
    for step in range(1, options.steps + 1):
        loss = optimizer_step(task, module, call, ${optimizer}scaler$average, data, device)
        if step % options.log_every == 0 or step == options.steps:
            print(f"step {step}/{options.steps}  loss {float(loss):.4f}")
    if options.output is not None:
        state = {"model": module.state_dict(), "step": options.steps$average_kept}
        torch.save(state, options.output)


if __name__ == "__main__":
    main()
"""
)
