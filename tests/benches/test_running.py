"""Processes that time: what crashes, hangs or prints is a record, and the next case goes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from planner.benches.running import Limits, run_cases
from planner.schema.bench import BenchRecord
from planner.throughput.prediction import DeviceRates
from tests.benches.cases import small_case

# A worker that does to each case what its batch size says: 1 measures it, 2 crashes, 3 hangs,
# 4 says that there is no memory, 5 prints noise first.
FAKE = """
import os, signal, sys, time
from planner.benches.order import Answer, Order, Teller
from planner.schema.bench import BenchOutcome, Timing

order, teller = Order.model_validate_json(sys.argv[2]), Teller(int(sys.argv[1]))
one = Timing(median=1e-3, low=9e-4, high=2e-3, certain=True, samples=9)
for number, case in enumerate(order.cases):
    teller.say(Answer(number=number, phase="build"))
    if case.batch_size == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if case.batch_size == 3:
        time.sleep(600)
    if case.batch_size == 4:
        gone = BenchOutcome(status="out_of_memory", message="CUDA out of memory")
        teller.say(Answer(number=number, outcome=gone))
        sys.exit()
    if case.batch_size == 5:
        print("noise", flush=True)
        os.write(int(sys.argv[1]), b"noise\\n{}\\n")
    found = BenchOutcome(status="measured", forward=one, backward=one, both=one)
    teller.say(Answer(number=number, outcome=found))
"""


def run(
    tmp_path: Path, sizes: Sequence[int], limits: Limits, rates: DeviceRates | None = None
) -> tuple[list[BenchRecord], int]:
    """The records, and how many cases were left."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE)
    records: list[BenchRecord] = []
    cases = [small_case(batch_size=size) for size in sizes]
    command = (sys.executable, str(worker))
    left = run_cases(cases, "cpu", limits, records.append, rates, command)
    return records, len(left)


def test_each_case_ends_as_a_record(tmp_path: Path) -> None:
    records, left = run(tmp_path, (1, 2, 4, 5), Limits())
    assert [record.case.batch_size for record in records] == [1, 2, 4, 5]
    assert [r.status for r in records] == ["measured", "crashed", "out_of_memory", "measured"]
    assert "SIGSEGV" in records[1].message
    assert "build" in records[1].message
    assert left == 0


def test_a_case_that_hangs_is_given_up(tmp_path: Path) -> None:
    records, _ = run(tmp_path, (3, 1), Limits(deadline_seconds=2.0))
    assert [record.status for record in records] == ["timed_out", "measured"]
    assert records[0].message == "not done after 2 s, in build"


def test_the_budget_leaves_cases_and_blames_none(tmp_path: Path) -> None:
    records, left = run(tmp_path, (3, 1), Limits(budget_seconds=2.0))
    assert (records, left) == ([], 2)


def test_a_record_holds_work_shares_and_versions(tmp_path: Path) -> None:
    rates = DeviceRates("a CPU", "measured today", {"float32": 1e12}, 1e11)
    (record,), _ = run(tmp_path, (1,), Limits(), rates)
    assert record.forward_work is not None
    assert record.backward_work is not None
    flops = record.forward_work.flops + record.backward_work.flops
    assert record.flop_share is not None
    assert record.flop_share == flops / 1e-3 / 1e12
    assert record.peak_from == "ledger"
    assert record.peaks is not None
    assert record.peaks.basis == "measured today"
    assert "torch" in record.versions
