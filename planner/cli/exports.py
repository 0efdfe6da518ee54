"""What `planner estimate` writes for another tool: --chrome-trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from planner.core.errors import printable
from planner.core.files import check_output

if TYPE_CHECKING:
    from planner.estimation.estimate import Estimate
    from planner.ledger.ledger import Ledger
    from planner.machine.hardware import Gpu


def check_exports(given: Mapping[str, Any]) -> None:
    """Raises UsageError and PlannerError for files that cannot be, before anything is estimated."""
    if given["chrome_trace"]:
        from planner.report.chrome_trace import ENDINGS as OF_TRACES

        check_output(given["chrome_trace"], "a trace", OF_TRACES)


def write_exports(
    given: Mapping[str, Any],
    ledger: Ledger,
    found: Estimate,
    gpu: Gpu | None,
) -> None:
    """Writes what was asked for of one estimate, and says so."""
    if given["chrome_trace"]:
        from planner.report.chrome_trace import trace_of, write_trace

        assert gpu is not None, "it was asked for"
        trace = trace_of(found, ledger, gpu, given["link"])
        path = write_trace(trace, given["chrome_trace"])
        said = f"{path}: the predicted step in time."
        click.echo(printable(f"\nWrote {said}"), err=given["as_json"])
