"""Whole steps that are looked at: whether they run at all, near the limit, over time, compiled."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections import deque
from statistics import median
from typing import Any

import torch

from planner.training import Training
from search.probe.interval import median_interval
from search.probe.observation.order import WORKER_COMMAND, Hearer, Order, Teller
from search.probe.observation.subject import Subject
from search.probe.observation.view import View
from search.probe.worker.meter import Mark, make_meter
from search.probe.worker.verdict import causes, classify, read_memory

# The head of a long error says what, its tail where: both are kept.
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 4000, 2000
# Run once, recorded once, replayed from then on: CUDA graphs are alike from the third step.
_WARMUP_STEPS = 4
_CLOCK_SECONDS = 0.5
_SHORTAGES = ("num_alloc_retries", "num_ooms")


def whole_text(error: BaseException) -> str:
    """An error's own text, at a sensible length."""
    text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    if len(text) <= _HEAD_CHARACTERS + _TAIL_CHARACTERS:
        return text
    return f"{text[:_HEAD_CHARACTERS]}\n[…]\n{text[-_TAIL_CHARACTERS:]}"


def run_steps(training: Training, view: View, num_steps: int, tell: Teller) -> str:
    """Run steps until one fails; the text of its error, "" where none did.

    Tells how many were done, in which phase it ended and what our classifier calls it.
    """
    phases = ["forward"]
    following = {"forward": "backward", "backward": "optimizer or the next forward",
                 "optimizer": "zero_grad", "zero_grad": "forward"}  # fmt: skip
    done = 0
    text = ""
    try:
        for _ in range(num_steps):
            training.step(lambda ended: phases.append(following[ended]))
            view.synchronize()
            done += 1
    except Exception as error:
        # What ended it is what we came to see: nothing is hidden, all of it is recorded.
        text = whole_text(error)
        tell.see(ended_in=phases[-1], **_verdict(error, view))
    tell.see(completed_steps=done, failed=bool(text))
    return text


def _verdict(error: BaseException, view: View) -> dict[str, Any]:
    """What our classifier calls it, by its text and by the memory that is left."""
    reading = read_memory(str(view.device))
    status, words = classify(error, reading)
    return {
        "classified_as": status,
        "classified_words": words[:300],
        "classified_by_text_as": classify(error)[0],
        "memory_at_failure": str(reading) if reading is not None else "not told",
        "error_types": [f"{type(e).__module__}.{type(e).__name__}" for e in causes(error)],
    }


def see_one_step(order: Order, view: View, tell: Teller) -> str:
    """Whether a setting's step runs, and what it says where it does not."""
    subject = Subject(order.observation, order.device)
    subject.prepare()
    view.start()
    view.reset_peak()
    training = subject.training()
    began = time.monotonic()
    text = run_steps(training, view, order.observation.steps, tell)
    tell.see(seconds=time.monotonic() - began)
    _see_memory(view, tell)
    return text


def see_near_limit(order: Order, view: View, tell: Teller) -> str:
    """A step with a little less memory than it needs: where it ends and what it says.

    What it needs is measured by another process, which ends before this one touches the device;
    then a ballast leaves `share` of that, before the libraries' handles are made, as in a first
    step.
    """
    needed = _needed_bytes(order)
    share = order.observation.share
    tell.see(needed_bytes=needed, left_bytes=int(needed * share))
    subject = Subject(order.observation, order.device)
    subject.prepare()
    if not view.is_cuda:
        # There threads and code buffers are of the same memory, and end a process that lacks them.
        subject.training().step()
        view.release_cache()
    view.start()
    ballast = view.leave_room(int(needed * share))
    tell.see(**{f"{name}_with_ballast": value for name, value in view.memory().items()})
    text = ""
    try:
        training = subject.training()
    except (RuntimeError, MemoryError) as error:
        text = whole_text(error)
        tell.see(ended_in="build", completed_steps=0, failed=True, **_verdict(error, view))
    if not text:
        text = run_steps(training, view, order.observation.steps, tell)
    _see_memory(view, tell)
    del ballast
    return text


def _see_memory(view: View, tell: Teller) -> None:
    """What is held after the steps, and how often memory ran short by the caching allocator's own
    count. An illegal access leaves a context that answers every question with that error."""
    try:
        tell.see(held_peak_bytes=view.held_peak(), **view.memory())
        if view.is_cuda:
            stats = torch.cuda.memory_stats(view.device)
            tell.see(**{name: int(stats.get(name, 0)) for name in _SHORTAGES})
    except RuntimeError as error:
        tell.miss("held_peak_bytes", f"the context does not answer any more: {error}"[:300])


def _needed_bytes(order: Order) -> int:
    """The most that tensors of another process took for the same steps."""
    alone = order.observation.model_copy(update={"see": "one-step"})
    reader, writer = os.pipe()
    text = order.model_copy(update={"observation": alone}).model_dump_json()
    with subprocess.Popen([*WORKER_COMMAND, str(writer), text], pass_fds=(writer,)):
        os.close(writer)
        with open(reader, "rb") as channel:  # noqa: PTH123
            heard = Hearer()
            heard.hear(channel.read())
    if heard.status != "seen" or heard.message or "held_peak_bytes" not in heard.figures:
        raise RuntimeError(f"it does not run with all of the memory either: {heard.message}")
    return int(heard.figures["held_peak_bytes"])


def see_timing(order: Order, view: View, tell: Teller) -> None:
    """One setting timed without a pause, told at each of `seconds`: the median, what is known of
    it, clocks and power."""
    subject = Subject(order.observation, order.device)
    subject.prepare()
    meter = make_meter(order.device)
    training = subject.training()
    for _ in range(_WARMUP_STEPS):
        training.step()
    meter.synchronize()
    samples: list[float] = []
    course: list[dict[str, object]] = []
    marks: deque[Mark] = deque([meter.mark()])
    began = read = time.monotonic()
    for limit in sorted(order.observation.seconds):
        while time.monotonic() - began < limit or len(samples) < 2:
            training.step()
            marks.append(meter.mark())
            if len(marks) > meter.in_flight + 1:
                samples.append(meter.seconds(marks.popleft(), marks[0]))
            if time.monotonic() - read >= _CLOCK_SECONDS:
                read = time.monotonic()
                at = {"at_seconds": round(read - began, 2)}
                course.append({**at, **view.clocks(), "step_seconds": samples[-1]})
        interval = median_interval(samples)
        tell.see(
            **{
                f"after_{limit:g}_s": {
                    "num_steps": len(samples),
                    "median_seconds": interval.median,
                    "half_width": round(interval.half_width, 6),
                    "last_quarter_seconds": median(samples[-max(1, len(samples) // 4) :]),
                    **view.clocks(),
                }
            }
        )
    settled = median(samples[-max(1, len(samples) // 4) :])
    first = median(samples[: max(1, min(6, len(samples)))])
    tell.see(course=course, settled_seconds=settled, first_six_over_settled=first / settled)


def see_compile_cache(order: Order, view: View, tell: Teller) -> None:
    """What compiling leaves in the allocator's cache, and what steps take once it is given back."""
    subject = Subject(order.observation, order.device)
    view.start()
    subject.prepare()
    training = subject.training()
    began = time.monotonic()
    for number in range(_WARMUP_STEPS):
        training.step()
        view.synchronize()
        if number == 0:
            tell.see(compile_seconds=time.monotonic() - began)
    tell.see(**_named("compiled", view))
    gc.collect()
    view.release_cache()
    view.reset_peak()
    tell.see(**_named("emptied", view))
    for _ in range(_WARMUP_STEPS):
        training.step()
    view.synchronize()
    tell.see(**_named("after_steps", view))


def _named(when: str, view: View) -> dict[str, int]:
    return {f"{when}_{name}": value for name, value in view.memory().items()}
