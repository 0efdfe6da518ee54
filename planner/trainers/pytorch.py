"""A plain PyTorch training script that runs: `python train.py DATA` or `--synthetic`.

Its step is that of `planner.training`, line for line what was probed; around it stand the data, a
warm-up and cosine schedule, validation and checkpoints. Only native models import the planner.
"""

from __future__ import annotations

from string import Template
from typing import get_args

from planner.schema import TrainSetting
from planner.schema.loading import PIPELINES
from planner.schema.setting import LABEL_SMOOTHING
from planner.trainers.copies import sections
from planner.trainers.fine_tuning import trained_source
from planner.trainers.imports import import_block
from planner.trainers.launch import launch, nodes_notes, torchrun
from planner.trainers.loader import train_loader
from planner.trainers.parallel_source import (
    checkpoint_source,
    distribute_source,
    synchronised,
    without_twice,
)
from planner.trainers.plan import (
    DDP_OPTIONS,
    FSDP_OPTIONS,
    SYNC,
    LeverName,
    Parallel,
    Plan,
    Refusal,
    Trainer,
    Written,
)
from planner.trainers.pretrained import fine_tuning_notes, weights_name
from planner.trainers.recipe import EPOCHS, WARMUP_EPOCHS, WORKERS, learning_rate_note, recipe_of
from planner.trainers.script_data import (
    IMPORTS,
    data_notes,
    data_refusals,
    data_source,
    own_factory,
    standard_modules,
)
from planner.trainers.source import arguments, compiles_whole, offloaded, placed, process_source
from planner.trainers.steps import MIXING, SCHEDULE, optimizer_source, step_constants, update_source
from planner.trainers.task_script import task_refusals, write_task_script

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FILENAME = "train.py"


def write(plan: Plan) -> Written:
    """`train.py`, whole."""
    if plan.is_task:
        return write_task_script(plan, FILENAME)
    setting, recipe = plan.setting, recipe_of(plan.setting)
    script, factory = plan.path(FILENAME), own_factory(plan)
    rate = "" if recipe.learning_rate is not None else " --lr LR"
    loaded = " --pretrained" if weights_name(plan.model, setting) is not None else ""
    data = "" if factory else "DATA"
    run = launch(plan, torchrun(script, plan, f"{data}{loaded}{rate}".strip()))
    trial = launch(plan, torchrun(script, plan, f"--synthetic --steps 20{rate}"))
    tuning = fine_tuning_notes(plan.model, setting)
    notes = (learning_rate_note(setting), *nodes_notes(setting), *tuning, *data_notes(plan))
    layout = f"(data: {factory})" if factory else "(DATA/train/CLASS/*.jpg, DATA/val/CLASS/*.jpg)"
    model, optimizer = trained_source(plan.model, setting), optimizer_source(setting)
    several = distribute_source(setting)
    pieces = (model, several, optimizer, SCHEDULE)
    imports = (*(line for piece in pieces for line in piece.imports), *_IMPORTS, *IMPORTS)
    head = (
        plan.comment(run, layout, f" or: {trial}", notes=notes),
        import_block(imports, ("argparse", "os", "time", *standard_modules(plan))),
        f"\n{_constants(plan)}{process_source(setting)}",
    )
    text = sections(
        "".join(head),
        placed(without_twice(model.body, several.body), setting),
        several.body,
        optimizer.body,
        SCHEDULE.body,
        _step(setting),
        MIXING.body if recipe.mixes else "",
        data_source(plan),
        _PROFILER,
        _loop(plan, bool(several.body)),
        _main(plan),
    )
    return Written(text, run, notes)


def refusals(plan: Plan) -> list[Refusal]:
    """Everything of a setting is written out; a task has one device."""
    return task_refusals(plan) if plan.is_task else data_refusals(plan)


_IMPORTS = (
    "from collections.abc import Iterator",
    "from contextlib import nullcontext",
    "from typing import Any",
    "import torch",
    "import torch.distributed as dist",
    "from torch import Tensor, nn",
    "from torch.nn import functional as F",
)


def _constants(plan: Plan) -> str:
    setting = plan.setting
    assert plan.model.image_size is not None
    height, width = plan.model.image_size
    lines = [
        f"BATCH_SIZE = {setting.batch_size}  # images of one device and micro-batch",
        f"ACCUMULATE = {setting.accumulate}  # micro-batches of one optimizer step",
        f"WORLD_SIZE = {setting.world_size}  # devices",
        f"VALIDATION_BATCH_SIZE = {recipe_of(setting).validation_batch_size}",
        f"HEIGHT, WIDTH = {height}, {width}",
        f"CHANNELS = {plan.model.in_channels}",
        f"NUM_CLASSES = {plan.model.num_classes}",
        f"MEAN, STD = {MEAN}, {STD}  # of ImageNet's pixels",
    ]
    return "\n".join((*lines, *step_constants(setting))) + "\n"


def _loop(plan: Plan, several: bool) -> str:
    """The training itself, on one device or `several`."""
    setting = plan.setting
    loads = weights_name(plan.model, setting) is not None
    return _LOOP.substitute(
        compiled=_compiled(setting),
        pretrained="options.pretrained" if loads else "",
        ema_made=_EMA_MADE if setting.ema else "",
        ema_argument=", average" if setting.ema else "",
        scaler="torch.amp.GradScaler(device.type)" if setting.precision == "fp16" else "None",
        seeded=_SEEDED if several else "",
        distributed="    call = distribute(model, call, device)\n" if several else "",
        averaged=_AVERAGED if several else "",
        saved=checkpoint_source(setting),
        **_stepping(setting),
    )


def _compiled(setting: TrainSetting) -> str:
    if not compiles_whole(setting):
        return "    call: nn.Module = model\n"
    return f"    call: nn.Module = torch.compile(model, {arguments(setting.compile_arguments)})\n"


def _stepping(setting: TrainSetting) -> dict[str, str]:
    """The loop's lines about its optimizer and schedule; in backward each weight has its own."""
    if setting.optimizer_in_backward:
        return {
            "built": "    optimizers = build_optimizers(model, options.lr)\n",
            "optimizer": "",
            "scheduled": "    schedules = [build_schedule(o, steps, warmup) for o in optimizers]\n",
            "stepped": "        for schedule in schedules:\n            schedule.step()\n",
        }
    return {
        "built": "    optimizer = build_optimizer(model, options.lr)\n",
        "optimizer": "optimizer, ",
        "scheduled": "    schedule = build_schedule(optimizer, steps, warmup)\n",
        "stepped": "        schedule.step()\n",
    }


_EMA_MADE = "    average = [p.detach().clone() for p in model.parameters()]\n"


def _step(setting: TrainSetting) -> str:
    smoothing = f", label_smoothing={LABEL_SMOOTHING}" if setting.loss == "label-smoothing" else ""
    forward = (
        "        output = call(images)\n"
        '        logits = getattr(output, "logits", output)\n'
        f"        loss = F.cross_entropy(logits, targets{smoothing})\n"
    )
    return _STEP.substitute(
        forward=offloaded(forward, setting, "call", "images, targets"),
        backward=synchronised(setting, _BACKWARD),
        index="index" if "index" in synchronised(setting, _BACKWARD) else "_",
        update=update_source(setting, "model"),
        optimizer="" if setting.optimizer_in_backward else _OPTIMIZER,
        average_argument="\n    average: list[Tensor]," if setting.ema else "",
        divided="    return loss / ACCUMULATE\n" if setting.accumulate > 1 else "    return loss\n",
    )  # fmt: skip


_BACKWARD = """\
        loss = forward(call, images, targets)
        (scaler.scale(loss) if scaler is not None else loss).backward()
"""
_SEEDED = "    torch.manual_seed(options.seed + rank)  # each rank drops and mixes by itself\n"
_AVERAGED = """\
            dist.all_reduce(loss)  # each rank has the mean of its own images
            loss = loss / WORLD_SIZE
"""
_OPTIMIZER = "    optimizer: torch.optim.Optimizer,\n"
_STEP = Template(
    '''def forward(call: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """The loss of one micro-batch, divided by the number of them."""
    with torch.autocast(images.device.type, dtype=AUTOCAST) if AUTOCAST else nullcontext():
$forward$divided

def optimizer_step(
    call: nn.Module,
    model: nn.Module,
$optimizer    scaler: torch.amp.GradScaler | None,$average_argument
    batches: Iterator[tuple[Tensor, Tensor]],
) -> Tensor:
    """One optimizer step over ACCUMULATE micro-batches; returns the mean loss."""
    total: Tensor | float = 0.0
    for $index in range(ACCUMULATE):
        images, targets = next(batches)
${backward}        total = total + loss.detach()
        del loss
$update    assert isinstance(total, Tensor)
    return total
'''
)

_PROFILER = '''def profiler(folder: Path | None) -> torch.profiler.profile | None:
    """Traces steps 3 to 5 into `folder`; open the trace at ui.perfetto.dev."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    started = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda ended: ended.export_chrome_trace(str(folder / "trace.json.gz")),
    )
    started.start()
    return started
'''
_LOOP = Template(
    """def train(options: argparse.Namespace, device: torch.device, rank: int) -> None:
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = build_model($pretrained).to(device).train()
$seeded$compiled$distributed$built    scaler: torch.amp.GradScaler | None = $scaler
$ema_made    waits = Waits(device)
    if options.synthetic:
        batches, steps_per_epoch, validation = synthetic_batches(device), options.steps, None
    else:
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() - options.workers))
        data = data_loader(options, rank, train=True)
        validation = data_loader(options, rank, train=False)
        batches = on_device(data, device, True, waits)
        steps_per_epoch = data.sampler.num_batches // ACCUMULATE
        if steps_per_epoch == 0:
            step_images = BATCH_SIZE * ACCUMULATE * WORLD_SIZE
            found = data.sampler.num_images
            raise SystemExit(f"there are {found} images, and a step takes {step_images}")
    watch = None
    if options.watch is not None:
        import planner  # to watch only: 'planner explain DIR' reads what it writes

        plan = options.watch if (options.watch / "recommendation.json").is_file() else None
        watch = planner.watch(plan, options.watch, device=str(device))
        watch.open()
        batches = iter(watch.batches(batches))
    steps = options.steps or options.epochs * steps_per_epoch
    warmup = max(1, min(options.warmup_epochs * steps_per_epoch, steps // 10))
$scheduled    profiled = profiler(options.profile if rank == 0 else None)
    since, images = time.perf_counter(), 0
    for step in range(1, steps + 1):
        loss = optimizer_step(call, model, ${optimizer}scaler$ema_argument, batches)
$stepped        if profiled is not None:
            profiled.step()
        if watch is not None:
            watch.step(loss=loss, scaler=scaler)
        images += BATCH_SIZE * ACCUMULATE * WORLD_SIZE
        if step % options.log_every == 0 or step == steps:
$averaged\
            value = float(loss)  # waits for the device: the time below is of finished steps
            seconds = time.perf_counter() - since
            speed, waited = images / seconds, waits.seconds() / seconds
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            if rank == 0:
                print(
                    f"step {step}/{steps}  loss {value:.4f}  {speed:.1f} images/s  "
                    f"{waited:.0%} waited for data  {peak:.2f} GiB",
                    flush=True,
                )
            since, images = time.perf_counter(), 0
        if step % steps_per_epoch == 0 or step == steps:
            paused = time.perf_counter()
            if validation is not None:
                share = accuracy(model, validation, device)
                if rank == 0:
                    print(f"step {step}/{steps}  validation {share:.2%}")
$saved            since += time.perf_counter() - paused
            if watch is not None:
                watch.skip(time.perf_counter() - paused)
    if profiled is not None:
        profiled.stop()
    if watch is not None:
        watch.close()
"""
)


def _main(plan: Plan) -> str:
    setting, loader, factory = plan.setting, train_loader(plan), own_factory(plan)
    rate = recipe_of(setting).learning_rate
    given = (
        f'default={rate:g}, help="for the global batch of {setting.global_batch}"'
        if rate is not None
        else 'required=True, help="no published rate for this optimizer"'
    )
    device = '"cuda" if torch.cuda.is_available() else "cpu"' if plan.device == "cuda" else '"cpu"'
    return _MAIN.substitute(
        lr=given,
        device=device,
        epochs=EPOCHS,
        warmup_epochs=WARMUP_EPOCHS,
        data="" if factory else _DATA_ARGUMENT,
        asked="" if factory else _DATA_ASKED,
        workers=loader.workers
        if plan.loader is not None
        else f"min({WORKERS}, os.cpu_count() or 1)",
        prefetch=loader.prefetch_factor or 2,
        pin=loader.pin_memory,
        persistent=loader.persistent_workers,
        run=_RUN_SEVERAL if setting.parallelism != "none" else _RUN_ONE,
        pretrained=_PRETRAINED if weights_name(plan.model, setting) is not None else "",
    )


_RUN_ONE = "    train(options, device, rank)\n"
_RUN_SEVERAL = """\
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    train(options, device, rank)
    dist.destroy_process_group()
"""
_PRETRAINED = (
    '    parser.add_argument("--pretrained", action="store_true", help="load published weights")\n'
)
_DATA_ARGUMENT = """\
    parser.add_argument("data", nargs="?", type=Path, help="folder: train/ and perhaps val/")
"""
_DATA_ASKED = """\
    if options.synthetic == (options.data is not None):
        parser.error("give a data folder, or --synthetic")
"""
_MAIN = Template(
    """def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
$data\
    parser.add_argument("--synthetic", action="store_true", help="random images, for --steps")
$pretrained\
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: by --epochs")
    parser.add_argument("--epochs", type=int, default=$epochs)
    parser.add_argument("--warmup-epochs", type=int, default=$warmup_epochs)
    parser.add_argument("--lr", type=float, $lr)
    # Of each process. Every worker prefetches so many batches.
    parser.add_argument("--workers", type=int, default=$workers)
    parser.add_argument("--prefetch-factor", type=int, default=$prefetch)
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--pin-memory", action=flag, default=$pin)
    parser.add_argument("--persistent-workers", action=flag, default=$persistent)
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--device", default=$device)
    parser.add_argument("--output", type=Path, default=None, help="checkpoint file")
    parser.add_argument("--profile", type=Path, default=None, help="folder: a trace of 3 steps")
    parser.add_argument("--watch", type=Path, metavar="DIR", help="planner.watch writes there")
    options = parser.parse_args()
$asked\
    if options.synthetic and not options.steps:
        parser.error("--synthetic needs --steps")
    if options.profile is not None and 0 < options.steps < 5:
        parser.error("--profile is of steps 3 to 5, and --steps is less")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != WORLD_SIZE:
        law = f"each of {WORLD_SIZE=} devices needs a process, and the number started is {world}"
        parser.error(f"{law}; use the command at the top of this file")
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device(options.device)
$run

if __name__ == "__main__":
    main()
"""
)


TRAINER = Trainer(
    name="pytorch",
    title="the PyTorch script",
    filename=FILENAME,
    write=write,
    expresses=get_args(LeverName),
    refusals=refusals,
    pipelines=PIPELINES,
    parallel={
        "ddp": Parallel(DDP_OPTIONS | SYNC),
        "fsdp": Parallel(FSDP_OPTIONS | SYNC),
        "hsdp": Parallel(FSDP_OPTIONS | SYNC | {"fsdp_shard_size"}),
    },
)
