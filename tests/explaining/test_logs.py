"""Logs: every message that is recognised, in every dress that logs put on it."""

import gzip
import io
import random
import re
from pathlib import Path

import pytest

from planner.core.failures import SIGNS
from planner.programs.explanation import MANY, LogReading, explain, rank_of
from tests.explaining.messages import GIB, MESSAGES, REPORTED
from tests.explaining.table import OF_LOGS, PAGE, table

LERF = next(r for r in MESSAGES if "lerf" in r.source)


def read(text: str) -> LogReading:
    return LogReading().read(io.BytesIO(text.encode()))


def test_a_reported_log_is_answered_right_or_not_at_all() -> None:
    for reported in REPORTED:
        outcome = reported.outcome(read(f"epoch 1\n{reported.log}\nend\n"))
        assert outcome != "wrong", reported.source
        assert (outcome == "missed", outcome == "right as possible") == (
            reported.missed, reported.possible,
        ), reported.source  # fmt: skip
        assert not reported.healthy or outcome == "out of kind", reported.source


def test_each_versions_message_is_read_to_the_figure() -> None:
    for reported in MESSAGES:
        failed = read(f"step 1\nTraceback:\n{reported.log}\nend\n").failed
        assert failed is not None, reported.source
        found = {**failed.known}
        found.pop("device", None)
        if "other_bytes" not in reported.figures:
            found.pop("other_bytes", None)
        assert found == pytest.approx(reported.figures, abs=1), reported.source


def test_a_message_that_is_there_twice_is_read_once() -> None:
    """Of what it lists (other processes) the sum is told."""
    for reported in MESSAGES:
        once, twice = read(reported.log).failed, read(f"{reported.log}\n{reported.log}").failed
        assert twice == once, reported.source


def test_every_sign_has_a_line_here() -> None:
    kinds = [sign.kind for sign in SIGNS]
    assert len(kinds) == len(set(kinds))
    told = {sign.kind for sign in OF_LOGS if sign.words}
    assert told <= {r.answer for r in REPORTED}, "tests/explaining/public.jsonl: a line"


def test_the_table_in_the_docs_is_the_signs() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m tests.explaining.table"


def test_a_way_out_is_told_of_what_was_found_and_of_nothing_else() -> None:
    for reported in REPORTED:
        findings = read(reported.log).findings.values()
        told = " ".join(" ".join((found.meaning, *found.ways_out)) for found in findings)
        assert [words for words in reported.says if words not in told] == [], reported.source
        assert [words for words in reported.silent if words in told] == [], reported.source


def test_a_bus_error_of_the_training_itself_may_be_the_shared_memory() -> None:
    """A worker hands a batch over, and the process that reads it finds the page missing."""
    for line in ("train.sh: line 3:  4242 Bus error  (core dumped) python",
                 "Fatal Python error: Bus error"):  # fmt: skip
        assert read(line).findings["shared memory is full"].to_tell


def test_what_is_sure_takes_the_place_of_what_may_be() -> None:
    reading = read("Killed\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\nKilled\n")
    found = reading.findings["killed by the kernel"]
    assert (found.to_tell, found.count, found.evidence[0][0]) == ("", 1, 2)


OOM = "CUDA out of memory. Tried to allocate 512.00 MiB"


@pytest.mark.parametrize("line", ["Eval [{}] max mem: {:.0f}", "memory: {1:.0f}, loss: {0}",
                                  "mem {1:.0f}MB", "     {}/99      {:.2f}G  0.04"])  # fmt: skip
def test_memory_that_a_log_shows_to_grow_is_seen(line: str) -> None:
    grown = "".join(line.format(i, 100 + 7 * (i // 3)) + "\n" for i in range(30))
    found = read(f"{grown}{OOM}\n").findings
    assert found["memory grew"].to_tell
    assert [number for number, _ in found["memory grew"].evidence] == [1, 28]
    assert "memory grew" not in read(grown).findings, "it did not run out"


def test_the_largest_of_random_sizes_is_rarely_called_growth() -> None:
    drawn, called = random.Random(0), 0
    for case in range(400):
        sizes = [drawn.gauss(10_000, 1_000) for _ in range(5 + case)]
        lines = (f"max mem: {max(sizes[: i + 1]):.0f}\n" for i in range(len(sizes)))
        called += "memory grew" in read("".join(lines) + OOM).findings
    assert called <= 8


def test_a_log_that_says_one_thing_for_ever_is_not_looked_through() -> None:
    """At about three microseconds a line the first of its millions are counted."""
    found = read("loss nan\n" * 1_000_000 + "Killed\n").findings
    assert MANY <= found["non-finite loss"].count < 1_000_000
    assert found["killed by the kernel"].evidence == [(1_000_001, "Killed")]


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("PyTorch version: 1.7.1", ""),
        ("torch==1.13.1+cu117", "max_split_size_mb:128 keeps large blocks whole."),
        ("torch              2.4.0", "(torch 1.10 or later)"),  # the wording is of an older one
        ("pytorch-lightning==2.1", "(torch 1.10 or later)"),
    ],
)
def test_a_way_out_is_of_the_torch_that_wrote_the_log(version: str, told: str) -> None:
    figures = "10.76 GiB total capacity; 5.00 GiB already allocated; 100.00 MiB free; 10.00 GiB"
    message = f"{OOM} (GPU 0; {figures} reserved in total by PyTorch)"
    todo = " ".join(read(f"{version}\n{message}\n").findings["out of memory"].ways_out)
    assert told in todo
    assert "expandable" not in todo
    assert told or "max_split" not in todo


def test_expandable_segments_are_not_named_on_windows() -> None:
    path = 'File "C:\\env\\Lib\\site-packages\\torch\\nn\\modules\\linear.py"'
    for where, option in (("", "expandable_segments"), (path, "max_split_size_mb")):
        todo = " ".join(read(f"{where}\n{LERF.log}\n").findings["out of memory"].ways_out)
        assert option in todo


@pytest.mark.timeout(120)  # work in the square of a line's length would take an hour
def test_a_hostile_line_costs_in_proportion_to_its_length() -> None:
    for piece in ("loss ", "[rank9", "\x1b]", "unable to a ", "DataLoader worker (pid 9"):
        start = "CUDA out of memory. Tried to allocate 1.00 GiB nan "
        assert read(start + piece * (300_000 // len(piece))).findings


@pytest.mark.parametrize(
    "line",
    [
        "Epoch 3: 100%|███| 10/10 [00:01<00:00] loss=0.693, nano=3",
        "Loading finance data, infinite sampler",
        "step 7 loss 2.1 max memory 8.2 GiB driver 550.54",
        '        "OOMKilled": false,',
        "best val loss: inf -> 2.31",
        "Set ulimit to avoid 'Too many open files'",
        '    raise RuntimeError("CUDA error: device-side assert triggered")',
        "[rank0]:     except MemoryError:",
        '        logger.error(f"loss: nan at step {step}")',
        "# Fixes RuntimeError: CUDA error: device-side assert triggered",
        "ptxas fatal   : out of shared memory",
    ],
)
def test_an_ordinary_line_is_no_sign(line: str) -> None:
    assert read(line).findings == {}


def dressed(text: str) -> dict[str, bytes]:
    broken = text.replace(". ", ".\n")
    coloured = f"\x1b[31;1m{text[:40]}\x1b[0m{text[40:]}\x1b[K"
    return {
        "plain": text.encode(),
        "CRLF": text.replace("\n", "\r\n").encode() + b"\r\n",
        "progress bar": f"  3%|  | 1/9 [00:01]\r{text}".encode(),
        "colours": coloured.encode(),
        "sentences on lines": broken.encode(),
        "broken within words": re.sub("(.{80})", r"\1\n", text).encode(),
        "rank": "\n".join(f"[rank3]: {line}" for line in broken.split("\n")).encode(),
        "bytes that are no text": b"\xff\xfe\xfa tail\n" + text.encode() + b"\n\xc3\x28",
        "behind much": b"step 1 loss 2.3\n" * 200_000 + text.encode(),
    }


@pytest.mark.parametrize("dress", dressed(""))
def test_a_message_is_read_in_every_dress(dress: str) -> None:
    reading = LogReading().read(io.BytesIO(dressed(LERF.log)[dress]))
    assert reading.failed is not None
    assert reading.rank == (3 if dress == "rank" else None)
    assert reading.failed.known["unused_bytes"] == int(4.84 * GIB)
    assert reading.failed.known["requested_bytes"] == 3 * GIB


def test_lines_of_ranks_that_mix_are_put_together_by_rank() -> None:
    other = LERF.log.replace("3.00 GiB", "7.00 GiB").replace("4.84 GiB", "1.00 GiB")
    mixed = []
    for ours, theirs in zip(LERF.log.split(". "), other.split(". "), strict=True):
        mixed += [f"[rank0]: {ours}.", f"[rank5]: {theirs}."]
    reading = read("\n".join(mixed))
    assert reading.findings["out of memory"].ranks == (0, 5)
    assert reading.failed is not None
    assert reading.rank == 0
    assert reading.failed.known["requested_bytes"] == 3 * GIB
    assert reading.failed.known["unused_bytes"] == int(4.84 * GIB)


def test_ranks_are_read_as_launchers_write_them() -> None:
    for line, rank in {
        "[rank12]: error": 12, "[default3]:error": 3, "3: error": 3, "[2]: error": 2,
        "[E ProcessGroupNCCL.cpp:737] [Rank 6] Watchdog": 6, "12:30:05 error": None, "plain": None,
    }.items():  # fmt: skip
        assert rank_of(line) == rank, line


# ------------------------------------------------------------------ wild files


def test_a_line_without_an_end_is_read_in_bounded_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (5 << 20) + b" CUDA out of memory\nKilled\n")
    found = {finding.kind: finding for finding in explain(path).findings}
    assert found["killed by the kernel"].evidence == [(2, "Killed")]


def test_a_log_may_be_packed_or_of_powershell(tmp_path: Path) -> None:
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress(LERF.log.encode()))
    assert explain(packed).seen["requested_bytes"] == 3 * GIB
    wide = tmp_path / "wide.log"
    wide.write_bytes(f"step\r\n{LERF.log}\r\n".encode("utf-16"))
    assert explain(wide).seen["requested_bytes"] == 3 * GIB


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\x01\x02" * 100, "neither text nor"),
        (b"\x80\x04garbage", "cannot be read as a memory snapshot"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", "cannot be read as a memory snapshot"),
        (b"\x80\x02}q\x00.", "no memory snapshot"),
        (b"\x1f\x8bgarbage", "cannot be read"),
    ],
)
def test_garbage_is_refused_in_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(Exception, match=said) as caught:
        explain(path)
    assert type(caught.value).__module__ == "planner.core.errors"
