"""What a search does not look at, in words."""

from __future__ import annotations

from collections.abc import Iterable

from planner.advice.levers import FAITHFUL
from planner.advice.search import MAX_BATCH, MAX_MICRO_BATCHES, PLAINLY_COMBINED, Offered, divisors
from planner.advice.wish import SAMPLE_BATCH, Wish
from planner.core.schema import SwinConfig


def what_is_left_out(wish: Wish, offered: Offered) -> Iterable[str]:
    """A line for each."""
    tried = min(wish.plain.batch_size, SAMPLE_BATCH)
    if offered.adopted:
        yield (
            f"ways without {', '.join(offered.adopted)}: tried at batch {tried}, these "
            "cost neither memory nor time, so every way has them"
        )
    if offered.held_back:
        yield (
            f"ways with {', '.join(offered.held_back)}: what is recommended surely fits, and even "
            "an eager step that had all the memory it wants would be no faster"
        )
    yield (
        "max-autotune and max-autotune-no-cudagraphs: their kernels are tuned on the device, which "
        "no estimate knows; compile_scope, compile_dynamic and compile_fullgraph: they change how "
        "long compiling takes"
    )
    if isinstance(wish.model, SwinConfig):
        yield (
            "compiled steps are predicted from the eager one where no compiled trace is kept: "
            "their range is wide ('planner estimate --compile default --trace' narrows it)"
        )
        yield "checkpointing of every second block, and of other numbers of the first blocks"
    yield (
        "beyond checkpointing, compile and the micro-batch, changes are combined one at a time, "
        f"and only with checkpointing {' or '.join(PLAINLY_COMBINED)}"
    )
    if not isinstance(wish.model, SwinConfig):
        yield "checkpointing in parts, and precisions that would need further traces"
    if wish.share is None:
        yield f"batches of 1, above {MAX_BATCH}, and not among 2, 3, 4, 6, 8, 12, 16 …"
    elif len(divisors(wish.share)) - 1 > MAX_MICRO_BATCHES:
        yield f"of {len(divisors(wish.share))} micro-batches all but {MAX_MICRO_BATCHES}"
    elif wish.is_splittable:
        yield "micro-batches of 1"
    if set(wish.allow) == set(FAITHFUL):
        yield "other optimizers, pure-bf16 and fp8 (--allow recipe), adapters (--allow adapters)"
    yield "loading the data, and clocks that fall under load: 'planner tune --data' measures them"
