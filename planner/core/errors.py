"""Errors that are for people: the law, the value, the way out. And the words of other libraries,
with ours for them (`vocabulary.json`).
"""

import difflib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MAX_SHOWN = 120  # characters of what a person wrote


class PlannerError(Exception):
    """An error that the person can mend. It is printed without a traceback, and the process exits
    with status 1.

    `message` states the rule and the value that broke it; `way_out` says what to do instead. It is
    "" only for faults of single fields, whose rules say what to write.
    """

    exit_status = 1

    def __init__(self, message: str, way_out: str) -> None:
        super().__init__(message)
        self.message = message
        self.way_out = way_out

    def __str__(self) -> str:
        return f"{self.message}\n{self.way_out}" if self.way_out else self.message


class UsageError(PlannerError):
    """The request cannot be read: an unknown name, a bad value. The exit status is 2."""

    exit_status = 2


class ContractError(PlannerError):
    """A step is not what its task says: the model or the task must change, not the setting."""


class UnsupportedError(PlannerError):
    """The request is understood, but the model, the library or the device cannot do it."""


@dataclass(frozen=True)
class Fault:
    """Why something cannot be done: the law, the value that breaks it, the way out. `fields` are
    those that it is about or between; `change` is what to set instead, as --set takes it, if that
    is enough."""

    law: str
    value: str = ""
    way_out: str = ""
    fields: tuple[str, ...] = ()
    change: str = ""

    @property
    def message(self) -> str:
        return f"{self.law}: {self.value}" if self.value else self.law


def refuse_faults(faults: Iterable[Fault]) -> None:
    """Raises UnsupportedError with all faults and their ways out, where there are any."""
    if faults := tuple(faults):
        laws = (f"{fault.message}." for fault in faults)
        raise UnsupportedError("\n".join(laws), way_out_of(faults))


def way_out_of(faults: Iterable[Fault]) -> str:
    """A line for each way out of these faults."""
    return "\n".join(dict.fromkeys(fault.way_out for fault in faults if fault.way_out))


def unknown_name(kind: str, name: object, known: Iterable[str], way_out: str) -> UsageError:
    """The error for a name that is not in a list; it names the nearest ones that are."""
    near = nearest(name, known) if isinstance(name, str) else []
    hint = f" Did you mean {alternatives(repr(n) for n in near)}?" if near else ""
    return UsageError(f"unknown {kind} {shorten(name)}.{hint}", way_out)


def refuse_if(is_wrong: object, law: str, way_out: str) -> None:
    """Raises UsageError, with the law that was broken and the way out, where something
    `is_wrong`."""
    if is_wrong:
        raise UsageError(law, way_out)


def alternatives(words: Iterable[str], last: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`: as a sentence lists them."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def shorten(value: object, length: int = MAX_SHOWN) -> str:
    """A person's own value as it is shown to them: as Python writes it, with control characters
    escaped, and cut to `length` characters."""
    try:
        text = repr(value[: 2 * length] if isinstance(value, str | bytes) else value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list without end
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= length else f"{text[:length]}…"


def printable(text: str, but: str = "\n\t") -> str:
    """`text` with all characters escaped that do not print, `but` line ends and tabs; among them
    the bytes of a file's name that are not UTF-8."""
    if text.isprintable():
        return text
    kept = (c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)
    return "".join(kept)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names in `known` that look most like `name`, best first (none when nothing is close).

    Those that begin with it come first: `swin_tiny` means `swin_tiny_patch4_window7_224`.
    """
    if len(name) > MAX_SHOWN:
        return []
    folded, by_folded = _fold(name), {_fold(k): k for k in known}
    longer = sorted((k for k in by_folded if folded and k.startswith(folded)), key=len)
    similar = difflib.get_close_matches(folded, by_folded, n=count, cutoff=0.55)
    return [by_folded[match] for match in dict.fromkeys((*longer, *similar))][:count]


def _fold(name: str) -> str:
    return name.casefold().replace("_", "-").replace(" ", "-")


_OURS = re.compile(r"(?P<field>[a-z][a-z0-9_]*)=(?P<value>[^ ]+)(?P<rest>.*)", re.DOTALL)
_OFF = ("false", "off", "none", "no", "0")


class Word(NamedTuple):
    """A word of `source`, another library. `answer` is one of three: FIELD=VALUE in our words with
    a remark behind it, where VALUE is N or RATE for a number and a|b for a choice; an option of
    ours; or a sentence that says why there is no such field."""

    source: str
    answer: str

    @property
    def field(self) -> str | None:
        """Our field for the word; None where the answer names none."""
        ours = _OURS.fullmatch(self.answer)
        return ours and ours["field"]

    def written(self, value: object = None, before: str = "") -> str:
        """What to write in place of the word, as a sentence. `value` is what the word was set to;
        `before` is typed before a field ("--set ")."""
        ours = _OURS.fullmatch(self.answer)
        if ours is None:
            return f"Write {self.answer}." if self.answer.startswith("--") else self.answer
        text = "" if value is None else _normalize(value)
        chosen, word = ours["value"], find_word(text)
        if chosen in ("N", "RATE") and re.fullmatch(r"[0-9_]{1,12}", text):
            chosen = str(value).strip()
        elif text.replace("_", "-") in chosen.split("|"):
            chosen = text.replace("_", "-")
        elif "|" in chosen and word is not None and word.field == ours["field"]:
            return word.written(before=before)
        off = " Where it is off, omit it." if text in _OFF and chosen == ours["value"] else ""
        return f"Write {before}{ours['field']}={chosen}{ours['rest']}.{off}"


def find_word(text: object) -> Word | None:
    """The entry of the vocabulary for `text`, however it is spelt; None where there is none."""
    return _vocabulary().get(_normalize(text))


@functools.cache
def _vocabulary() -> dict[str, Word]:
    text = Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8")
    return {
        word: Word(source, answer)
        for source, answers in json.loads(text).items()
        for word, answer in answers.items()
    }


def _normalize(value: object) -> str:
    text = value if isinstance(value, str) else shorten(value)
    return re.sub(r"[-.=\s]+", "_", text.strip().lstrip("-").casefold())
