"""A short real training run: build, warm up, time whole optimizer steps, read memory.

Runs in the worker alone, a process forked from one that has imported torch: it trains, answers on
its own channel and waits to be ended. What user code prints goes to standard output and error and
cannot reach the channel. Any failure of the model ends as an outcome, never as an exception.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NoReturn

import torch

from planner.core.errors import ContractError
from planner.core.schema import FactoryModel, ProbeStatus
from planner.core.units import format_bytes
from planner.machine.emulated import is_emulated
from planner.training.building import local_shard, set_precision
from planner.training.step import Training
from planner.training.tasks.contract import WRITE_A_TASK
from planner.training.tasks.making import CheckedTask
from search.probe import protocol
from search.probe.evidence import HURRIED, QuietWatch, StopRule
from search.probe.worker import subject, verdict
from search.probe.worker.meter import Mark, Meter, make_meter

# CUDA graphs (reduce-overhead, max-autotune) are run once, recorded once and replayed from then on:
# two more steps than eager needs until every step is alike.
_GRAPH_WARMUP_STEPS = 2
# GradScaler starts at 65536 and halves at each overflow; a step that overflows is skipped, and only
# executed steps count as warm-up. 16 halvings reach a scale of 1.
_SCALE_WARMUP_STEPS = 16
# Steps after the allocator's cache was given back: the first asks the device for memory anew.
_RELEASED_WARMUP_STEPS = 2
# What is given back is told from this share of what was reserved on.
_RELEASED_SHARE = 0.01
_PROGRESS_SECONDS = 0.5


def measure(
    request: protocol.ProbeRequest,
    deadline: float,
    report: protocol.Report,
    place: protocol.RankPlace | None = None,
) -> protocol.OutcomeMessage:
    """Carry out one probe, or one rank of it, until `deadline` (an instant of `time.monotonic`);
    how it ended. A failure is described outside of its handler: its traceback holds frames, and so
    tensors."""
    run = Run(request, deadline, report, place=place)
    try:
        return run.outcome()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if run.meter is not None:
            run.meter.lift_cap()
        status, message = verdict.classify(error, verdict.read_device_memory(request.device))
        phase, lost = _phase_of(error, run, status), verdict.lost_others(error)
        crowding = run.crowding()
        # What disturbed the run until it failed: the failure may be due to it.
        flags = dict.fromkeys([*run.flags, *(run.meter.flags() if run.meter is not None else [])])
    if status == "crashed" and phase == "forward" and run.was_given_images and not lost:
        message = f"{protocol.cut_message(message)}\n{WRITE_A_TASK}"
    return protocol.OutcomeMessage(
        status=status,
        message=protocol.cut_message(message),
        phase=phase,
        unit=run.unit,
        flags=tuple(flags),
        lost_others=lost,
        **crowding,
    )


def _phase_of(error: BaseException, run: Run, status: ProbeStatus) -> str:
    if status == "unsupported" and any(
        isinstance(link, ContractError) for link in verdict.causes(error)
    ):
        return protocol.CONTRACT
    if any(verdict.is_compile_failure(link) for link in verdict.causes(error)):
        return "compile"
    return run.phases.current if run.in_step else run.report.phase


@dataclass
class Run:
    """One probe: what is known of it so far, so that a failure can tell it too."""

    request: protocol.ProbeRequest
    deadline: float
    report: protocol.Report
    flags: list[str] = field(default_factory=list)
    phases: subject.StepPhases = field(default_factory=subject.StepPhases)
    in_step: bool = False
    meter: Meter | None = None
    unit: str | None = None
    was_given_images: bool = False  # a module of the user's: images may not be what it takes
    compiling: verdict.CompileWatch | None = None
    warmup: list[float] = field(default_factory=list)  # seconds of each of its first steps
    place: protocol.RankPlace | None = None
    group: Any = None  # of ranks that agree

    def set_up(self) -> tuple[subject.WatchedTraining, Meter]:
        """The training on its device, warm: its next step is like all that follow."""
        request = self.request
        subject.refuse_unsupported(request)
        set_precision(request.setting)
        random.seed(0)
        torch.manual_seed(0)
        self.report.enter("device")
        meter = self._prepare_device()
        verdict.check_matrix_units(request)
        self.compiling = verdict.CompileWatch() if request.setting.compiles else None
        if request.memory_cap_bytes is not None:
            meter.impose_cap(request.memory_cap_bytes)
        self.report.enter("build")
        training = subject.build_training(request)
        self.unit = training.task.unit if isinstance(training.task, CheckedTask) else None
        self.was_given_images = isinstance(request.model, FactoryModel) and self.unit is None
        self.phases.accumulate = request.setting.accumulate
        self.warmup = self._warm_up(training, meter)
        self._settle(training, meter, 0.0 if self.compiling else sum(self.warmup[1:]))
        self.report.enter("measure")
        if self.compiling is None:
            self._refuse_over_cap(meter)
        else:
            self.compiling.begin_timing()
        return training, meter

    def _prepare_device(self) -> Meter:
        """The meter. Of a CPU all that is no setting's comes before it, the threads of the other
        ranks' connections too. Of a GPU nothing does: an optimizer's step on the CPU makes a CUDA
        context already, on the first device, and the meter would take it for another process's.
        What NCCL takes of a GPU is the setting's."""
        request, place = self.request, self.place
        if request.device != "cpu":
            self.meter = make_meter(request.device)
        if place is not None and place.threads is not None:
            torch.set_num_threads(place.threads)
        subject.touch_libraries(request)
        if place is not None:
            self.report.enter("join")
            self.group = subject.join(request, place)
        if self.meter is None:
            self.meter = make_meter(request.device)
        return self.meter

    def outcome(self) -> protocol.OutcomeMessage:
        request = self.request
        training, meter = self.set_up()
        compiling = self.compiling
        rule = StopRule(request, time.monotonic(), self.deadline)
        scale = _loss_scale(training)
        meter.reset_peak()
        quiet = QuietWatch()
        samples = self._time(training, meter, rule)
        if self.place is None and not is_emulated():  # other ranks are no others
            on_gpu = request.device.startswith("cuda")  # it wants a thread each to launch and back
            self.flags += quiet.flags(2) if on_gpu else quiet.flags()
        use = meter.memory()
        if self.place is None or self.place.rank == 0:  # the steps of all ranks are the same
            self.flags += rule.flags(samples)
        self.flags += meter.flags()
        self._refuse_over_cap(meter)
        self.flags += compiling.flags() if compiling is not None else []
        if (now := _loss_scale(training)) < scale:
            said = f"the loss scale fell from {scale:g} to {now:g}: some timed steps were skipped"
            self.flags.append(said)
        self.report.enter("check")
        self._check(training, meter)
        # What the warm-up took longer than as many steady steps.
        compile_seconds = max(0.0, sum(self.warmup) - len(self.warmup) * median(samples))
        return protocol.OutcomeMessage(
            status="measured",
            step_seconds=tuple(round(seconds, 9) for seconds in samples),
            peak_allocated_bytes=use.peak_allocated,
            peak_reserved_bytes=use.peak_reserved,
            device_bytes=use.device,
            unit=self.unit,
            compile_seconds=None if compiling is None else compile_seconds,
            clocks=meter.clocks(),
            flags=tuple(self.flags),
            **self.crowding(),
        )

    def crowding(self) -> dict[str, int | None]:
        """What others left and took of the device's memory, in the fields of an outcome."""
        return {} if self.meter is None else asdict(self.meter.crowding())

    def _warm_up(self, training: subject.WatchedTraining, meter: Meter) -> list[float]:
        """Whole steps until all that is lazy has happened; their wall times in seconds.

        The optimizer makes its state in the first executed step, so the second is the first that
        is like all others. While a compiler may work, the CPU's cap is lifted: compilers are
        processes that would inherit it, and what they need is not the setting's.
        """
        setting, phases = self.request.setting, self.phases
        compiled = setting.compiles
        graphs = setting.compile in ("reduce-overhead", "max-autotune")
        wanted = self.request.warmup_steps + (_GRAPH_WARMUP_STEPS if graphs else 0)
        self.report.enter("compile" if compiled else "forward")
        self.in_step = training.watching = True
        phases.announce = None if compiled else self.report.enter
        seconds: list[float] = []
        executed = 0
        if compiled:
            meter.lift_cap()
        rule = StopRule(self.request, time.monotonic(), self.deadline)
        while executed < wanted and len(seconds) < wanted + _SCALE_WARMUP_STEPS:
            # This step and a timed one must still be possible.
            if (
                executed
                and not compiled
                and subject.any_of(self.group, rule.is_ending(max(seconds), 2))
            ):
                self.flags.append(f"{HURRIED} warmed up for {executed} of {wanted} steps")
                break
            scale = _loss_scale(training)
            seconds.append(self._step(training, meter))
            phases.announce = self.report.enter
            executed += _loss_scale(training) >= scale
        if compiled and self.request.memory_cap_bytes is not None:
            meter.impose_cap(self.request.memory_cap_bytes)
        phases.announce = None
        self.in_step = training.watching = False
        return seconds

    def _step(self, training: subject.WatchedTraining, meter: Meter) -> float:
        """One step by itself; its wall time in seconds."""
        started = time.perf_counter()
        training.step(self.phases)
        meter.synchronize()
        return time.perf_counter() - started

    def _settle(self, training: subject.WatchedTraining, meter: Meter, warm_seconds: float) -> None:
        """Brings the device into the state in which a training will find it.

        What compiling left there goes: its processes, and the memory that the benchmarks of its
        kernels took, which a training from a warm cache never takes. Then untimed steps, until the
        clocks have had `warmup_seconds` of work, `warm_seconds` of which they have had.
        """
        least = 0
        if self.request.setting.compiles:
            self.flags += verdict.end_workers()
            released = meter.release_cache()
            if released is not None:
                self.flags += _release_flags(*released)
                least = _RELEASED_WARMUP_STEPS
        self.in_step = True
        steps = 0
        while subject.any_of(
            self.group, steps < least or warm_seconds < self.request.warmup_seconds
        ):
            self.report.enter("warm-up")
            took = self._step(training, meter)
            steps, warm_seconds = steps + 1, warm_seconds + took
            if subject.any_of(self.group, time.monotonic() + took >= self.deadline):
                break
        self.in_step = False

    def _is_enough(self, rule: StopRule, samples: Sequence[float]) -> bool:
        """As all ranks agree: what is enough for one is for all. They ask each other again once
        there are a twentieth more steps: asking takes a third of a millisecond (gloo, two ranks on
        two shared cores, torch 2.13, 2026-11)."""
        if self.place is not None and len(samples) % max(1, len(samples) // 20):
            return False
        return subject.any_of(self.group, rule.is_enough(samples))

    def _time(self, training: subject.WatchedTraining, meter: Meter, rule: StopRule) -> list[float]:
        """Seconds of each whole optimizer step, back to back.

        Steps are marked on the device, and at most `meter.in_flight` are queued ahead of the one
        that is waited for: the device is never idle for our sake, and the host never far ahead.
        """
        self.in_step = True
        samples: list[float] = []
        marks: deque[Mark] = deque([meter.mark()])
        told = time.monotonic()
        while not self._is_enough(rule, samples):
            training.step(self.phases)
            marks.append(meter.mark())
            if len(marks) > meter.in_flight + 1:
                samples.append(meter.seconds(marks.popleft(), marks[0]))
                meter.observe()
            if samples and time.monotonic() - told >= _PROGRESS_SECONDS:
                told = time.monotonic()
                self.report.say(protocol.ProgressMessage(
                    phase="measure", num_steps=len(samples), step_seconds=median(samples)
                ))  # fmt: skip
        while len(marks) > 1:
            samples.append(meter.seconds(marks.popleft(), marks[0]))
        self.in_step = False
        return samples

    def _check(self, training: subject.WatchedTraining, meter: Meter) -> None:
        """Whether the training is still sound after the timed steps.

        A loss that is no number leaves weights that are none, but under a GradScaler, which skips
        such steps: there one more loss is looked at. Raises NonFiniteError.
        """
        norms = torch._foreach_norm([local_shard(p).detach() for p in training.parameters])
        if not torch.isfinite(torch.stack([n.float() for n in norms])).all().item():
            raise verdict.NonFiniteError("weights are not finite after the timed steps")
        if training.scaler is not None:
            training.watching = True
            self._step(training, meter)

    def _refuse_over_cap(self, meter: Meter) -> None:
        """Out of memory where the measured peak is over a cap that did not bind by itself: the
        CPU's stands a little behind, and is lifted for compilers."""
        cap, peak = self.request.memory_cap_bytes, meter.memory().peak_allocated
        if cap is not None and peak > cap:
            raise MemoryError(
                f"the peak of {format_bytes(peak)} is over the cap of {format_bytes(cap)}"
            )


def _loss_scale(training: Training) -> float:
    """Of its scaler, which lowers it where a step was skipped; 1 where there is none."""
    return 1.0 if training.scaler is None else float(training.scaler.get_scale())


def _release_flags(before: int, after: int) -> list[str]:
    if before - after <= before * _RELEASED_SHARE:
        return []
    return [
        f"{format_bytes(before)} were reserved after compiling, and {format_bytes(before - after)} "
        "of them given back before timing"
    ]


def work(channel: int, given: str) -> NoReturn:
    """Trains as a `WorkOrder` says. It never ends by itself: what a library or the user's code does
    at exit is not the probe's, and the end of one rank is a fault to the others."""
    faulthandler.enable()  # a fatal signal leaves its stack
    order = protocol.WorkOrder.model_validate_json(given)
    report = protocol.Report(channel, 0 if order.place is None else order.place.rank)
    report.enter("import")
    report.say(measure(order.request, order.deadline, report, order.place))
    while True:
        signal.pause()
