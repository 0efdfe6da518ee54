"""The page's title, and its answer in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.units import format_bytes, format_rate
from planner.report.pages.predicted_time import predicted_rate
from planner.report.pages.side_by_side import best_text, short_names
from planner.report.pages.step import Step
from planner.report.settings import describe_setting
from planner.report.verdicts import is_shown_as_running, verdict_of, verdict_text
from search.report.run import Run
from search.report.side_by_side import world_interval
from search.report.wording import count, interval_text

Subject = Step | Run


def title_of(subjects: Sequence[Subject]) -> str:
    """Of the page: what it is of, and for one estimate whether it fits."""
    if len(subjects) > 1:
        return _several_title(subjects)
    (subject,) = subjects
    if isinstance(subject, Run):
        return _run_title(subject)
    estimate = subject.estimate
    fits = verdict_of(estimate).word.lower()
    if estimate.fits is None:
        fits = f"needs {format_bytes(estimate.device_total_bytes)}"
    return f"{subject.title}: batch {estimate.setting.batch_size} {fits}"


def lead_of(subjects: Sequence[Subject]) -> str:
    """The answer; "" for one subject, whose title and first section say it."""
    if len(subjects) == 1:
        return ""
    steps = [subject for subject in subjects if isinstance(subject, Step)]
    runs = [subject for subject in subjects if isinstance(subject, Run)]
    said = []
    if steps:
        said.append(best_text(steps) if len(steps) > 1 else step_lead(steps[0]))
    if runs:
        said.append(_runs_lead(runs) if len(runs) > 1 else run_lead(runs[0]))
    return " ".join(said)


def group_titles(subjects: Sequence[Subject]) -> list[str]:
    """What heads each subject's group: all that tells it apart from the others."""
    steps = [subject for subject in subjects if isinstance(subject, Step)]
    if len(steps) == 1:
        return [subject.title for subject in subjects]
    names = iter(short_names(steps))
    return [
        subject.title if isinstance(subject, Run) else _step_title(subject, next(names))
        for subject in subjects
    ]


def step_lead(step: Step) -> str:
    """`Batch 64 of native:swin_tiny. Fits: needs 2 GiB of 23.52 GiB. 412 images/s (±35%).`"""
    estimate, time = step.estimate, step.estimate.throughput
    rate = ""
    if time is not None and is_shown_as_running(estimate):
        rate = f" {predicted_rate(time, estimate.unit)}."
    fits = verdict_text(estimate)
    return f"Batch {estimate.setting.batch_size} of {estimate.model.title}. {fits}{rate}"


def run_lead(run: Run) -> str:
    """`Recommended: batch 128, bf16 …: 412 images/s (410 to 415), 1.50 × the plain default.`"""
    best, found = run.best, run.found
    probes = count(len(run.records), "probe")
    if best is None:
        if found is not None:
            return f"Nothing to recommend: {found.advice or found.stopped_because}"
        return f"Nothing fits, after {probes}." if run.records else "No probe of a setting is kept."
    within = f" ({interval_text(world_interval(best))})" if best.step_seconds else ""
    rate = format_rate(best.world_images_per_second)
    said = f"{describe_setting(best.setting, best.model)}: {rate} {run.unit}/s{within}"
    if found is None or found.setting is None:
        return f"No recommendation yet: the best of {probes} is {said}."
    gain = f", {found.gain:.2f} × the plain default" if found.gain is not None else ""
    return f"Recommended: {said}{gain}."


def _run_title(run: Run) -> str:
    found, best = run.found, run.best
    if found is None or found.setting is None or best is None:
        return f"Search: {run.title}"
    rate = format_rate(best.world_images_per_second)
    return f"{found.model.title} on {found.device.title}: {rate} {run.unit}/s"


def _runs_lead(runs: Sequence[Run]) -> str:
    """The fastest of several runs; of different models none is."""
    known = [(run, best) for run in runs if (best := run.best) is not None]
    if not known:
        return f"None of {len(runs)} runs has found a setting that fits."
    if len({best.model for _, best in known}) > 1:
        return f"{len(runs)} runs of different models: their rates cannot be compared."
    run, best = max(known, key=lambda pair: pair[1].world_images_per_second or 0.0)
    rate = format_rate(best.world_images_per_second)
    return (
        f"Of {len(runs)} runs, {run.title} found the fastest setting: "
        f"{describe_setting(best.setting, best.model)}, {rate} {run.unit}/s."
    )


def _several_title(subjects: Sequence[Subject]) -> str:
    steps = [subject for subject in subjects if isinstance(subject, Step)]
    counts = [(len(steps), "estimate"), (len(subjects) - len(steps), "run")]
    counted = " and ".join(f"{n} {what}{'s' if n > 1 else ''}" for n, what in counts if n)
    models = {_model_title(subject) for subject in subjects}
    return f"{counted} of {models.pop()}" if len(models) == 1 else f"{counted} side by side"


def _model_title(subject: Subject) -> str:
    if isinstance(subject, Step):
        return subject.estimate.model.title
    if subject.found is not None:
        return subject.found.model.title
    return subject.records[0].model.title if subject.records else subject.title


def _step_title(step: Step, name: str) -> str:
    title = step.estimate.model.title
    return name if not name or name.startswith(title) else f"{title}: {name}"
