"""A real module trained for some steps on fake tensors: what it allocates, in order."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo  # else the first step imports it, and leaves frames and their tensors alive
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planner.core.errors import PlannerError
from planner.core.schema import Model, TrainSetting
from planner.core.schema.distribution import SHARDED
from planner.ledger.ledger import Event, Freed, Tagged
from planner.libraries.building import Build
from planner.step.frames import plain_calls
from planner.step.optimizers.adamw_8bit import notes_of
from planner.step.optimizers.offloaded import offloading_notes
from planner.step.reducer import steps_until_steady
from planner.step.reducer_notes import reducer_notes
from planner.trace.building import build_task, given_batch, make_fake
from planner.trace.compiled import Regions
from planner.trace.cuda_rules import as_on_cuda
from planner.trace.data_parallel import DataParallel
from planner.trace.eight_bit import compiled_step_as_measured, load_8bit
from planner.trace.faults import BrokenTraceError, quiet_fakes
from planner.trace.offloaded import Offloaded
from planner.trace.paths import ModulePaths
from planner.trace.recorder import Recorder
from planner.trace.sums import GradientSums
from planner.trace.trees import tensors_in
from planner.training import offloading
from planner.training import step as training_step
from planner.training.parallel.spread import Spread
from planner.training.step import Training, import_lion
from planner.training.tasks import Task
from planner.training.tasks.blocks import blocks_to_shard
from planner.training.tasks.trees import map_tensors, tensors_of

if TYPE_CHECKING:
    from planner.trace.sharding import Sharding


# What cuDNN takes for them only cuDNN says (cudnnGetRNNTempSpaceSizes).
_RECURRENT = (
    "recurrent layers are traced as the CPU runs them: what cuDNN keeps of them for backward, its "
    "workspace, and in 16 bits its copy of their weights are not counted"
)


@dataclass(frozen=True)
class Trace:
    """What building a model and training it for `num_steps` optimizer steps allocates and frees.
    `assumptions` say what was checkpointed, and what was assumed of values that the step read;
    `unit` and `own_optimizer` are as in a `Ledger`."""

    events: tuple[Event, ...]
    num_parameters: int
    num_steps: int
    assumptions: tuple[str, ...] = ()
    unit: str = ""
    own_optimizer: str = ""


def trace_training(
    build: Build,
    model: Model,
    setting: TrainSetting,
    num_steps: int | None = None,
    gradient_sums: GradientSums = "out_of_place",
    detailed: bool = False,
    compiled: Regions | None = None,
    rank: int = 0,
) -> Trace:
    """Runs `Training.step` of the module that `build` makes on fake tensors; records storages.

    `compiled` are the kernels that run in place of the module's code, or of its blocks'. `detailed`
    adds what is computed (`Computed`), what storages are for (`Tagged`) and the module each came
    from; allocations and releases are the same without. `rank` is which of the devices that share
    the weights it is.
    Raises UnsupportedError where the model reads a value, BrokenTraceError where it breaks.
    """
    load_8bit(setting)
    if setting.optimizer_family == "lion":
        import_lion()  # else it would be imported amid fake tensors
    with sharding_of(setting, rank) as sharding:
        steps = steps_until_steady(setting) if num_steps is None else num_steps
        return _trace(build, model, setting, steps, gradient_sums, detailed, compiled, sharding)


def _trace(
    build: Build,
    model: Model,
    setting: TrainSetting,
    num_steps: int,
    gradient_sums: GradientSums,
    detailed: bool,
    compiled: Regions | None,
    sharding: Sharding | None,
) -> Trace:
    with unset_fake_temporarily():
        task, module, notes = build_task(build, model, setting)
        if compiled is not None:
            compiled.run_in(module)
            notes = (*notes, *compiled.notes)
        if any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
            notes = (*notes, _RECURRENT)
        batch = given_batch(task, setting.batch_size)
        held_out = given_batch(task, setting.validation_batch_size)
    with plain_calls(), collector_off(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        recorder = Recorder(gradient_sums, ModulePaths(module) if detailed else None)
        recorder.tried_convolutions = set() if setting.cudnn_benchmark else None
        make_fake(module, mode, recorder.values.learn)
        num_parameters = sum(p.numel() for p in module.parameters())
        add_module(recorder, module)
        streams = sharding.streams(recorder) if sharding is not None else contextlib.nullcontext()
        compiled_step = compiled_step_as_measured(setting, recorder.events, detailed)
        cuda = training_as_on_cuda(recorder)
        interruptible = between_operations(recorder)
        with interruptible, streams, as_on_cuda(), quiet_fakes(), recorder, cuda, compiled_step:
            try:
                if sharding is not None:
                    notes = (*notes, *sharding.shard(module, blocks_to_shard(module, task, model)))
                    recorder.tag([p for t in module.parameters() for p in _parts(t)], "parameters")
                fake = partial(map_tensors, change=mode.from_tensor)
                given = _Given(fake(batch), fake(held_out))
                spread = sharding.as_spread(module) if sharding is not None else None
                said, own = _train(recorder, module, task, setting, num_steps, given, spread)
                notes = (*notes, *said)
            except PlannerError:
                raise
            except Exception as error:
                raise BrokenTraceError(recorder.running, batch) from error
        events = tuple(in_steady_order(recorder.events))
        del module
    known = (*notes_of(setting), *offloading_notes(setting))
    assumptions = (*notes, *known, *sorted(recorder.values.assumed))
    unit = str(getattr(task, "unit", ""))
    return Trace(events, num_parameters, num_steps, assumptions, unit, own)


@contextlib.contextmanager
def sharding_of(setting: TrainSetting, rank: int) -> Iterator[Sharding | None]:
    """How the weights of `setting` are sharded, under a process group of its own; None where they
    are not."""
    if setting.parallelism not in SHARDED:
        yield None
        return
    from planner.trace.sharding import fake_world  # imports torch.distributed.fsdp

    with fake_world(setting, rank) as sharding:
        yield sharding


def in_steady_order(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, each run of releases and each run of tags sorted by storage.

    Autocast empties its cache, and tags are found, in the order of addresses, which differs from
    one recording to the next; nothing depends on the order within such a run.
    """
    for kind, run in itertools.groupby(events, type):
        if kind is Freed or kind is Tagged:
            yield from sorted(run, key=lambda event: event.storage)  # type: ignore[union-attr]
        else:
            yield from run


class _Given(NamedTuple):
    """The batches of a user's task, made fake; None where the task makes them of fake tensors."""

    batch: Any
    validation: Any


def _train(
    recorder: Recorder,
    module: nn.Module,
    task: Task,
    setting: TrainSetting,
    num_steps: int,
    given: _Given,
    spread: Spread | None,
) -> tuple[tuple[str, ...], str]:
    """Returns what is to be said of it, and the class of the task's own optimizer."""
    parallel = DataParallel(recorder, module, setting) if setting.parallelism == "ddp" else None
    batch = given.batch
    if batch is None:
        batch = task.batch(setting.batch_size, torch.device("cpu"))
    tensors = list(tensors_of(batch))
    recorder.note(tensors, "batch")
    recorder.values.forget_values(tensors)
    recorder.tag(tensors, "activations")
    training = Training(module, setting, task, batch, parallel, parallel or spread)
    recorder.tag([p for t in training.ema or [] for p in _parts(t)], "optimizer_state")
    watch_optimizer(recorder, training)
    recorder.mark("build", 0)
    for step in range(num_steps):
        training.step(partial(_end_phase, recorder, training, step))
    if setting.validation_batch_size:
        recorder.note(list(tensors_of(given.validation)), "batch")
        training.validate(partial(_end_phase, recorder, training, num_steps - 1), given.validation)
    own = type(training.optimizer).__name__ if hasattr(task, "optimizer") else ""
    return reducer_notes(parallel.reducer) if parallel is not None else (), own


def _end_phase(recorder: Recorder, training: Training, step: int, phase: str) -> None:
    if phase == "optimizer" and step == 0:
        recorder.tag(_optimizer_state(training), "optimizer_state")
    if phase == "zero_grad" and isinstance(training.call, DataParallel):
        # The next forward does this: here, so that each step from the second on repeats.
        training.call.reducer.rebuild()
    recorder.mark(phase, step)


def _optimizer_state(training: Training) -> list[Tensor]:
    kept = [values for optimizer in training.optimizers for values in optimizer.state.values()]
    if training.scaler is not None:
        kept.append({"scale": training.scaler._scale, "growth": training.scaler._growth_tracker})
    return [plain for tensor in tensors_in(kept) for plain in _parts(tensor)]


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that one of a library's own kind is made of; itself, where it is none."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)
    return [part for part in inner if isinstance(part, Tensor)]


def add_module(recorder: Recorder, module: nn.Module, path: str = "") -> None:
    """Parameters and buffers in the order in which `module.to(device)` would allocate them."""
    for name, child in module.named_children():
        add_module(recorder, child, f"{path}.{name}" if path else name)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            recorder.add(parameter, name, path)
            recorder.tag([parameter], "parameters")
    for name, buffer in module._buffers.items():
        if buffer is not None:
            recorder.add(buffer, name, path)
            recorder.tag([buffer], "buffers")


def watch_optimizer(recorder: Recorder, training: Training) -> None:
    """`step` scalars stay on the host unless the implementation is fused or capturable."""
    groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
    recorder.scalars_on_host = not any(g.get("fused") or g.get("capturable") for g in groups)

    def enter(*_: Any) -> None:
        recorder.begin_optimizer()

    def leave(*_: Any) -> None:
        recorder.end_optimizer()

    for optimizer in training.optimizers:
        optimizer.register_step_pre_hook(enter)
        optimizer.register_step_post_hook(leave)


@contextlib.contextmanager
def training_as_on_cuda(recorder: Recorder) -> Iterator[None]:
    """What a training step does on CUDA where the CPU does something else."""
    with foreach_as_on_cuda(), scaler_as_on_cuda(), offload_as_on_cuda(recorder):
        yield


@contextlib.contextmanager
def foreach_as_on_cuda() -> Iterator[None]:
    """Gradient clipping takes foreach by itself on CUDA, and not on the CPU."""
    from torch.nn.utils import clip_grad

    def always(tensors: Any, device: Any) -> bool:  # a Mock would keep the gradients it is given
        return True

    with mock.patch.object(clip_grad, "_has_foreach_support", always):
        yield


@contextlib.contextmanager
def scaler_as_on_cuda() -> Iterator[None]:
    """GradScaler takes its step whatever it found: no value of a fake tensor can be read."""

    def take_step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    with mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", take_step):
        yield


@contextlib.contextmanager
def offload_as_on_cuda(recorder: Recorder) -> Iterator[None]:
    """The fake tensors of the device say that they are on a CPU: the recorder knows which are."""
    with (
        mock.patch.multiple(
            offloading,
            is_on_device=recorder.is_on_device,
            copy_to_host=recorder.to_host,
            copy_back=recorder.to_device,
        ),
        mock.patch.object(training_step, "offload_optimizer", partial(Offloaded, recorder)),
    ):
        yield


@contextlib.contextmanager
def between_operations(recorder: Recorder) -> Iterator[None]:
    """Ctrl-C ends the trace at its next operation, or here: amid one torch may swallow what is
    raised (4 of 60 times on a ViT, torch 2.14). A second one is raised at once."""

    def hear(*_: object) -> None:
        if recorder.is_interrupted:
            raise KeyboardInterrupt
        recorder.is_interrupted = True

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if recorder.is_interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Lifetimes must be those of reference counts: the cyclic collector would hide a leak.

    What building left in cycles goes first: imports leave frames there, and frames their callers.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
