"""The page of one estimate or search, or of several compared.

A subject is one of either: a `PredictedStep` or a `SearchRun`.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from planner import __version__
from planner.advice.advice import advise
from planner.core.schema import MeasurementRecord
from planner.core.units import GIB, format_bytes, format_rate
from planner.estimation.largest import largest_that_fits
from planner.estimation.ledgers import is_on_shapes
from planner.machine.hardware import recognise_gpu
from planner.report.estimates import estimate_verdict, is_shown_as_running, row_names, rows_answer
from planner.report.page import contents as doc
from planner.report.page.plotting import bar_chart
from planner.report.searches import SearchRun, interval_text, progress_text, run_group
from planner.report.step import PredictedStep, step_group
from planner.report.text import describe_setting

Subject = PredictedStep | SearchRun
# A page compares all of its subjects, and shows at most so many one by one: it stays under 5 MB,
# and readable.
MAX_GROUPS = 6


def make_footer() -> str:
    """The version that makes a page, and the time."""
    return f"planner {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M UTC}"


def make_page(subjects: Sequence[Subject], title: str = "") -> doc.Page:
    """The page of one subject, or of several side by side."""
    if len(subjects) == 1:
        (subject,) = subjects
        if isinstance(subject, PredictedStep):
            subject = add_alternatives(subject)
        group = _subject_group(subject, "g1")
        return doc.Page(title or _page_title(subject), [group], make_footer())
    steps = [subject for subject in subjects if isinstance(subject, PredictedStep)]
    runs = [subject for subject in subjects if isinstance(subject, SearchRun)]
    names = iter(row_names([step.estimate for step in steps]))
    titles = [s.place if isinstance(s, SearchRun) else next(names) for s in subjects]
    groups = [
        _subject_group(subject, f"g{n}", name)
        for n, (subject, name) in enumerate(zip(subjects, titles, strict=True), start=1)
        if n <= MAX_GROUPS
    ]
    comparisons = [*_compare_steps(steps), *_compare_runs(runs)]
    if steps and runs:
        comparisons.append(_compare_predictions(steps, runs))
    if others := titles[MAX_GROUPS:]:
        text = (
            f"{len(others)} more are compared above, and not shown one by one, so that the page "
            f"stays small. Name fewer, {MAX_GROUPS} at most, to see these too: {'; '.join(others)}."
        )
        comparisons.append(doc.Section("left-out", "Not shown one by one", [doc.Text(text)]))
    # One estimate and one run stay open; of several of a kind the comparison is what one reads.
    is_folded = max(len(steps), len(runs)) > 1
    groups = [replace(group, folded=is_folded) for group in groups]
    groups.insert(0, doc.Group("beside", "Side by side", comparisons))
    return doc.Page(title or _several_title(steps, runs), groups, make_footer())


def _subject_group(subject: Subject, key: str, title: str = "") -> doc.Group:
    if isinstance(subject, SearchRun):
        return run_group(subject, key, title)
    return step_group(subject, key, title)


def add_alternatives(step: PredictedStep) -> PredictedStep:
    """The step with the largest batch that fits and, where it does not fit itself, advice on what
    does. A step that must be recorded gets neither: each batch and each way would take a moment."""
    estimate = step.estimate
    model, setting = estimate.model, estimate.setting
    if estimate.budget_bytes is None or not is_on_shapes(model, setting):
        return step
    target = replace(step.target, recorded=False)
    advice = None if estimate.fits else advise(
        model, setting, gpu=target.gpu, memory_bytes=target.memory_bytes, link=target.link,
        allocator=target.allocator, batch_size=setting.images_per_device_step,
    )  # fmt: skip
    return replace(step, largest=largest_that_fits(model, setting, target), advice=advice)


def _page_title(subject: Subject) -> str:
    """The subject of a page, with the rate of a search, or whether an estimate fits."""
    if isinstance(subject, SearchRun):
        result, best = subject.result, subject.best
        if result is None or result.setting is None or best is None:
            return f"Search: {subject.place}"
        rate = format_rate(best.world_images_per_second)
        return f"{result.model.title} on {result.device.title}: {rate} {subject.unit}/s"
    estimate = subject.estimate
    fits = estimate_verdict(estimate).word.lower()
    if estimate.fits is None:
        fits = f"needs {format_bytes(estimate.device_total_bytes)}"
    return f"{subject.title}: batch {estimate.setting.batch_size} {fits}"


def _several_title(steps: Sequence[PredictedStep], runs: Sequence[SearchRun]) -> str:
    counts = [(len(steps), "estimate"), (len(runs), "run")]
    counted = " and ".join(f"{n} {noun}{'s' if n > 1 else ''}" for n, noun in counts if n)
    models = {step.estimate.model.title for step in steps}
    models |= {run.records[0].model.title if run.records else run.place for run in runs}
    return f"{counted} of {models.pop()}" if len(models) == 1 else f"{counted} side by side"


def _compare_steps(steps: Sequence[PredictedStep]) -> list[doc.Section]:
    """The table of estimates that a terminal prints, and charts of rate and memory."""
    if len(steps) < 2:
        return []
    estimates = [step.estimate for step in steps]
    answer = rows_answer(estimates, lambda _: "")
    first, *others = doc.make_sections(answer, "Estimates compared")
    named = dict(zip(row_names(estimates), estimates, strict=True))
    needs = {name: estimate.device_total_bytes / GIB for name, estimate in named.items()}
    charts: list[doc.Part] = [
        bar_chart("beside-memory", "Memory needed, of what each card has.", needs, "GiB",
                  [(e.low_bytes / GIB, e.high_bytes / GIB) for e in estimates],
                  [e.budget_bytes and e.budget_bytes / GIB for e in estimates])
    ]  # fmt: skip
    running = {
        name: e.throughput for name, e in named.items()
        if e.throughput is not None and is_shown_as_running(e)
    }  # fmt: skip
    if running:
        rates = {name: time.all_images_per_second for name, time in running.items()}
        ranges = [
            (rates[name] * (1 - time.uncertainty), rates[name] * (1 + time.uncertainty))
            for name, time in running.items()
        ]
        text = (
            "How fast each that may fit is predicted to be. Where ranges overlap, either may win."
        )
        charts.insert(0, bar_chart("beside-rate", text, rates, f"{estimates[0].unit}/s", ranges))
    folded = [doc.Folded(section.title, section.parts) for section in others]
    return [replace(first, key="estimates", parts=[*first.parts, *charts, *folded])]


def _compare_runs(runs: Sequence[SearchRun]) -> list[doc.Section]:
    """A row for each search: what it recommends, and where that was measured. The fastest is
    marked."""
    if len(runs) < 2:
        return []
    rates = [(r.best and r.best.world_images_per_second) or 0.0 for r in runs]
    same_work = len({run.best.model for run in runs if run.best is not None}) == 1
    rows: list[list[doc.Cell]] = [
        [
            run.place,
            doc.rate_cell(rate or None),
            interval_text(run.rate_interval(best)) if best else "-",
            doc.bytes_cell(best.used_bytes if best else None),
            doc.Number(gain, f"{gain:.2f} ×" if gain else "-"),
            doc.count_cell(len(run.records)),
            describe_setting(best.setting, best.model) if best else progress_text(run),
            f"{best.device.title}, torch {best.versions.get('torch', '?')}" if best else "-",
        ]
        for run, rate in zip(runs, rates, strict=True)
        for best, gain in [(run.best, run.result.gain if run.result else None)]
    ]
    headers = ["run", f"{runs[0].unit}/s", "of each device, 95% range", "memory", "plain default",
               "probes", "setting", "measured on"]  # fmt: skip
    caption = "What each run recommends; of one that still runs, the best so far."
    if not same_work:
        caption += " They are of different models: their rates cannot be compared."
    marked = [rates.index(max(rates))] if same_work else []
    return [doc.Section("runs", "Runs compared", [doc.Table(headers, rows, caption, marked)])]


def _compare_predictions(steps: Sequence[PredictedStep], runs: Sequence[SearchRun]) -> doc.Section:
    """Each estimate beside the probes of the same model and setting."""
    rows: list[list[doc.Cell]] = [
        [
            step.estimate.model.title,
            describe_setting(step.estimate.setting, step.estimate.model),
            f"{run.place}, {record.device.name}",
            doc.bytes_cell(needs), doc.bytes_cell(record.used_bytes),
            _error_cell(needs, record.used_bytes), doc.rate_cell(rate),
            doc.rate_cell(record.world_images_per_second),
            _error_cell(rate, record.world_images_per_second),
        ]
        for step in steps for run in runs for record in run.records if is_probe_of(record, step)
        for needs, time in [(step.estimate.device_total_bytes, step.estimate.throughput)]
        for rate in [time.all_images_per_second if time else None]
    ]  # fmt: skip
    headers = ["model", "setting", "run", "memory predicted", "measured", "off",
               "rate predicted", "measured", "off"]  # fmt: skip
    caption = (
        "Probes of exactly the settings that are estimated on this page. On a CPU memory is what "
        "the process grew by, which is not what a GPU would hold."
    )
    none = (
        "No probe here has the model and setting of an estimate on its card: estimate the setting "
        "that a run recommends, with --gpu of its card, to compare the two."
    )
    return doc.Section("measured", "Predicted against measured",
                   [doc.Table(headers, rows, caption) if rows else doc.Text(none)])  # fmt: skip


def is_probe_of(record: MeasurementRecord, step: PredictedStep) -> bool:
    """Whether a probe measured a step's model and setting, on its card where one is named. A record
    may leave the attention to the library where the estimate names it."""
    setting, device, gpu = record.setting, record.device, step.target.gpu
    if setting.attention == "library":
        setting = setting.model_copy(update={"attention": step.estimate.setting.attention})
    is_there = gpu is None or recognise_gpu(device.name, device.total_bytes) == gpu
    is_same = record.model == step.estimate.model and setting == step.estimate.setting
    return record.status == "measured" and is_same and is_there


def _error_cell(predicted: float | None, measured: float | None) -> doc.Number:
    error = predicted / measured - 1 if predicted and measured else None
    return doc.Number(error, "-" if error is None else f"{error:+.1%}")
