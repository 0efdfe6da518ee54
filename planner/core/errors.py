"""Errors that are for people: the law, the value, the way out; and words that people know from
other libraries, and ours for them (`vocabulary.json`).
"""

import difflib
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MAX_SHOWN = 120  # characters of what a person wrote


class PlannerError(Exception):
    """Something the person can mend. Printed without a traceback; the process exits with status 1.

    `message` states the rule and the value that broke it; `way_out` says what to do instead.
    """

    exit_status = 1

    def __init__(self, message: str, way_out: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.way_out = way_out

    def __str__(self) -> str:
        return f"{self.message}\n{self.way_out}" if self.way_out else self.message


class UsageError(PlannerError):
    """What was asked for cannot be read: an unknown name or a bad value. Exits with status 2."""

    exit_status = 2


class ContractError(PlannerError):
    """A step that is not what its task says: the model or the task must change, not the setting."""


class UnsupportedError(PlannerError):
    """What was asked for is understood, but the model, library or device cannot do it."""


def unknown_name(kind: str, name: object, known: Iterable[str], way_out: str = "") -> UsageError:
    """The error for a name that is not in a list: says the nearest of those that are."""
    near = nearest(name, known) if isinstance(name, str) else []
    hint = f" Did you mean {alternatives(repr(n) for n in near)}?" if near else ""
    return UsageError(f"unknown {kind} {shorten(name)}.{hint}", way_out)


def refuse_if(is_wrong: object, law: str, way_out: str = "Omit one of them.") -> None:
    """Raises UsageError where something `is_wrong`: the law that was broken, and the way out."""
    if is_wrong:
        raise UsageError(law, way_out)


def alternatives(words: Iterable[str], last: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`: as a sentence lists them."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def shorten(value: object, length: int = MAX_SHOWN) -> str:
    """How a person's own value is shown to them: as Python writes it, control characters escaped,
    and no more of it than tells which it is."""
    try:
        text = repr(value[: 2 * length] if isinstance(value, str | bytes) else value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list without end
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= length else f"{text[:length]}…"


def printable(text: str) -> str:
    """`text` with all control characters but line ends and tabs escaped."""
    if text.isprintable():
        return text
    kept = [
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    ]
    return "".join(kept)


def as_text(name: str) -> str:
    """A file's name as text that can be written: file systems hold bytes, and some are no UTF-8."""
    return printable(name.encode(errors="replace").decode())


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names in `known` that look most like `name`, best first (none when nothing is close).

    Those that begin with it come first: `swin_tiny` means `swin_tiny_patch4_window7_224`.
    """
    if len(name) > MAX_SHOWN:
        return []
    folded, by_folded = _fold(name), {_fold(k): k for k in known}
    longer = sorted((k for k in by_folded if folded and k.startswith(folded)), key=len)
    alike = difflib.get_close_matches(folded, by_folded, n=count, cutoff=0.55)
    return [by_folded[hit] for hit in dict.fromkeys((*longer, *alike))][:count]


def _fold(name: str) -> str:
    return name.casefold().replace("_", "-").replace(" ", "-")


_OURS = re.compile(r"(?P<field>[a-z][a-z0-9_]*)=(?P<value>[^ ]+)(?P<rest>.*)", re.DOTALL)
_OFF = ("false", "off", "none", "no", "0")


class Word(NamedTuple):
    """A word of `source`, a library. `answer` is FIELD=VALUE in our words, where VALUE is N or RATE
    for a number and a|b where there is a choice, with a remark behind it; an option of ours; or a
    sentence that says why there is no such field."""

    source: str
    answer: str

    @property
    def field(self) -> str | None:
        """Our field for it, or None where the answer is another."""
        ours = _OURS.fullmatch(self.answer)
        return ours and ours["field"]

    def written(self, value: object = None, before: str = "") -> str:
        """What to write in its place, as a sentence; `value` is what the word was set to, `before`
        how a field begins where this is typed ("--set ")."""
        ours = _OURS.fullmatch(self.answer)
        if ours is None:
            return f"Write {self.answer}." if self.answer.startswith("--") else self.answer
        said = "" if value is None else _spelt(value)
        chosen, known = ours["value"], find_word(said)
        if chosen in ("N", "RATE") and re.fullmatch(r"[0-9_]{1,12}", said):
            chosen = str(value).strip()
        elif said.replace("_", "-") in chosen.split("|"):
            chosen = said.replace("_", "-")
        elif "|" in chosen and known is not None and known.field == ours["field"]:
            return known.written(before=before)
        off = " Where it is off, omit it." if said in _OFF and chosen == ours["value"] else ""
        return f"Write {before}{ours['field']}={chosen}{ours['rest']}.{off}"


def find_word(text: object) -> Word | None:
    """What is known of `text` as a word of another library, however it is spelt."""
    return _words().get(_spelt(text))


@functools.cache
def _words() -> dict[str, Word]:
    text = Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8")
    return {
        word: Word(source, answer)
        for source, answers in json.loads(text).items()
        for word, answer in answers.items()
    }


def _spelt(value: object) -> str:
    text = value if isinstance(value, str) else shorten(value)
    return re.sub(r"[-.=\s]+", "_", text.strip().lstrip("-").casefold())
