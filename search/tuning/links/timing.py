"""A world of this machine's devices that times its collectives. No torch."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from planner.core.errors import PlannerError
from planner.core.schema.link import LinkCurve
from planner.machine.links.plan import LinkPlan
from search.probe.parent.attendance import Attendance
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.ranks import rank_places
from search.tuning.links.protocol import ANSWERS, LinkOrder, LinkOutcome, LinkRequest

_WORKER = "search.tuning.links.worker"
# What NCCL and gloo are told: a curve is of the same network only with these.
_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")


def measure_link(plan: LinkPlan) -> LinkCurve:
    """The link between `plan.world_size` devices of this machine. Raises PlannerError where a rank
    fails, and when the deadline has passed; no rank is left then."""
    request, seconds = LinkRequest(plan=plan), plan.deadline_seconds
    # One thread for each rank, as torchrun has it.
    with ForkServer(modules=(_WORKER,)) as server, rank_places(plan.world_size, 1) as places:
        orders = [LinkOrder(request=request, deadline_seconds=seconds, place=p) for p in places]
        outcome = Attendance(
            orders, LinkOutcome, lambda answer: None, seconds, server, _WORKER, answers=ANSWERS
        ).run()
    if outcome.status != "measured":
        at = "" if outcome.status == "timed_out" else f", in {outcome.phase}"
        raise PlannerError(
            f"the link was not measured: {outcome.message}{at}. "
            f"All {plan.world_size} ranks were ended.",
            "Run it again, or over fewer GPUs; NCCL_DEBUG=INFO shows what NCCL does.",
        )
    return LinkCurve(
        device=plan.device,
        backend=plan.backend,
        world_size=plan.world_size,
        points=tuple(sorted(outcome.points, key=lambda p: (p.collective, p.num_bytes))),
        versions=outcome.versions,
        variables={n: os.environ[n] for n in sorted(os.environ) if n.startswith(_VARIABLES)},
        topology=plan.topology,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
