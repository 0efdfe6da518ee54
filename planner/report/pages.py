"""From estimates and searches to one page, and to its file."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from planner import __version__
from planner.advice.advising import advise
from planner.core.schema import MeasurementRecord
from planner.core.units import GIB, format_bytes, format_rate
from planner.estimation.device_estimator import largest_batch
from planner.estimation.ledgers import is_on_shapes
from planner.machine.hardware import recognise_gpu
from planner.report.estimates import is_shown_as_running, row_names, rows_answer, verdict_of
from planner.report.page import contents as doc
from planner.report.page.plotting import bars
from planner.report.searches import Run, interval_text, run_group, so_far
from planner.report.step import Step, step_group
from planner.report.text import describe_setting

Subject = Step | Run
# Beyond so many subjects a page compares them all, and shows these only one by one: it stays under
# 5 MB, and readable.
MOST_GROUPS = 6


def made_now() -> str:
    """By what a page is made, and when."""
    return f"planner {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M UTC}"


def make_page(subjects: Sequence[Subject], title: str = "") -> doc.Page:
    """The page of one subject, or of several side by side."""
    if len(subjects) == 1:
        (one,) = subjects
        group = step_group(with_more(one), "g1") if isinstance(one, Step) else run_group(one, "g1")
        return doc.Page(title or _title(one), "", [group], made_now())
    steps = [subject for subject in subjects if isinstance(subject, Step)]
    runs = [subject for subject in subjects if isinstance(subject, Run)]
    names = iter(row_names([step.estimate for step in steps]))
    titles = [s.place if isinstance(s, Run) else next(names) for s in subjects]
    groups = [
        step_group(one, f"g{n}", named) if isinstance(one, Step) else run_group(one, f"g{n}", named)
        for n, (one, named) in enumerate(zip(subjects, titles, strict=True), start=1)
        if n <= MOST_GROUPS
    ]
    beside = [*_steps_beside(steps), *_runs_beside(runs)]
    if steps and runs:
        beside.append(_predicted_and_measured(steps, runs))
    if left := titles[MOST_GROUPS:]:
        said = (
            f"{len(left)} more are compared above, and not shown one by one, so that the page "
            f"stays small. Name fewer, {MOST_GROUPS} at most, to see these too: {'; '.join(left)}."
        )
        beside.append(doc.Section("left-out", "Not shown one by one", [doc.Text(said)]))
    is_folded = max(len(steps), len(runs)) > 1  # they are compared: of one kind, or of both
    folded = [replace(group, folded=is_folded) for group in groups]
    whole = [doc.Group("beside", "Side by side", beside), *folded]
    return doc.Page(title or _several_title(steps, runs), "", whole, made_now())


def with_more(step: Step) -> Step:
    """A step with the largest batch that fits and, where it does not fit itself, what fits in its
    place. Of a model that is recorded neither: every batch and every way takes a moment."""
    estimate = step.estimate
    model, setting = estimate.model, estimate.setting
    if estimate.budget_bytes is None or not is_on_shapes(model, setting):
        return step
    best = largest_batch(
        model, setting, step.gpu, step.memory_bytes, allocator=step.allocator, link=step.link
    )
    advice = None if estimate.fits else advise(
        model, setting, gpu=step.gpu, memory_bytes=step.memory_bytes, allocator=step.allocator,
        link=step.link, batch_size=setting.batch_size * setting.accumulate,
    )  # fmt: skip
    return replace(step, largest=best, advice=advice)


def _title(subject: Subject) -> str:
    """What it is of, and of an estimate whether it fits."""
    if isinstance(subject, Run):
        found, best = subject.found, subject.best
        if found is None or found.setting is None or best is None:
            return f"Search: {subject.place}"
        rate = format_rate(best.world_images_per_second)
        return f"{found.model.title} on {found.device.title}: {rate} {subject.unit}/s"
    estimate = subject.estimate
    fits = verdict_of(estimate).word.lower()
    if estimate.fits is None:
        fits = f"needs {format_bytes(estimate.device_total_bytes)}"
    return f"{subject.title}: batch {estimate.setting.batch_size} {fits}"


def _several_title(steps: Sequence[Step], runs: Sequence[Run]) -> str:
    counts = [(len(steps), "estimate"), (len(runs), "run")]
    counted = " and ".join(f"{n} {what}{'s' if n > 1 else ''}" for n, what in counts if n)
    models = {step.estimate.model.title for step in steps}
    models |= {run.records[0].model.title if run.records else run.place for run in runs}
    return f"{counted} of {models.pop()}" if len(models) == 1 else f"{counted} side by side"


def _steps_beside(steps: Sequence[Step]) -> list[doc.Section]:
    """A row for each, as a terminal prints it, and two charts."""
    if len(steps) < 2:
        return []
    found = [step.estimate for step in steps]
    first, *rest = doc.sections_of(rows_answer(found, lambda _: ""), "Estimates compared")
    names = row_names(found)
    ran = {
        name: time for name, one in zip(names, found, strict=True)
        if (time := one.throughput) is not None and is_shown_as_running(one)
    }  # fmt: skip
    needs = {name: one.device_total_bytes / GIB for name, one in zip(names, found, strict=True)}
    charts: list[doc.Part] = [
        bars("beside-memory", "Memory needed, of what each card has.", needs, "GiB",
             [(one.low_bytes / GIB, one.high_bytes / GIB) for one in found],
             [one.budget_bytes and one.budget_bytes / GIB for one in found])
    ]  # fmt: skip
    if ran:
        rates = {name: time.all_images_per_second for name, time in ran.items()}
        within = [(r * (1 - t.uncertainty), r * (1 + t.uncertainty))
                  for r, t in zip(rates.values(), ran.values(), strict=True)]  # fmt: skip
        said = (
            "How fast each that may fit is predicted to be. Where ranges overlap, either may win."
        )
        charts.insert(0, bars("beside-rate", said, rates, f"{found[0].unit}/s", within))
    more = [doc.Folded(section.title, section.parts) for section in rest]
    return [replace(first, key="estimates", parts=[*first.parts, *charts, *more])]


def _runs_beside(runs: Sequence[Run]) -> list[doc.Section]:
    """What each search recommends, and what it was measured with; the fastest is set apart."""
    if len(runs) < 2:
        return []
    rates = [(r.best and r.best.world_images_per_second) or 0.0 for r in runs]
    same_work = len({run.best.model for run in runs if run.best is not None}) == 1
    rows: list[list[doc.Cell]] = [
        [
            run.place,
            doc.rate_cell(rate or None),
            interval_text(run.interval_of(best)) if best else "-",
            doc.bytes_cell(best.used_bytes if best else None),
            doc.Number(gain, f"{gain:.2f} ×" if gain else "-"),
            doc.count_cell(len(run.records)),
            describe_setting(best.setting, best.model) if best else so_far(run),
            f"{best.device.title}, torch {best.versions.get('torch', '?')}" if best else "-",
        ]
        for run, rate in zip(runs, rates, strict=True)
        for best, gain in [(run.best, run.found.gain if run.found else None)]
    ]
    headers = ["run", f"{runs[0].unit}/s", "of each device, 95% range", "memory", "plain default",
               "probes", "setting", "measured on"]  # fmt: skip
    said = "What each run recommends; of one that still runs, the best so far."
    if not same_work:
        said += " They are of different models: their rates cannot be compared."
    marked = [rates.index(max(rates))] if same_work else []
    return [doc.Section("runs", "Runs compared", [doc.Table(headers, rows, said, marked)])]


def _predicted_and_measured(steps: Sequence[Step], runs: Sequence[Run]) -> doc.Section:
    """Estimates beside what runs measured of the same model and setting."""
    rows: list[list[doc.Cell]] = [
        [
            step.estimate.model.title,
            describe_setting(step.estimate.setting, step.estimate.model),
            f"{run.place}, {record.device.name}",
            doc.bytes_cell(needs), doc.bytes_cell(record.used_bytes),
            _off(needs, record.used_bytes), doc.rate_cell(rate),
            doc.rate_cell(record.world_images_per_second),
            _off(rate, record.world_images_per_second),
        ]
        for step in steps for run in runs for record in run.records if is_of(record, step)
        for needs, time in [(step.estimate.device_total_bytes, step.estimate.throughput)]
        for rate in [time.all_images_per_second if time else None]
    ]  # fmt: skip
    headers = ["model", "setting", "run", "memory predicted", "measured", "off",
               "rate predicted", "measured", "off"]  # fmt: skip
    said = (
        "Probes of exactly the settings that are estimated on this page. On a CPU memory is what "
        "the process grew by, which is not what a GPU would hold."
    )
    none = (
        "No probe here has the model and setting of an estimate on its card: estimate the setting "
        "that a run recommends, with --gpu of its card, to compare the two."
    )
    return doc.Section("measured", "Predicted against measured",
                   [doc.Table(headers, rows, said) if rows else doc.Text(none)])  # fmt: skip


def is_of(record: MeasurementRecord, step: Step) -> bool:
    """Whether a probe measured a step's model and setting, on its card where one is named. A record
    may leave the attention to the library, where an estimate names it."""
    setting, device = record.setting, record.device
    if setting.attention == "library":
        setting = setting.model_copy(update={"attention": step.estimate.setting.attention})
    is_there = step.gpu is None or recognise_gpu(device.name, device.total_bytes) == step.gpu
    is_same = record.model == step.estimate.model and setting == step.estimate.setting
    return record.status == "measured" and is_same and is_there


def _off(predicted: float | None, measured: float | None) -> doc.Number:
    off = predicted / measured - 1 if predicted and measured else None
    return doc.Number(off, "-" if off is None else f"{off:+.1%}")
