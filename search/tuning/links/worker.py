"""One rank of a world that times its collectives: `python -m search.tuning.links.worker REQUEST_FD
RESULT_FD`. It tells of each step before it begins, and at last what it measured.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import NoReturn

import torch
from torch import distributed

from planner.core import failures
from planner.core.collectives import Collective
from planner.core.schema.link import LinkPoint
from planner.core.units import format_bytes
from planner.machine.links.plan import LinkPlan
from search.probe.protocol import RankPlace
from search.probe.worker.report import Report
from search.probe.worker.worker import serve
from search.tuning.links.protocol import LinkOrder, LinkOutcome

SAMPLES = 9  # of which the median counts
_WARM_UPS = 2
# A sample lasts so long at least, in calls one after the other, as a backward pass sends buckets.
_SAMPLE_SECONDS = 0.002
_MOST_CALLS = 50


def work(request_fd: int, result_fd: int) -> NoReturn:
    """Measures what the plan of the order says."""
    serve(LinkOrder, "search.tuning.links.worker", request_fd, result_fd, _carry_out)


def _carry_out(order: LinkOrder, deadline: float, report: Report) -> None:
    assert order.place is not None, "it is a rank"
    try:
        points = _measure(order.request.plan, order.place, report)
    except Exception as error:
        report.say(
            LinkOutcome(
                probe_id=report.probe_id, status="crashed", phase=report.phase,
                message=f"{type(error).__name__}: {error}".partition("\n")[0],
                lost_others=failures.is_lost_peer(str(error)),
            )
        )  # fmt: skip
        return
    versions = {"torch": str(torch.__version__)}
    if order.request.plan.backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    outcome = LinkOutcome(
        probe_id=report.probe_id, status="measured", points=tuple(points), versions=versions
    )
    report.say(outcome)


def _measure(plan: LinkPlan, place: RankPlace, report: Report) -> list[LinkPoint]:
    report.enter("the start of its process group")
    # Ranks of one machine meet on its loopback, which needs no name to be resolved.
    torch.set_num_threads(place.threads or 1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torch 2.13 has new names for two collectives, which 2.9 lacks.
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = torch.device("cpu")
    if plan.backend == "nccl":
        device = torch.device("cuda", place.rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        plan.backend,
        store=distributed.FileStore(place.store, plan.world_size),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=plan.world_size,
        device_id=device if plan.backend == "nccl" else None,
    )
    bench = _Bench(plan.world_size, place.rank, device)
    bench.agree(0.0)  # connects
    end = time.perf_counter() + plan.budget_seconds
    last: dict[Collective, float] = {}
    points = []
    for num_bytes in plan.sizes:
        for collective in plan.collectives:
            # At worst a call takes as many times longer as it has more bytes: plans go in fours.
            expected = 4 * last.get(collective, 0.0) * (SAMPLES + _WARM_UPS)
            if bench.agree(float(time.perf_counter() + expected > end)):
                continue
            report.enter(f"{collective} of {format_bytes(num_bytes)}")
            size, last[collective] = bench.time(collective, num_bytes)
            points.append(
                LinkPoint(collective=collective, num_bytes=size, seconds=last[collective])
            )
    bench.agree(0.0)  # nobody leaves before all have measured
    return points


class _Bench:
    """Collectives on one device, timed; every rank calls the same methods in the same order."""

    def __init__(self, world_size: int, rank: int, device: torch.device) -> None:
        self.world_size, self.rank, self.device = world_size, rank, device

    def agree(self, *values: float) -> float:
        """The median of the values, of each the largest of all ranks', once all are here."""
        told = torch.tensor(values, device=self.device, dtype=torch.float64)
        distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
        return float(median(told.tolist()))

    def time(self, collective: Collective, num_bytes: int) -> tuple[int, float]:
        """The bytes of the whole array, which every rank has an equal share of, and the seconds of
        one call on the slowest rank: the median of several samples."""
        call, size = self._call(collective, num_bytes)
        for _ in range(_WARM_UPS):
            once = self.agree(self._sample(call, 1))
        calls = max(1, min(_MOST_CALLS, int(_SAMPLE_SECONDS / max(once, 1e-7))))
        samples = []
        for _ in range(SAMPLES):
            self.agree(0.0)  # all begin together
            samples.append(self._sample(call, calls) / calls)
        return size, self.agree(*samples)

    def _call(self, collective: Collective, num_bytes: int) -> tuple[Callable[[], object], int]:
        """What to call on fp32, in place but for a reduce-scatter, and the bytes of its array."""
        share = -(-num_bytes // (4 * self.world_size))
        whole = torch.zeros(share * self.world_size, device=self.device)
        mine = whole.narrow(0, share * self.rank, share)
        apart = torch.zeros_like(mine) if collective == "reduce_scatter" else mine
        calls: dict[Collective, Callable[[], object]] = {
            "all_reduce": lambda: distributed.all_reduce(whole),
            "all_gather": lambda: distributed.all_gather_into_tensor(whole, mine),
            "reduce_scatter": lambda: distributed.reduce_scatter_tensor(apart, whole),
            "broadcast": lambda: distributed.broadcast(whole, 0),
        }
        return calls[collective], 4 * whole.numel()

    def _sample(self, call: Callable[[], object], calls: int) -> float:
        """The seconds of `calls` calls one after the other."""
        is_cuda = self.device.type == "cuda"
        wait: Callable[[], object] = torch.cuda.synchronize if is_cuda else lambda: None
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return time.perf_counter() - start


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
