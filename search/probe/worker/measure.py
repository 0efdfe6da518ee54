"""A short real training run: build, warm up, time whole optimizer steps, read memory.

Only the worker imports this: a process forked from one that has imported torch. It trains, answers
on a channel of its own and waits until the tuner ends it. What user code prints goes to standard
output and error and cannot reach the channel. Any failure of the model ends as an outcome, never
as an exception. First `measure`, then `ProbeRun` in the order of its steps, then `work`, the
process.
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
from planner.core.schema.setting import GRAPH_MODES
from planner.core.units import format_bytes
from planner.machine.emulated import is_emulated
from planner.training.assembly import local_shard, set_precision
from planner.training.step import Training
from planner.training.tasks.contract import WRITE_A_TASK
from planner.training.tasks.lookup import CheckedTask
from search.probe import protocol
from search.probe.evidence import HURRIED, QuietWatch, StopRule
from search.probe.worker import subject, verdict
from search.probe.worker.meter import Mark, Meter, make_meter
from search.probe.worker.subject import WatchedTraining

# CUDA graphs (reduce-overhead, max-autotune) are run once, recorded once and replayed from then on:
# two more steps than eager needs until every step is alike.
_GRAPH_WARMUP_STEPS = 2
# GradScaler starts at 65536 and halves at each overflow. It skips a step that overflows, and only
# executed steps count as warm-up. 16 halvings reach a scale of 1.
_SCALE_WARMUP_STEPS = 16
# Steps after the allocator's cache was released: the first asks the device for memory anew.
_RELEASED_WARMUP_STEPS = 2
# A flag names the released bytes from this share of the reserved ones on.
_RELEASED_SHARE = 0.01
_PROGRESS_SECONDS = 0.5


def measure(
    request: protocol.ProbeRequest,
    deadline: float,
    report: protocol.Report,
    place: protocol.RankPlace | None = None,
) -> protocol.OutcomeMessage:
    """Carries out one probe, or one rank of it, until `deadline` (an instant of `time.monotonic`),
    and returns how it ended. A failure is described outside of its handler: its traceback holds
    frames, and so tensors."""
    run = ProbeRun(request, deadline, report, place=place)
    try:
        return run.carry_out()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if run.meter is not None:
            run.meter.lift_cap()
        status, message = verdict.classify(error, verdict.read_device_memory(request.device))
        phase, lost = _find_phase(error, run, status), verdict.has_lost_others(error)
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


def _find_phase(error: BaseException, run: ProbeRun, status: ProbeStatus) -> str:
    """The phase in which `error` ended the run."""
    chain = list(verdict.error_chain(error))
    if status == "unsupported" and any(isinstance(link, ContractError) for link in chain):
        return protocol.CONTRACT
    if any(map(verdict.is_compile_failure, chain)):
        return "compile"
    return run.phases.current if run.in_step else run.report.phase


@dataclass
class ProbeRun:
    """One probe, with what it has learned so far: the outcome of a failure reports that too."""

    request: protocol.ProbeRequest
    deadline: float
    report: protocol.Report
    flags: list[str] = field(default_factory=list)
    phases: subject.StepPhases = field(default_factory=subject.StepPhases)
    in_step: bool = False
    meter: Meter | None = None
    unit: str | None = None
    was_given_images: bool = False  # the module is the user's: it may not take images
    compiling: verdict.CompileWatch | None = None
    warmup: list[float] = field(default_factory=list)  # seconds of each warm-up step
    place: protocol.RankPlace | None = None
    group: Any = None  # the process group by which ranks agree

    def set_up(self) -> tuple[WatchedTraining, Meter]:
        """Builds the training on its device and warms it up: its next step is like all that
        follow."""
        request = self.request
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
        self._settle_device(training, meter, 0.0 if self.compiling else sum(self.warmup[1:]))
        self.report.enter("measure")
        if self.compiling is None:
            self._refuse_over_cap(meter)
        else:
            self.compiling.begin_timing()
        return training, meter

    def _prepare_device(self) -> Meter:
        """Makes the meter, loads libraries and joins the other ranks.

        On a CPU the meter comes last, so that its baseline holds all that no setting decides:
        libraries, and the threads of the connections to other ranks. On a GPU it comes first: even
        an optimizer's step on the CPU makes a CUDA context on the first device, and the meter would
        take that for another process's. What NCCL takes of a GPU belongs to the setting."""
        request, place = self.request, self.place
        if request.device != "cpu":
            self.meter = make_meter(request.device)
        if place is not None and place.threads is not None:
            torch.set_num_threads(place.threads)
        subject.load_libraries(request)
        if place is not None:
            self.report.enter("join")
            self.group = subject.join_world(request, place)
        if self.meter is None:
            self.meter = make_meter(request.device)
        return self.meter

    def carry_out(self) -> protocol.OutcomeMessage:
        """Sets the training up, times its steps, checks it, and returns what was measured."""
        request = self.request
        training, meter = self.set_up()
        compiling = self.compiling
        rule = StopRule(request, time.monotonic(), self.deadline)
        first_scale = _loss_scale(training)
        meter.reset_peak()
        quiet = QuietWatch()
        samples = self._time_steps(training, meter, rule)
        if self.place is None and not is_emulated():  # other ranks are not other programs
            # A GPU needs two processors: a thread launches forward, another one backward.
            self.flags += quiet.flags() if request.device == "cpu" else quiet.flags(2)
        memory = meter.memory()
        if self.place is None or self.place.rank == 0:  # the steps of all ranks are the same
            self.flags += rule.flags(samples)
        self.flags += meter.flags()
        self._refuse_over_cap(meter)
        self.flags += compiling.flags() if compiling is not None else []
        if (last_scale := _loss_scale(training)) < first_scale:
            change = f"the loss scale fell from {first_scale:g} to {last_scale:g}"
            self.flags.append(f"{change}: some timed steps were skipped")
        self.report.enter("check")
        self._check_finite(training, meter)
        # The seconds by which the warm-up was longer than as many steady steps.
        compile_seconds = max(0.0, sum(self.warmup) - len(self.warmup) * median(samples))
        return protocol.OutcomeMessage(
            status="measured",
            step_seconds=tuple(round(seconds, 9) for seconds in samples),
            peak_allocated_bytes=memory.peak_allocated,
            peak_reserved_bytes=memory.peak_reserved,
            device_bytes=memory.device,
            unit=self.unit,
            compile_seconds=None if compiling is None else compile_seconds,
            clocks=meter.clocks(),
            flags=tuple(self.flags),
            **self.crowding(),
        )

    def crowding(self) -> dict[str, int | None]:
        """What other processes left and took of the device's memory, in the fields of an
        outcome."""
        return {} if self.meter is None else asdict(self.meter.crowding())

    def _warm_up(self, training: WatchedTraining, meter: Meter) -> list[float]:
        """Takes whole steps until all that is lazy has happened. Returns the wall time of each, in
        seconds.

        The optimizer makes its state in the first executed step, so the second is the first that
        is like all others. While a compiler may work, the CPU's cap is lifted: compilers are
        processes that would inherit it, and the setting does not decide what they need.
        """
        setting, phases = self.request.setting, self.phases
        is_compiled = setting.compiles
        num_steps = self.request.warmup_steps
        num_steps += _GRAPH_WARMUP_STEPS if setting.compile in GRAPH_MODES else 0
        self.report.enter("compile" if is_compiled else "forward")
        self.in_step = training.watching = True
        phases.announce = None if is_compiled else self.report.enter
        seconds: list[float] = []
        num_executed = 0
        if is_compiled:
            meter.lift_cap()
        rule = StopRule(self.request, time.monotonic(), self.deadline)
        while num_executed < num_steps and len(seconds) < num_steps + _SCALE_WARMUP_STEPS:
            # There must be time for this step and a timed one.
            may_end = num_executed and not is_compiled
            if may_end and subject.is_so_on_any(self.group, rule.is_ending(max(seconds), 2)):
                self.flags.append(f"{HURRIED} warmed up for {num_executed} of {num_steps} steps")
                break
            scale = _loss_scale(training)
            seconds.append(self._take_step(training, meter))
            phases.announce = self.report.enter
            num_executed += _loss_scale(training) >= scale
        if is_compiled and self.request.memory_cap_bytes is not None:
            meter.impose_cap(self.request.memory_cap_bytes)
        phases.announce = None
        self.in_step = training.watching = False
        return seconds

    def _take_step(self, training: WatchedTraining, meter: Meter) -> float:
        """Takes one step by itself. Returns its wall time in seconds."""
        started = time.perf_counter()
        training.step(self.phases)
        meter.synchronize()
        return time.perf_counter() - started

    def _settle_device(self, training: WatchedTraining, meter: Meter, warm_seconds: float) -> None:
        """Brings the device into the state in which a training will find it.

        First it removes what compiling left there: its processes, and the memory that the
        benchmarks of its kernels took, which a training from a warm cache never takes. Then it
        takes untimed steps until the device has worked for `warmup_seconds`, so that its clocks
        settle; it has already worked for `warm_seconds`.
        """
        min_steps = 0
        if self.request.setting.compiles:
            self.flags += verdict.end_workers()
            if (released := meter.release_cache()) is not None:
                before, after = released
                min_steps = _RELEASED_WARMUP_STEPS
                if before - after > before * _RELEASED_SHARE:
                    self.flags.append(
                        f"{format_bytes(before)} were reserved after compiling, and "
                        f"{format_bytes(before - after)} of them given back before timing"
                    )
        self.in_step = True
        steps, wanted = 0, self.request.warmup_seconds
        while subject.is_so_on_any(self.group, steps < min_steps or warm_seconds < wanted):
            self.report.enter("warm-up")
            seconds = self._take_step(training, meter)
            steps, warm_seconds = steps + 1, warm_seconds + seconds
            if subject.is_so_on_any(self.group, time.monotonic() + seconds >= self.deadline):
                break
        self.in_step = False

    def _has_enough(self, rule: StopRule, samples: Sequence[float]) -> bool:
        """Whether the samples are enough for any rank: then all ranks end. Ranks ask each other
        again once there are a twentieth more steps: asking takes a third of a millisecond (gloo,
        two ranks on two shared cores, torch 2.13, 2026-11)."""
        if self.place is not None and len(samples) % max(1, len(samples) // 20):
            return False
        return subject.is_so_on_any(self.group, rule.is_enough(samples))

    def _time_steps(self, training: WatchedTraining, meter: Meter, rule: StopRule) -> list[float]:
        """The seconds of each whole optimizer step, back to back.

        The device marks the end of each step. The host queues at most `meter.in_flight` steps ahead
        of the one that it waits for: the device never idles because of the timing, and the host is
        never far ahead.
        """
        self.in_step = True
        samples: list[float] = []
        marks: deque[Mark] = deque([meter.mark()])
        reported_at = time.monotonic()
        while not self._has_enough(rule, samples):
            training.step(self.phases)
            marks.append(meter.mark())
            if len(marks) > meter.in_flight + 1:
                samples.append(meter.seconds(marks.popleft(), marks[0]))
                meter.observe()
            if samples and time.monotonic() - reported_at >= _PROGRESS_SECONDS:
                reported_at = time.monotonic()
                self.report.send(protocol.ProgressMessage(
                    phase="measure", num_steps=len(samples), step_seconds=median(samples)
                ))  # fmt: skip
        while len(marks) > 1:
            samples.append(meter.seconds(marks.popleft(), marks[0]))
        self.in_step = False
        return samples

    def _check_finite(self, training: WatchedTraining, meter: Meter) -> None:
        """Raises NonFiniteError if the weights or the loss are not finite after the timed steps.

        A loss that is NaN makes weights NaN, except under a GradScaler, which skips such steps:
        there the loss of one more step is checked.
        """
        norms = torch._foreach_norm([local_shard(p).detach() for p in training.parameters])
        if not torch.isfinite(torch.stack([n.float() for n in norms])).all().item():
            raise verdict.NonFiniteError("weights are not finite after the timed steps")
        if training.scaler is not None:
            training.watching = True
            self._take_step(training, meter)

    def _refuse_over_cap(self, meter: Meter) -> None:
        """Raises MemoryError if the measured peak is over the cap. The CPU's cap does not always
        stop the allocation itself: it binds a little later, and is lifted for compilers."""
        cap, peak = self.request.memory_cap_bytes, meter.memory().peak_allocated
        if cap is not None and peak > cap:
            raise MemoryError(
                f"the peak of {format_bytes(peak)} is over the cap of {format_bytes(cap)}"
            )


def _loss_scale(training: Training) -> float:
    """The scale of the training's GradScaler, which lowers it when it skips a step; 1 without a
    scaler."""
    return 1.0 if training.scaler is None else float(training.scaler.get_scale())


def work(channel: int, order_json: str) -> NoReturn:
    """Trains as a `WorkOrder` says. The process never ends by itself: what a library or the user's
    code does at exit is no part of the probe, and the other ranks fail when one ends."""
    faulthandler.enable()  # a fatal signal prints its stack
    order = protocol.WorkOrder.model_validate_json(order_json)
    report = protocol.Report(channel, 0 if order.place is None else order.place.rank)
    report.enter("import")
    report.send(measure(order.request, order.deadline, report, order.place))
    while True:
        signal.pause()
