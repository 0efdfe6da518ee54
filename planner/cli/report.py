"""`planner report`: runs and predicted steps as one page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.cli.estimate import NOT_FOR_RANKING, StepRow, rank_key, read_rows
from planner.cli.options import TO_FILE, argument, option, reads, switch
from planner.cli.rows import Rows
from planner.cli.show import say, tell
from planner.estimation.ledgers import record_ledgers

if TYPE_CHECKING:
    from planner.report.step import PredictedStep

PAGE_FLAGS = ("--targets", "--output", "--force", "--title")


class ReportRequest(Rows):
    """The request of `planner report`."""

    targets: tuple[str, ...] = argument("RUN|MODEL…", "models")
    output: str = option("The page, one .html file.", *TO_FILE, default="report.html")
    force: bool = switch("Also replace what 'planner report' did not write.")
    title: str | None = option("The page's title.", "TEXT", "Output")


@reads(ReportRequest)
def command(request: ReportRequest) -> None:
    """Draw RUNs and MODELs as one HTML page that opens offline.

    A RUN is the --output of 'planner tune' (also while it runs), or a file of records. A MODEL is
    estimated with the options of 'planner estimate': several values make several estimates, and
    --gpu all ranks every GPU. Two runs or estimates, or more, are shown side by side.

    Examples:
      planner report run
      planner report native:swin_tiny --batch-size 64 --gpu "RTX 3090,RTX 4090"
    """
    from search.runs import check_options, check_page, check_target, is_run, write_report

    check_page(request.output, request.force)
    for target in request.targets:
        check_target(target)
    typed = {flag: value for flag, value in request.typed.items() if flag not in PAGE_FLAGS}
    check_options(typed, request.targets)
    shown: list[str | PredictedStep] = []
    for target in request.targets:
        shown += [target] if is_run(target) else _predicted_steps(target, request)
    written = write_report(shown, request.output, title=request.title or "", force=request.force)
    say(f"Wrote {written}.")


def _predicted_steps(model: str, request: ReportRequest) -> list[PredictedStep]:
    """The steps that the options mean: one for each GPU and each combination of values. With
    --gpu all, the fastest that fits is first."""
    from search.runs import predicted_step

    is_ranked = (request.gpu or "").casefold() == "all"
    if is_ranked:
        request.refuse("--gpu all", NOT_FOR_RANKING)
    rows: list[StepRow] = []
    # All GPUs together, or one by one.
    for gpus in [list(request.gpus)] if is_ranked else [[gpu] for gpu in request.gpus] or [[]]:
        new_rows, remarks = read_rows(model, request, gpus, {})
        rows += new_rows
        for line in remarks:
            tell(line)
    requests = [(config, setting, gpu) for gpu, config, setting in rows]
    record_ledgers(requests, recorded=request.recorded)
    steps = [predicted_step(config, setting, request.target(gpu)) for gpu, config, setting in rows]
    steps = [replace(step, model_text=model, fields=request.fields.model) for step in steps]
    return sorted(steps, key=lambda step: rank_key(step.estimate)) if is_ranked else steps
