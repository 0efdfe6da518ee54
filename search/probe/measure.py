"""A short real training run: build, warm up, time whole optimizer steps, read memory.

Runs in the worker alone. Any failure of the model ends as an outcome, never as an exception.
"""

from __future__ import annotations

import importlib
import logging
import random
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from planner.errors import PlannerError, UnsupportedError
from planner.schema import FactoryModel, ProbeStatus
from planner.schema.record import PhaseBytes
from planner.training import Training, make_batch
from planner.units import format_bytes
from search.probe.failure import is_allocation_failure
from search.probe.meter import Mark, Meter, make_meter
from search.probe.protocol import OutcomeMessage, ProbeRequest
from search.probe.report import Report
from search.probe.stopping import StopRule

# CUDA graphs (reduce-overhead, max-autotune) are run once, recorded once and replayed from then on:
# two more steps than eager needs until every step is alike.
_GRAPH_WARMUP_STEPS = 2
# GradScaler starts at 65536 and halves at each overflow; a step that overflows is skipped, and only
# executed steps count as warm-up. 16 halvings reach a scale of 1.
_SCALE_WARMUP_STEPS = 16
_PROGRESS_SECONDS = 0.5
_MESSAGE_CHARACTERS = 1500


class NonFiniteError(Exception):
    """The loss, or a weight after the steps, is not a number or infinite."""


def measure(request: ProbeRequest, deadline: float, report: Report) -> OutcomeMessage:
    """Carry out one probe until `deadline` (an instant of `time.monotonic`) and say how it ended.

    A failure is described outside of its handler: its traceback holds frames, and so tensors.
    """
    run = _Run(request, deadline, report)
    failure: tuple[ProbeStatus, str, str] | None = None
    try:
        return run.outcome()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        run.let_go_of_cap()
        failure = (*classify(error), _phase_of(error, run))
    status, message, phase = failure
    return OutcomeMessage(
        probe_id=request.probe_id,
        status=status,
        message=message[-_MESSAGE_CHARACTERS:],
        phase=phase,
        flags=tuple(run.flags),
    )


def classify(error: BaseException) -> tuple[ProbeStatus, str]:
    """The status and the words of a failure.

    Out of memory is what any error in the chain says it is: compilers wrap it. A model that a
    compiler cannot compile is an unsupported setting, not a crash: the same setting without
    compilation may well run.
    """
    chain = list(_causes(error))
    for link in chain:
        if isinstance(link, NonFiniteError):
            return "non_finite", str(link)
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return "out_of_memory", _first_line(link) or type(link).__name__
        if isinstance(link, RuntimeError) and is_allocation_failure(str(link)):
            return "out_of_memory", _first_line(link)
    for link in chain:
        if isinstance(link, PlannerError):
            return "unsupported", str(link)
        if _is_compile_failure(link):
            return "unsupported", f"torch.compile failed: {type(link).__name__}: {link}".strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = [frame for frame in frames if not frame.filename.startswith("<")]
    place = f" ({where[-1].filename}:{where[-1].lineno})" if where else ""
    return "crashed", f"{type(error).__name__}: {error}{place}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _is_compile_failure(error: BaseException) -> bool:
    """Raised by the compiler: by Dynamo, by AOTAutograd's backends or by Inductor."""
    module = type(error).__module__
    return module.startswith(("torch._dynamo.", "torch._inductor.", "torch._functorch."))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _phase_of(error: BaseException, run: _Run) -> str:
    if any(_is_compile_failure(link) for link in _causes(error)):
        return "compile"
    return run.phases.current if run.in_step else run.report.phase


class WatchedTraining(Training):
    """A training whose losses can be looked at; looking waits for the device."""

    watching = False

    def loss(self, logits: Tensor) -> Tensor:
        loss = super().loss(logits)
        if self.watching and not torch.isfinite(loss.detach()).item():
            raise NonFiniteError(f"the loss is {loss.item()}")
        return loss


@dataclass
class StepPhases:
    """Names the phase that is running, told of each that has ended. `announce` hears each begin."""

    accumulate: int = 1
    announce: Callable[[str], None] | None = None
    current: str = "forward"
    _micro_steps: int = 0

    def __call__(self, ended: str) -> None:
        self.current = self._next(ended)
        if self.announce is not None:
            self.announce(self.current)

    def _next(self, ended: str) -> str:
        if ended == "forward":
            return "backward"
        if ended == "backward":
            self._micro_steps += 1
            return "forward" if self._micro_steps < self.accumulate else "optimizer"
        self._micro_steps = 0
        return "zero_grad" if ended == "optimizer" else "forward"


@dataclass
class _Run:
    request: ProbeRequest
    deadline: float
    report: Report
    flags: list[str] = field(default_factory=list)
    phases: StepPhases = field(default_factory=StepPhases)
    in_step: bool = False
    meter: Meter | None = None

    def outcome(self) -> OutcomeMessage:
        request = self.request
        refuse_unsupported(request)
        set_precision(request)
        seed_everything(request.seed)
        self.report.enter("device")
        touch_libraries(request)
        meter = self.meter = make_meter(request.device)
        compiling = CompileWatch() if request.setting.compile != "off" else None
        if request.memory_cap_bytes is not None:
            meter.impose_cap(request.memory_cap_bytes)
        self.report.enter("build")
        training = build_training(request)
        self.phases.accumulate = request.setting.accumulate
        warmup = self._warm_up(training, meter, self.phases)
        self.report.enter("measure")
        if compiling is None:
            self._refuse_over_cap(meter)
        else:
            compiling.begin_timing()
        rule = StopRule(request, time.monotonic(), self.deadline)
        scale = training.scaler.get_scale() if training.scaler is not None else None
        meter.reset_peak()
        samples = self._time(training, meter, self.phases, rule)
        use = meter.memory()
        self.flags += rule.flags(samples) + meter.flags()
        self._refuse_over_cap(meter)
        self.flags += compiling.flags() if compiling is not None else []
        self.flags += _scale_flags(training, scale)
        self.report.enter("check")
        phase_bytes = self._check(training, meter, self.phases)
        step_seconds = median(samples)
        return OutcomeMessage(
            probe_id=request.probe_id,
            status="measured",
            step_seconds=tuple(round(seconds, 9) for seconds in samples),
            peak_allocated_bytes=use.peak_allocated,
            peak_reserved_bytes=use.peak_reserved,
            device_bytes=use.device,
            phases=phase_bytes,
            compile_seconds=_compile_seconds(warmup, step_seconds, compiling is not None),
            clocks=meter.clocks(),
            flags=tuple(self.flags),
        )

    def _warm_up(self, training: WatchedTraining, meter: Meter, phases: StepPhases) -> list[float]:
        """Whole steps until all that is lazy has happened; their wall times in seconds.

        The optimizer makes its state in the first executed step, so the second is the first that
        is like all others. While a compiler may work, the CPU's cap is lifted: compilers are
        processes that would inherit it, and what they need is not the setting's.
        """
        setting = self.request.setting
        compiled = setting.compile != "off"
        graphs = setting.compile in ("reduce-overhead", "max-autotune")
        wanted = self.request.warmup_steps + (_GRAPH_WARMUP_STEPS if graphs else 0)
        self.in_step = True
        phases.announce = self.report.enter
        training.watching = True
        seconds: list[float] = []
        executed = 0
        if compiled:
            meter.lift_cap()
            phases.announce = None
            self.report.enter("compile")
        else:
            self.report.enter("forward")
        while executed < wanted and len(seconds) < wanted + _SCALE_WARMUP_STEPS:
            started = time.perf_counter()
            scale = training.scaler.get_scale() if training.scaler is not None else None
            training.step(phases)
            meter.synchronize()
            seconds.append(time.perf_counter() - started)
            phases.announce = self.report.enter
            executed += not _scale_fell(training, scale)
        if compiled and self.request.memory_cap_bytes is not None:
            meter.impose_cap(self.request.memory_cap_bytes)
        training.watching = False
        phases.announce = None
        self.in_step = False
        return seconds

    def _time(
        self, training: WatchedTraining, meter: Meter, phases: StepPhases, rule: StopRule
    ) -> list[float]:
        """Seconds of each whole optimizer step, back to back.

        Steps are marked on the device, and at most `meter.in_flight` are queued ahead of the one
        that is waited for: the device is never idle for our sake, and the host never far ahead.
        """
        self.in_step = True
        samples: list[float] = []
        marks: deque[Mark] = deque([meter.mark()])
        told = time.monotonic()
        while not rule.is_enough(samples):
            training.step(phases)
            marks.append(meter.mark())
            if len(marks) > meter.in_flight + 1:
                samples.append(meter.seconds(marks.popleft(), marks[0]))
                meter.observe()
            if samples and time.monotonic() - told >= _PROGRESS_SECONDS:
                told = time.monotonic()
                self.report.progress(len(samples), median(samples))
        while len(marks) > 1:
            samples.append(meter.seconds(marks.popleft(), marks[0]))
        self.in_step = False
        return samples

    def _check(
        self, training: WatchedTraining, meter: Meter, phases: StepPhases
    ) -> PhaseBytes | None:
        """Whether the training is still sound after the timed steps, and what each phase holds.

        A loss that is no number leaves weights that are none, but under a GradScaler, which skips
        such steps: there one more loss is looked at. Raises NonFiniteError.
        """
        norms = torch._foreach_norm([p.detach() for p in training.parameters])
        if not torch.isfinite(torch.stack([n.float() for n in norms])).all().item():
            raise NonFiniteError("weights are not finite after the timed steps")
        del norms
        if training.scaler is None and not self.request.record_phases:
            return None
        training.watching = True
        live: dict[str, int | None] = {"before": meter.live_bytes()}

        def on_phase(ended: str) -> None:
            live[ended] = meter.live_bytes()
            phases(ended)

        training.step(on_phase)
        meter.synchronize()
        before, forward, backward, after = (
            live.get(name) for name in ("before", "forward", "backward", "optimizer")
        )
        if not self.request.record_phases or None in (before, forward, backward, after):
            return None
        return PhaseBytes.model_validate(
            {
                "before_step": before,
                "after_forward": forward,
                "after_backward": backward,
                "after_step": after,
            }
        )

    def _refuse_over_cap(self, meter: Meter) -> None:
        """Out of memory where the measured peak is over a cap that did not bind by itself: the
        CPU's stands a little behind, and is lifted for compilers."""
        cap, peak = self.request.memory_cap_bytes, meter.memory().peak_allocated
        if cap is not None and peak > cap:
            raise MemoryError(
                f"the peak of {format_bytes(peak)} is over the cap of {format_bytes(cap)}"
            )

    def let_go_of_cap(self) -> None:
        if self.meter is not None:
            self.meter.lift_cap()


def refuse_unsupported(request: ProbeRequest) -> None:
    """Raise UnsupportedError for settings that a probe on one device cannot stand for."""
    setting = request.setting
    if setting.parallelism != "none":
        raise UnsupportedError(
            f"a probe runs on one device, and parallelism is {setting.parallelism!r}.",
            "Probe with parallelism none.",
        )
    if setting.validation_batch_size:
        raise UnsupportedError(
            "a probe times training steps alone, and validation_batch_size is "
            f"{setting.validation_batch_size}.",
            "Probe with validation_batch_size 0.",
        )
    if isinstance(request.model, FactoryModel) and (setting.frozen_stages or setting.lora_rank):
        raise UnsupportedError(
            f"what is trained is a matter of the factory {request.model.factory}.",
            "Freeze inside the factory, and probe with frozen_stages 0 and lora_rank 0.",
        )
    if setting.precision == "tf32" and not _has_tf32(request.device):
        raise UnsupportedError(
            f"tf32 needs an NVIDIA GPU of compute capability 8.0 or more, and {request.device} "
            "is none.",
            "Use fp32, bf16 or fp16.",
        )


def _has_tf32(device: str) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability(device) >= (8, 0)


def set_precision(request: ProbeRequest) -> None:
    """What fp32 matrix work is done in, said both ways: torch's defaults differ by operation.

    fp32 is fp32 everywhere; tf32 is tf32 wherever it can be. Under autocast what stays fp32 is as
    by default: matmul in fp32, cuDNN's convolutions in tf32.
    """
    precision = request.setting.precision
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def touch_libraries(request: ProbeRequest) -> None:
    """Start threads and load the code that any training needs, before memory is first read.

    (The first optimizer of a process imports a hundred megabytes of torch._dynamo.)
    """
    layers = nn.Sequential(nn.Conv2d(3, 8, 2), nn.GELU(), nn.Flatten(), nn.Linear(72, 8))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.randn(64, 3, 4, 4)).logsumexp(1).sum().backward()
    optimizer.step()
    torch.ones(1 << 20).sum()
    if request.setting.compile != "off":
        importlib.import_module("torch._inductor.compile_fx")


def build_training(request: ProbeRequest) -> WatchedTraining:
    """The module of the request on its device, with its optimizer, its batch and its compiler."""
    setting = request.setting
    device = torch.device(request.device)
    module = build_module(request).train()
    dtype = torch.bfloat16 if setting.precision == "pure-bf16" else None
    module = module.to(device=device, dtype=dtype)
    if setting.memory_format == "channels_last":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled = None
    if setting.compile != "off":
        compiled = torch.compile(module, mode=setting.compile)
    images, targets = make_batch(request.model, setting, device)
    return WatchedTraining(module, setting, images, targets, compiled)


def build_module(request: ProbeRequest) -> nn.Module:
    """The real module, on the CPU. Raises PlannerError where it cannot be had."""
    if isinstance(request.model, FactoryModel):
        from planner.libraries.factory import load_factory

        return load_factory(request.model.factory)()
    from planner.libraries.registry import find_library

    return find_library(request.model.library).build(request.model, request.setting)


def _scale_fell(training: Training, before: float | None) -> bool:
    return (
        before is not None and training.scaler is not None and training.scaler.get_scale() < before
    )


def _scale_flags(training: Training, before: float | None) -> list[str]:
    if not _scale_fell(training, before) or training.scaler is None:
        return []
    now = training.scaler.get_scale()
    return [f"the loss scale fell from {before:g} to {now:g}: some timed steps were skipped"]


def _compile_seconds(warmup: list[float], step_seconds: float, compiled: bool) -> float | None:
    """What the warm-up took longer than as many steady steps; None where nothing was compiled."""
    return max(0.0, sum(warmup) - len(warmup) * step_seconds) if compiled else None


class CompileWatch:
    """Sees what the compiler does without saying: fall back, recompile, take from a cache."""

    def __init__(self) -> None:
        self._limits = _RecompileLimitHandler()
        logging.getLogger("torch._dynamo.convert_frame").addHandler(self._limits)
        self._graphs_before = 0

    def begin_timing(self) -> None:
        self._graphs_before = self._count("stats", "unique_graphs")

    def flags(self) -> list[str]:
        found = []
        if self._limits.hits:
            found.append(f"fell back to eager: {self._limits.hits[0]}")
        if self._count("stats", "unique_graphs") > self._graphs_before:
            found.append("recompiled while steps were timed")
        if self._count("inductor", "fxgraph_cache_hit"):
            found.append("compiled from a cache: compile_seconds is less than a first compile")
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        if breaks:
            found.append(f"{breaks} graph breaks")
        return found

    def _count(self, group: str, name: str) -> int:
        return int(torch._dynamo.utils.counters[group][name])


class _RecompileLimitHandler(logging.Handler):
    """Dynamo tells in a warning alone that it will run a function eagerly from now on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.hits: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, str) and record.msg.startswith("torch._dynamo hit config."):
            self.hits.append(record.getMessage().split("\n")[0])
