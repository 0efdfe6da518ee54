"""One rank of a world that times collectives: run as `python -m` by `world`, which it answers.

It prints one JSON object a line: `{"at": …}` before each step, of rank 0 a point for each
collective and size, and at last `{"done": …}`. It ends when its parent does, and at its deadline,
whatever a collective waits for.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING

from planner.ledger import Collective
from planner.units import format_bytes

if TYPE_CHECKING:
    import torch

SAMPLES = 9  # of which the median counts
_WARM_UPS = 2
# A sample lasts so long at least, in calls one after the other, as a backward pass sends buckets.
_SAMPLE_SECONDS = 0.002
_MOST_CALLS = 50
_LATE, _ORPHANED = 3, 4  # exit statuses


@dataclass(frozen=True)
class Plan:
    """What a rank does. `sizes` ascend; a collective that the rest of `budget_seconds` has no room
    for is left out at that size and above. `store` is the file by which the ranks meet."""

    backend: str
    world_size: int
    rank: int
    store: str
    sizes: tuple[int, ...]
    collectives: tuple[Collective, ...]
    budget_seconds: float
    deadline_seconds: float


def main() -> None:
    """Measures what the plan on the command line says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this
    plan = Plan(**json.loads(sys.argv[1]))
    answers: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _end_in_time(plan.deadline_seconds)
    # torch 2.13 has new names for two collectives, which 2.9 lacks.
    warnings.filterwarnings("ignore", category=FutureWarning)
    _measure(plan, lambda answer: print(json.dumps(answer), file=answers, flush=True))


def _end_in_time(deadline_seconds: float) -> None:
    """Ends this process when its parent is gone, which closes standard input, and when it is late:
    a collective waits for others without end, but not with the lock of the interpreter."""
    late = threading.Timer(deadline_seconds, os._exit, (_LATE,))
    late.daemon = True
    late.start()

    def watch() -> None:
        # Nothing is ever written to it; sys.stdin's own lock would abort an interpreter that ends.
        os.read(0, 1)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def _measure(plan: Plan, say: Callable[[dict[str, object]], None]) -> None:
    import torch
    import torch.distributed as dist

    say({"at": "the start of its process group"})
    device = torch.device("cuda", plan.rank) if plan.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        plan.backend,
        store=dist.FileStore(plan.store, plan.world_size),  # type: ignore[attr-defined]
        rank=plan.rank,
        world_size=plan.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    bench = _Bench(plan, device)
    bench.agree(0.0)  # connects
    end = time.perf_counter() + plan.budget_seconds
    last: dict[Collective, float] = {}
    for num_bytes in plan.sizes:
        for collective in plan.collectives:
            # At worst a call takes as many times longer as it has more bytes: plans go in fours.
            expected = 4 * last.get(collective, 0.0) * (SAMPLES + _WARM_UPS)
            if bench.agree(float(time.perf_counter() + expected > end)):
                continue
            say({"at": f"{collective} of {format_bytes(num_bytes)}"})
            size, last[collective] = bench.time(collective, num_bytes)
            if plan.rank == 0:
                point = {"collective": collective, "num_bytes": size, "seconds": last[collective]}
                say({"point": point})
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    # The store is rank 0's as well: nobody leaves before all have answered.
    bench.agree(0.0)
    dist.destroy_process_group()
    say({"done": versions})


class _Bench:
    """Collectives on one device, timed; every rank calls the same methods in the same order."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device

    def agree(self, value: float) -> float:
        """The largest of all ranks' values, once all are here."""
        return self._most([value])[0]

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
        return size, statistics.median(self._most(samples))

    def _call(self, collective: Collective, num_bytes: int) -> tuple[Callable[[], object], int]:
        """What to call on fp32, in place but for a reduce-scatter, and the bytes of its array."""
        import torch
        import torch.distributed as dist

        share = -(-num_bytes // (4 * self.plan.world_size))
        whole = torch.zeros(share * self.plan.world_size, device=self.device)
        mine = whole.narrow(0, share * self.plan.rank, share)
        apart = torch.zeros_like(mine) if collective == "reduce_scatter" else mine
        calls: dict[Collective, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, mine),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(apart, whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }
        return calls[collective], 4 * whole.numel()

    def _sample(self, call: Callable[[], object], calls: int) -> float:
        """The seconds of `calls` calls one after the other: on a GPU those of its stream."""
        if self.device.type == "cuda":
            return self._stream_sample(call, calls)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    def _stream_sample(self, call: Callable[[], object], calls: int) -> float:
        import torch

        torch.cuda.synchronize(self.device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            call()
        last.record()
        torch.cuda.synchronize(self.device)
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3

    def _most(self, values: list[float]) -> list[float]:
        """The largest over all ranks, value by value."""
        import torch
        import torch.distributed as dist

        told = torch.tensor(values, device=self.device, dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        found: list[float] = told.tolist()
        return found


def as_argument(plan: Plan) -> str:
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    main()
