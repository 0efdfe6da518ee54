"""The process of one observation: `python -m search.probe.observation.worker RESULT_FD ORDER`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from planner.errors import PlannerError
from planner.schema.observation import Sight
from search.probe.observation import attention, context, driver, history, steps
from search.probe.observation.order import Order, Teller
from search.probe.observation.view import NotHereError, View, make_view
from search.probe.worker.worker import end, prepare

# What looks; the text of an error that was looked for is returned.
SIGHTS: dict[Sight, Callable[[Order, View, Teller], str | None]] = {
    "driver": driver.see_driver,
    "memory-return": driver.see_memory_return,
    "one-step": steps.see_one_step,
    "attention-memory": attention.see_attention_memory,
    "near-limit": steps.see_near_limit,
    "timing": steps.see_timing,
    "compile-cache": steps.see_compile_cache,
    "context": context.see_context,
    "attention-kernels": attention.see_attention_kernels,
    "attention-rate": attention.see_attention_rate,
    "snapshot": history.see_snapshot,
}


def main() -> NoReturn:
    result_fd = int(sys.argv[1])
    prepare(result_fd)
    look(Order.model_validate_json(sys.argv[2]), Teller(result_fd))
    end()


def look(order: Order, tell: Teller) -> None:
    """Carry out one observation and say how it ended."""
    torch.manual_seed(0)
    try:
        text = SIGHTS[order.observation.see](order, make_view(order.device), tell) or ""
    except NotHereError as why:
        tell.end("not_here", str(why))
    except (Exception, SystemExit) as error:
        known = str(error) if isinstance(error, PlannerError) else steps.whole_text(error)
        tell.end("failed", known)
    else:
        tell.end("seen", text)


if __name__ == "__main__":
    main()
