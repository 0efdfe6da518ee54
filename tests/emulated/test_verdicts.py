"""What a program on an emulated GPU is told to need: the laws, without a device."""

from dataclasses import replace
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.core.files import to_json
from planner.core.units import GIB, MIB
from planner.programs import running
from planner.programs.emulated import (
    DevicePeak,
    EmulatedProcess,
    EmulatedRun,
    Growth,
    OutOfMemory,
    growth_rate,
)
from planner.programs.snapshots import Blocks
from planner.report.page.contents import Verdict
from planner.report.page.rendering import page_html
from planner.report.programs import emulated_page, emulation_text, variation_text

FORWARD = "forward: activations", "u/train.py:7 main"
PLACE: dict[str, Any] = {
    "device": 0, "total_bytes": 24 * GIB, "phase": "backward", "module": "Net.mlp",
    "where": FORWARD[1],
}  # fmt: skip
FAILED = OutOfMemory(
    **{**PLACE, "phase": "forward"}, times=1, requested_bytes=GIB, free_bytes=0, allocated_bytes=0,
    reserved_bytes=0, step=1, groups=(), grown_bytes=0, forwards=0,
)  # fmt: skip


def process(used: int, steps: int = 3, **more: Any) -> EmulatedProcess:
    peak = DevicePeak(
        **PLACE, name="card", allocated_bytes=used - 600 * MIB, reserved_bytes=used - 500 * MIB,
        outside_bytes=500 * MIB, retries=0, step=2, groups=(Blocks(*FORWARD, GIB, 4),),
    )  # fmt: skip
    plain = {"pid": 7, "rank": None, "out_of_memory": None, "growth": None}
    return EmulatedProcess(
        **{**plain, **more}, steps=steps, peaks=(peak,), selects=False, faults=()
    )


def run_of(*processes: EmulatedProcess, status: int = 0) -> EmulatedRun:
    return EmulatedRun(("python",), "card", 1, status, 0, processes)


def test_the_verdict_comes_first() -> None:
    assert emulation_text(run_of(process(6 * GIB))).startswith(
        "Fits in 24.00 GiB of card: 6.00 GiB"
    )
    failed = replace(
        FAILED, times=2, requested_bytes=3 * GIB, free_bytes=GIB, allocated_bytes=22 * GIB,
        reserved_bytes=23 * GIB, groups=(Blocks(*FORWARD, 22 * GIB, 9),),
    )  # fmt: skip
    run = run_of(process(23 * GIB, 0, out_of_memory=failed), status=1)
    assert run.fits is False
    text = emulation_text(run)
    assert text.startswith("Does not fit in 24.00 GiB of card: out of memory in step 1")
    assert "at least 2.00 GiB are missing" in text
    assert "Where: forward of Net.mlp, u/train.py:7 main." in text
    caught = emulation_text(run_of(process(23 * GIB, 6, out_of_memory=failed)))
    assert "caught that 2 times and went on, to 6 steps." in caught
    one = run_of(process(6 * GIB, steps=1))
    assert one.fits is None
    assert emulation_text(one).startswith("Not known whether it fits: it ended early (1 step)")


def test_a_verdict_stands_beside_no_finding_that_contradicts_it() -> None:
    """9.5 GiB are free: they last for 19 steps of 512 MiB, and for longer than anybody trains with
    512 bytes more in each."""
    leaks, keeps = (
        run_of(process(29 * GIB // 2, 9, grown_bytes=more)) for more in (512 * MIB, 512)
    )
    text = " ".join(emulation_text(leaks).split())
    assert (leaks.fits, to_json(leaks)["fits"], len(leaks.doubts)) == (None, None, 1)
    assert text.startswith("Fits for the 9 steps that were run, in 24.00 GiB")
    said = (
        "live memory grows by 512.00 MiB a step: if that goes on, it runs out after about 19 more"
    )
    assert f"Not known beyond: {said}" in text
    assert keeps.fits
    text = " ".join(emulation_text(keeps).split())
    assert "Room is left for it, though live memory grows by 512 B a step: if that goes on" in text


def test_a_request_that_nothing_could_hold_is_told_from_a_full_card() -> None:
    """And one beyond reason is no fault of the card."""
    failed = replace(FAILED, requested_bytes=30 * GIB, reserved_bytes=23 * GIB, free_bytes=GIB)
    run = run_of(process(23 * GIB, out_of_memory=failed), status=1)
    assert "this one request is more than the whole card" in emulation_text(run)
    failed = replace(FAILED, requested_bytes=2401 * GIB)
    run = run_of(process(GIB, out_of_memory=failed), status=1)
    assert (run.fits, run.fits_so_far) == (None, None)
    assert emulation_text(run).startswith("Not known: 2.34 TiB were asked for at once, 100 times")


def test_an_error_that_is_known_is_explained() -> None:
    error = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
    text = " ".join(emulation_text(run_of(process(GIB, 0, error=error), status=1)).split())
    assert f"It ended by {error}: This torch, or the extension" in text
    assert "install a torch built for the card" in text


@given(st.integers(1, GIB), st.integers(1, 20), st.integers(8, 400))
def test_what_rises_steadily_grows_and_what_rises_once_or_ever_less_does_not(
    rate: int, every: int, steps: int
) -> None:
    """By jumps every few steps too, where there are several in each third."""
    ends = range(1, steps + 1)
    assert growth_rate([(step, rate * step) for step in ends], 1) == rate
    jumps = [(step, rate * (step // every)) for step in ends]
    if steps >= 20 * every:
        assert growth_rate(jumps, 1) == pytest.approx(rate / every, rel=0.2, abs=1)
    for at in ends:
        assert not growth_rate([(step, rate * (step > at)) for step in ends], 1)
    assert not growth_rate([(step, rate - (rate >> step)) for step in ends], 1)


def test_the_page_says_what_the_terminal_says() -> None:
    growth = Growth(3, 8, (Blocks(*FORWARD, 5 * GIB, 5),))
    run = run_of(process(6 * GIB, rank=0, growth=growth), process(5 * GIB, rank=1, pid=8))
    text, page = emulation_text(run), page_html(emulated_page(run))
    for said in ("Fits in 24.00 GiB of card: 6.00 GiB at most", "u/train.py:7 main",
                 "1.00 GiB a step from step 3 to 8"):  # fmt: skip
        assert said in text
        assert said in page
    (group,) = emulated_page(run).groups
    (verdict,) = [p for p in group.sections[0].parts if isinstance(p, Verdict)]
    assert verdict.kind == "fits"


@pytest.mark.parametrize(
    ("limit", "first"), [(1, 64), (63, 64), (65, 64), (341, 64), (1, 1), (100, 1)]
)
def test_the_largest_value_is_found_whatever_it_begins_with(
    limit: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emulated(command: list[str], **_: Any) -> EmulatedRun:
        value = int(command[-1])
        used = 23 * GIB * min(value, limit) // limit
        return run_of(process(used, out_of_memory=FAILED if value > limit else None))

    monkeypatch.setattr(running, "emulate", emulated)
    found = running.vary(["python", "train.py", "-b", str(first)], "-b", gpu="card")
    assert (found.largest, found.next_larger) == (limit, limit + 1)
    assert len(found.runs) <= 26
    assert variation_text(found).startswith(f"-b {limit} is the largest that surely fits")


@pytest.mark.parametrize(
    ("first", "limit", "known", "ended"),
    [(64, 99, "-b 64 is the largest", 128), (32, 20, "No value is", 16)],
)
def test_what_is_known_outlives_a_value_that_the_program_ends_at_by_itself(
    first: int, limit: int, known: str, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a data set of 100 images a batch of 128 is none, and this program makes none of 16."""

    def emulated(command: list[str], *, stdout: IO[str], **_: Any) -> EmulatedRun:
        value = int(command[-1])
        if value in (16, 128):
            stdout.write("Traceback:\nValueError: no batch\x1b\n")
            return run_of(status=1)
        return run_of(process(GIB, out_of_memory=FAILED if value > limit else None))

    monkeypatch.setattr(running, "emulate", emulated)
    found = running.vary(["python", "train.py", "-b", str(first)], "-b", gpu="card")
    assert " ".join(variation_text(found).split()).startswith(
        f"{known} known to fit. With {ended} the program ended by itself (0 steps, exit status 1)"
        ", and said last: ValueError: no batch\\x1b"
    )
    with pytest.raises(PlannerError, match="no batch"):
        running.vary(["python", "train.py", "-b", "128"], "-b", gpu="card")
