"""The commands that README and docs show, run; `python -m tests.outputs [PAGE…]` writes what each
prints now into its block.

A `sh` block holds commands that run, one a line; a `console` block holds `$ command` lines, each
followed by its output, or by its first paragraphs and "…". A page's commands run in order in one
folder, which has `tests`, `examples`, and each `python` block that begins with "# NAME.py". Blocks
of other kinds are not run.
Estimates move with torch's versions: the figures shown are those of the newest that was tried.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from planner.cli import cli
from planner.core.torch_version import NEWEST_TRIED, as_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```python\n(# (\S+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)
ESTIMATES = ("estimate", "advise")
# On the CPU a probe of a whole Swin-T takes minutes: the same, of a smaller model or less of it.
SMALLER = {
    "planner tune native:swin_tiny --trials 8 --output run": (
        "planner tune native:swin_tiny --trials 1 --output run --device cpu --batch-size 2 "
        "--set image_size=32 --set embed_dim=16 --set depths=2,2 --set num_heads=1,2 "
        "--set window_size=4 --precision fp32 --compile off"
    ),
    "planner tune tagging:Tagging --budget 10m --output tagged": (
        "planner tune tagging:Tagging --trials 1 --output tagged --device cpu --batch-size 2 "
        "--precision fp32 --compile off"
    ),
    "python train.py --steps 20 --lr 0.001": "python train.py --steps 1 --lr 0.001 --device cpu",
}  # fmt: skip


@dataclass(frozen=True)
class Shown:
    command: str
    output: str | None
    """None in a `sh` block."""

    @property
    def is_estimate(self) -> bool:
        return self.command.split()[1] in ESTIMATES

    @property
    def is_quick(self) -> bool:
        """An estimate of a Swin that needs no trace."""
        return self.is_estimate and bool(re.search(r" (native|timm):swin_", self.command))


def shown_in(block: str) -> list[Shown]:
    """The commands of a `sh` or `console` block."""
    if not block.startswith("$ "):
        return [Shown(line, None) for line in block.replace("\\\n", "").splitlines() if line]
    found = re.findall(r"\$ ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", block)
    return [Shown(command, output.rstrip()) for command, output in found]


def commands(page: Path) -> list[Shown]:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [one for _, block in blocks for one in shown_in(block)]


def printed_by(one: Shown) -> str:
    """In this process, which has torch already; what a command starts for itself are processes."""
    command = one.command.replace("\\\n", "")
    typed, _, kept = SMALLER.get(command, command).partition(" > ")
    program, *arguments = shlex.split(typed)
    if program == "python":
        subprocess.run([sys.executable, *arguments], check=True)
        return ""
    assert program == "planner", command
    newest = as_of(".".join(map(str, NEWEST_TRIED)))
    with newest if one.is_estimate else contextlib.nullcontext():
        ended = CliRunner().invoke(cli, arguments)
    assert ended.exit_code == 0, f"{command}\n{ended.output}"
    if kept and not kept.startswith("~"):  # what a shell would do
        Path(kept).write_text(ended.stdout, encoding="utf-8")
    return ended.stdout.lstrip("\n").rstrip()


def run(page: Path, folder: Path) -> Iterator[tuple[Shown, str]]:
    """Each command of a page with what it prints, on a screen of 80 columns."""
    for name in ("tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for source, name in FILE.findall(page.read_text(encoding="utf-8")):
        (folder / name).write_text(source, encoding="utf-8")
    before = dict(os.environ)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    os.environ.update(COLUMNS="80", PATH=path, PYTHONPATH=str(ROOT))
    os.environ["PLANNER_CACHE_DIR"] = str(folder / "cache")  # an answer says what it found there
    try:
        with contextlib.chdir(folder):
            for one in commands(page):
                yield one, printed_by(one)
    finally:
        os.environ.clear()
        os.environ.update(before)


def cut_as(shown: str, printed: str) -> str:
    """What a block shows of `printed`: all, or as many paragraphs as stand before "…"."""
    if not shown.endswith("…"):
        return printed
    kept = len(shown.removesuffix("…").rstrip().split("\n\n"))
    return "\n\n".join(printed.split("\n\n")[:kept]) + "\n…"


def refreshed(page: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        prints = [printed for _, printed in run(page, Path(folder))]

    def block(match: re.Match[str]) -> str:
        found = shown_in(match[2])
        now, prints[: len(found)] = prints[: len(found)], []
        if match[1] == "sh":
            return match[0]
        texts = (
            f"$ {one.command}\n{cut_as(one.output or '', printed)}\n"
            for one, printed in zip(found, now, strict=True)
        )
        return f"```console\n{''.join(texts)}```"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for given in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        given.write_text(refreshed(given), encoding="utf-8")
        print(f"Wrote {given.relative_to(ROOT)}.")
