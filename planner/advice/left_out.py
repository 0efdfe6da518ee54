"""What a search does not look at, in words."""

from __future__ import annotations

from collections.abc import Iterable

from planner.advice.levers import FAITHFUL
from planner.advice.space import PLAINLY_COMBINED, Offered
from planner.advice.wish import Wish
from planner.core.errors import PlannerError


def what_is_left_out(wish: Wish, offered: Offered, failed: list[PlannerError]) -> Iterable[str]:
    """A line for each."""
    if offered.adopted:
        yield f"ways without {', '.join(offered.adopted)}, which cost neither memory nor time"
    if failed:
        first = failed[0].message.partition("\n")[0]
        yield f"{len(failed)} of the choices, which cannot be estimated; the first as {first}"
    if offered.held_back:
        yield f"ways with {', '.join(offered.held_back)}: no faster than what is recommended"
    yield (
        "max-autotune and max-autotune-no-cudagraphs: their kernels are tuned on the device; "
        "compile_scope: it changes how long compiling takes"
    )
    yield (
        "beyond checkpointing, compile and the micro-batch, changes are combined one at a time, "
        f"and only with checkpointing {' or '.join(PLAINLY_COMBINED)}"
    )
    if set(wish.allow) == set(FAITHFUL):
        yield "other optimizers, pure-bf16 and fp8 (--allow recipe), adapters (--allow adapters)"
