"""Words that people know from other libraries, and ours for them: `vocabulary.json` holds both."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

from planner.core.errors import shorten

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
        said = "" if value is None else _fold(value)
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
    return _words().get(_fold(text))


@functools.cache
def _words() -> dict[str, Word]:
    text = Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8")
    return {
        word: Word(source, answer)
        for source, answers in json.loads(text).items()
        for word, answer in answers.items()
    }


def _fold(value: object) -> str:
    text = value if isinstance(value, str) else shorten(value)
    return re.sub(r"[-.=\s]+", "_", text.strip().lstrip("-").casefold())
