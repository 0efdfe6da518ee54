"""Logs: every message that is recognised, in every dress that logs put on it."""

from __future__ import annotations

import gzip
import io
import re
from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.explaining.allocator_message import read_message
from planner.explaining.explanation import explain
from planner.explaining.log_reading import LogReading, rank_of
from planner.explaining.signs import MAY_MATTER, SIGNS
from tests.explaining.messages import GIB, LINES, MIB, OTHER_LINES, REPORTED, Reported

LERF = next(r for r in REPORTED if "lerf" in r.source)
ROOT = Path(__file__).parents[2]


def read(text: str) -> LogReading:
    return LogReading().read(io.BytesIO(text.encode()))


@pytest.mark.parametrize("reported", REPORTED, ids=lambda r: r.source)
def test_each_versions_message_is_read_to_the_figure(reported: Reported) -> None:
    first = read(f"step 1\nTraceback:\n{reported.text}\nend\n").first
    assert first is not None
    found = first[1]
    seen = (
        found.requested_bytes, found.total_bytes, found.free_bytes, found.allocated_bytes,
        found.unused_bytes, found.process_bytes, found.private_pool_bytes, found.allowed_bytes,
    )  # fmt: skip
    said = (
        reported.requested, reported.total, reported.free, reported.allocated, reported.unused,
        reported.process, reported.pools, reported.allowed,
    )  # fmt: skip
    for figure, wanted in zip(seen, said, strict=True):
        assert (figure is None) == (wanted is None)
        assert figure is None or wanted is None or abs(figure - wanted) <= 1
    if reported.other is not None:
        assert found.other_bytes == pytest.approx(reported.other, abs=1)


def test_a_limit_counts_for_what_is_missing() -> None:
    """2 MiB asked for, 1 GiB allowed, 1072 MiB held: 244 GiB that are free do not help."""
    text = next(r.text for r in REPORTED if r.allowed)
    found = read_message(text.replace("1.05 GiB allowed", "1.00 GiB allowed"))
    assert found is not None
    assert found.missing_bytes == 2 * MIB


@pytest.mark.parametrize("kind", LINES)
def test_each_sign_is_recognised_by_its_line(kind: str) -> None:
    found = read(f"epoch 1\n{LINES[kind]}\n").findings
    assert kind in found
    assert found[kind].evidence == [(2, LINES[kind].replace("  ", " ")[:300])]
    assert found[kind].todo


@pytest.mark.parametrize(
    ("kind", "line"), [(kind, line) for kind, lines in OTHER_LINES.items() for line in lines]
)
def test_a_sign_is_recognised_in_other_words_and_only_that_sign(kind: str, line: str) -> None:
    found = read(f"epoch 1\n{line}\n").findings
    assert list(found) == [kind]
    assert found[kind].todo


def test_every_sign_has_a_line_here_and_a_row_in_the_docs() -> None:
    kinds = [sign.kind for sign in SIGNS]
    assert {"out of memory", *LINES} == set(kinds)
    assert len(kinds) == len(set(kinds))
    rows = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "watching.md").read_text(), re.M)
    assert set(kinds) <= set(rows)


def test_what_is_passed_over_quickly_holds_no_sign() -> None:
    for line in (*LINES.values(), *(r.text for r in REPORTED)):
        assert MAY_MATTER.search(line.encode())


@pytest.mark.parametrize(
    "line",
    [
        "Epoch 3: 100%|███| 10/10 [00:01<00:00] loss=0.693, nano=3",
        "loss: 0.3 info: ok",
        "memory: 8123 MiB of 24564 MiB",
        "Loading finance data, infinite sampler",
        "step 7 loss 2.1 max memory 8.2 GiB driver 550.54",
        '        "OOMKilled": false,',
        "step 137 exited the warm-up",
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
        "broken within words": "\n".join(
            text[i : i + 80] for i in range(0, len(text), 80)
        ).encode(),
        "rank": "\n".join(f"[rank3]: {line}" for line in broken.split("\n")).encode(),
        "bytes that are no text": b"\xff\xfe\xfa tail\n" + text.encode() + b"\n\xc3\x28",
        "behind much": b"step 1 loss 2.3\n" * 200_000 + text.encode(),
    }


@pytest.mark.parametrize("dress", dressed(""))
def test_a_message_is_read_in_every_dress(dress: str) -> None:
    first = LogReading().read(io.BytesIO(dressed(LERF.text)[dress])).first
    assert first is not None
    assert first[0] == (3 if dress == "rank" else None)
    assert first[1].unused_bytes == int(4.84 * GIB)
    assert first[1].requested_bytes == 3 * GIB


def test_lines_of_ranks_that_mix_are_put_together_by_rank() -> None:
    other = LERF.text.replace("3.00 GiB", "7.00 GiB").replace("4.84 GiB", "1.00 GiB")
    mixed = []
    for ours, theirs in zip(LERF.text.split(". "), other.split(". "), strict=True):
        mixed += [f"[rank0]: {ours}.", f"[rank5]: {theirs}."]
    reading = read("\n".join(mixed))
    assert reading.findings["out of memory"].ranks == (0, 5)
    assert reading.messages[0].requested_bytes == 3 * GIB
    assert reading.messages[5].requested_bytes == 7 * GIB


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank12]: error", 12),
        ("[default3]:error", 3),
        ("3: error", 3),
        ("[2]: error", 2),
        ("[E ProcessGroupNCCL.cpp:737] [Rank 6] Watchdog", 6),
        ("12:30:05 error", None),
        ("plain", None),
    ],
)
def test_ranks_are_read_as_launchers_write_them(line: str, rank: int | None) -> None:
    assert rank_of(line) == rank


# ------------------------------------------------------------------ wild files


def test_a_log_without_a_sign_says_so(tmp_path: Path) -> None:
    for content in (b"", b"\n\n", b"step 1\n" * 1000):
        path = tmp_path / "log"
        path.write_bytes(content)
        assert explain(path).findings == []


def test_a_line_without_an_end_is_read_in_bounded_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (5 << 20) + b" CUDA out of memory\nKilled\n")
    found = {finding.kind: finding for finding in explain(path).findings}
    assert found["killed by the kernel"].evidence == [(2, "Killed")]


def test_a_log_may_be_packed_or_of_powershell(tmp_path: Path) -> None:
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress(LERF.text.encode()))
    assert explain(packed).seen["requested_bytes"] == 3 * GIB
    wide = tmp_path / "wide.log"
    wide.write_bytes(f"step\r\n{LERF.text}\r\n".encode("utf-16"))
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
    assert type(caught.value).__module__ == "planner.errors"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/proc/self/mem")):
        with pytest.raises(UsageError):
            explain(path)


def test_processes_that_no_message_tells_of_are_not_to_be_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(next(r.text for r in REPORTED if "MPS" in r.text))
    assert len(explain(path).findings[0].todo) == 1


def test_figures_decide_what_is_advised(tmp_path: Path) -> None:
    path = tmp_path / "log"
    advised = {}
    for reported in REPORTED:
        path.write_text(reported.text)
        advised[reported.source.split(" (")[0]] = " ".join(explain(path).findings[0].todo)
    assert "expandable_segments" in advised["kerrj/lerf issue #73"]
    assert "expandable_segments" not in advised["pytorch/pytorch issue #16417, a comment of 2024"]
    assert "larger than the device" in advised["pytorch/pytorch pull request #13751"]
    assert "refused although" in advised["Comfy-Org/ComfyUI issue #9529"]
    assert "allowed 1.05 GiB" in advised["ROCm/TheRock issue #2118"]
    assert "CUDA graphs" in advised["ROCm/TheRock issue #2118"]
    other = advised["a public log of torch 2.11's wording with another process beside it"]
    assert "Other processes hold 12.02 GiB" in other
    assert "That is enough" in other
