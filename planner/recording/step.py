"""The training step of a real module on an emulated GPU as a ledger; and the fork that answers a
request for one.

It is the step that a probe measures, except that large weights have no values: their pages are
never written, so that a model of any size takes next to no memory of the host.
"""

import base64
import ctypes
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from planner.core.errors import PlannerError
from planner.core.failures import SIGNS
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.core.schema.record import Phase
from planner.core.schema.setting import DEEPSPEED, SHARDED
from planner.ledger.cache import encode
from planner.ledger.ledger import LEDGER_MICRO_BATCHES, Category, Event, Ledger, PhaseEnded, Sent
from planner.libraries import names
from planner.recording.history import STREAMS, Entry, Marks, Pools, history, read_events
from planner.recording.operations import Operations, name_requests, place
from planner.recording.recordings import EMULATED_GPU, HOST, PROBED, RecordingRequest
from planner.step.ranks import sharding_notes
from planner.training.assembly import add_recipe, build_training, float8_notes, local_shard
from planner.training.setting import BUCKET_ELEMENTS
from planner.training.step import Training
from planner.training.tasks.contract import all_tensors
from planner.training.tasks.lookup import task_for

Phases = list[tuple[str, list[Event]]]
MAX_MESSAGE = 240  # characters of an error
_PIECE_BYTES = 1 << 16  # that a socket takes at once
LARGE = 1 << 16  # elements: while a model is built, only weights have more
_FILLED = tuple(
    getattr(torch.ops.aten, name).default for name in ("zeros", "ones", "full", "rand", "randn")
)


class _Unfilled(TorchDispatchMode):
    """Large tensors get an address and no values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLED and torch.Size(args[0]).numel() > LARGE:
            return torch.empty(args[0], **{k: v for k, v in kwargs.items() if k != "generator"})
        is_large = bool(args) and isinstance(args[0], Tensor) and args[0].numel() > LARGE
        if is_large and func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            return args[0]
        if is_large and func is torch.ops.aten.any.default:
            # `trunc_normal_` draws again until no value is out of bounds: these never change.
            return torch.zeros((), dtype=torch.bool)
        return func(*args, **kwargs)


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """`module.to(device, dtype)`, by the same requests for memory in the same order; but only small
    tensors, whose values a model may read, are copied."""

    def move(tensor: Tensor) -> Tensor:
        new_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.numel() > LARGE and (tensor.device != device or tensor.dtype != new_dtype):
            return torch.empty_like(tensor, device=device, dtype=new_dtype)
        return tensor.to(device, new_dtype)

    moved: nn.Module = module._apply(move)
    return moved


def _build(model: Model, setting: TrainSetting) -> Training:
    if setting.parallelism != "none":
        torch.cuda.set_device(0)
        join_alone(setting)
    with _Unfilled():  # type: ignore[no-untyped-call]
        task = task_for(model, setting)
        task.module()
    return build_training(Training, task, model, setting, torch.device("cuda", 0), _move)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Within, tensors live as long as they are referenced, as in a step that meets no garbage
    collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def record_ledger(model: Model, setting: TrainSetting, workspace_bytes: Iterable[int]) -> Ledger:
    """The ledger of building `model` and of its first optimizer steps (two, under DDP three), with
    the work of a further step. `workspace_bytes` are the sizes of cuBLAS's workspaces on this card.
    Raises what building and training raise."""
    setting = add_recipe(model, setting)
    parts = min(setting.accumulate, LEDGER_MICRO_BATCHES)
    setting = setting.model_copy(update={"accumulate": parts})
    marks, num_steps = Marks(), steps_until_steady(setting)
    with _collector_off(), history() as entries, marks.writing():
        training = _build(model, setting)
        marks.name(training.model)
        marks.end("build", 0)
        _tag_build(marks, training)
        for step in range(num_steps):
            training.step(partial(_end_phase, marks, training, step))
            finish_collectives()
    operations, watched = _watched_step(training)
    phases, names = operations.phases, operations.names
    labels = name_requests(entries, watched, names, len(phases), num_steps)
    staying: dict[int, Category] = dict.fromkeys(workspace_bytes, "workspace")
    staying |= _bucket_bytes(phases, training)
    is_zero = setting.parallelism in DEEPSPEED
    buckets = (2 * BUCKET_ELEMENTS, 4 * BUCKET_ELEMENTS) if is_zero else ()
    pools = Pools(staying, stream_names(training.model, setting), buckets)
    events = read_events(entries, marks, labels, pools)
    return Ledger(
        tuple(_with_work(events, phases)), setting.batch_size,
        sum(p.numel() for p in training.model.parameters()),
        (*_notes(training), *operations.notes), unit=str(getattr(training.task, "unit", "")),
        own_optimizer=_own_optimizer(training), is_recorded=True,
    )  # fmt: skip


def _bucket_bytes(phases: Phases, training: Training) -> dict[int, Category]:
    """The sizes of DDP's buckets: those of the arrays that it sums."""
    if training.train_setting.parallelism != "ddp":
        return {}
    sent = [e for _, work in phases for e in work if type(e) is Sent]
    return {e.num_bytes: "gradients" for e in sent if e.collective == "all_reduce"}


def _watched_step(training: Training) -> tuple[Operations, list[Entry]]:
    """The operations of a step, and the allocator's history over it. Functions that a library
    compiles for its own eager step run eagerly here."""
    setting = training.train_setting
    operations = Operations(training.model, setting)
    eager = nullcontext() if setting.compiles else torch.compiler.set_stance("force_eager")
    with _collector_off(), history() as watched, eager, operations.hearing(), operations:
        operations.watch(training.optimizers)
        training.step(operations.end)
    return operations, watched


def _own_optimizer(training: Training) -> str:
    """The class of the optimizer that the task makes; "" where it makes none."""
    return type(training.optimizer).__name__ if hasattr(training.task, "optimizer") else ""


def _notes(training: Training) -> Iterator[str]:
    yield f"recorded on an emulated GPU with torch {torch.__version__}"
    if training.train_setting.precision == "fp8":
        yield from float8_notes(training.model, training.train_setting)
    yield from world_notes(training.model, training.train_setting)
    if own := _own_optimizer(training):
        yield f"the task makes its optimizer ({own})"


def _tag_build(marks: Marks, training: Training) -> None:
    marks.tag(map(local_shard, training.model.parameters()), "parameters")
    marks.tag(training.model.buffers(), "buffers")
    marks.tag(all_tensors(training.batch), "activations")
    marks.tag(training.average or (), "optimizer_state")


def _end_phase(marks: Marks, training: Training, step: int, phase: Phase) -> None:
    marks.end(phase, step)
    if phase == "backward":
        weights = [p for p in training.parameters if p.grad is not None]
        marks.tag([p.grad for p in weights if p.grad is not None], "gradients", weights)
        marks.tag(whole_gradients(training.model, training.train_setting), "gradients")
    elif phase == "optimizer":
        marks.tag(_state(training), "optimizer_state")


def _state(training: Training) -> Iterator[Tensor]:
    of_model = {id(parameter) for parameter in training.model.parameters()}
    for optimizer in training.optimizers:
        for state in getattr(optimizer, "state", {}).values():
            yield from all_tensors(state)
        for group in getattr(optimizer, "param_groups", ()):  # ZeRO's copies in fp32
            yield from (weight for weight in group["params"] if id(weight) not in of_model)
    if training.scaler is not None:
        scale = training.scaler._scale, training.scaler._growth_tracker
        yield from (tensor for tensor in scale if tensor is not None)


def _with_work(events: list[Event], phases: Phases) -> Iterator[Event]:
    """The events, with the work of each phase before the mark of its end, in every step."""
    work = cycle(work for _, work in phases)
    for event in events:
        if type(event) is PhaseEnded and event.phase != "build":
            yield from next(work)
        yield event


def error_of(model: Model, raised: BaseException) -> PlannerError:
    """The error for a person, from what building or training `model` raised."""
    where = place(traceback.extract_tb(raised.__traceback__))
    kind = type(raised).__name__
    first_line = str(raised).strip().partition("\n")[0][:MAX_MESSAGE]
    message = f"the step of {model.title} raised {kind} at {where}"
    message += f": {first_line}" if first_line else "."
    sign = next((sign for sign in SIGNS if sign.is_sure(f"{kind}: {first_line}")), None)
    if sign is None:
        return PlannerError(message, f"{_input_hint(model)}{PROBED}")
    way_out = HOST if sign.kind == "out of host memory" else " ".join(sign.ways_out())
    return PlannerError(f"{message}\n{sign.meaning}", way_out)


def _input_hint(model: Model) -> str:
    """Which input a module is given, and how it is given another."""
    task = (
        "If the model takes another input than this step gives it, or returns something else, let "
        "its factory return a task: the module, its batch and its loss. "
    )
    if not isinstance(model, FactoryModel):
        return task
    height, width = model.image_size
    return (
        f"A module is given images of {height}x{width} px and {model.num_classes} classes: "
        f"--image-size and --num-classes say others. {task}"
    )


# One process as one rank of many: torch's own NCCL group over the emulated NCCL, which waits for no
# other rank.
#
# torch's NCCL holds what was sent until its watchdog, which looks every 100 ms, sees that it was
# summed, and then until the next collective. On a card steps are longer than that; here one takes
# 20 ms, or any time on a busy host. So it sees nothing within a step, and all between two.


def steps_until_steady(setting: TrainSetting) -> int:
    """The number of optimizer steps until the next repeats the last. DDP rebuilds its buckets after
    the first step, and the second still holds the old ones."""
    return 3 if setting.parallelism == "ddp" else 2


def join_alone(setting: TrainSetting) -> None:
    """Makes this process the first rank of the world of `setting`."""
    distributed.init_process_group(
        "nccl", store=HashStore(), rank=0, world_size=setting.world_size,
        timeout=timedelta(days=1),  # a step may be long in which the watchdog sees nothing finish
    )  # fmt: skip
    _hold_watchdog(True)


def finish_collectives() -> None:
    """Lets NCCL's watchdog see that the collectives of the steps before are done."""
    if distributed.is_available() and distributed.is_initialized():
        _hold_watchdog(False)
        distributed.group.WORLD._wait_for_pending_works()  # type: ignore[union-attr]
        _hold_watchdog(True)


def _hold_watchdog(is_held: bool) -> None:
    ctypes.CDLL("libcuda.so.1").emulated_hold_watchdog(ctypes.c_bool(is_held))


def stream_names(module: nn.Module, setting: TrainSetting) -> dict[int, str]:
    """The names of FSDP2's streams, by their addresses in the allocator's history."""
    if setting.parallelism not in SHARDED:
        return {}
    root: Any = module
    context = root._get_fsdp_state()._comm_ctx
    return {getattr(context, f"{name}_stream").cuda_stream: name for name in STREAMS}


def whole_gradients(module: nn.Module, setting: TrainSetting) -> Iterator[Tensor]:
    """The gradients that FSDP2 keeps unsharded until a later micro-batch sums them."""
    for unit in _units(module) if setting.parallelism in SHARDED else ():
        group = unit._get_fsdp_state()._fsdp_param_group
        for weight in group.fsdp_params if group is not None else ():
            kept = weight.unsharded_accumulated_grad
            whole = getattr(weight, "_unsharded_param", None)
            yield from (t for t in (kept, getattr(whole, "grad", None)) if t is not None)


def world_notes(module: nn.Module, setting: TrainSetting) -> Iterator[str]:
    """How weights or gradients are spread, in words."""
    if setting.parallelism in SHARDED:
        _, *blocks = _units(module)
        inside = {id(p) for block in blocks for p in block.parameters()}
        own = sum(p.numel() for p in module.parameters() if id(p) not in inside)
        yield from sharding_notes(setting, len(blocks), own, distributed.get_rank())


def _units(module: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards each by itself, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


# In a fork of the warm process: CUDA begins there with an empty device.


def serve(channel: int, text: str) -> NoReturn:
    """Calls the function of a request (JSON), and writes what it returns to the channel, encoded as
    a cache file, in pieces."""
    try:
        request = RecordingRequest.model_validate_json(text)
        names.look_up = names.look_up_in_process
        os.environ |= request.environment | {EMULATED_GPU: request.card}
        os.chdir(request.folder)
        sys.path[:0] = [path for path in request.paths if path not in sys.path]
        answer = base64.b64encode(encode({}, _call(request)))
        for start in range(0, len(answer), _PIECE_BYTES):
            os.write(channel, answer[start : start + _PIECE_BYTES])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _call(request: RecordingRequest) -> Any:
    module, _, name = request.function.partition(":")
    subject = {"model": request.model, "setting": request.setting}
    arguments = request.arguments | {key: v for key, v in subject.items() if v is not None}
    try:
        return getattr(importlib.import_module(module), name)(**arguments)
    except PlannerError as error:
        return error
    except (Exception, SystemExit) as raised:
        if request.model is None:
            raise
        return error_of(request.model, raised)
