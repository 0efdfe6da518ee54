"""A page read back from its HTML, without a browser."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

EMPTY = {"meta", "link", "img", "input", "br"}


@dataclass
class Element:
    """An element with what lies within, in order: elements and texts."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    within: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(one if isinstance(one, str) else one.text for one in self.within)

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """The elements within, of a tag and with attributes, in the order they begin."""
        found: list[Element] = []
        for one in self.within:
            if isinstance(one, Element):
                if tag in ("", one.tag) and attributes.items() <= one.attributes.items():
                    found.append(one)
                found += one.all(tag, **attributes)
        return found

    def one(self, tag: str = "", **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("page")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        assert len(made.attributes) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        self.open[-1].within.append(made)
        if tag not in EMPTY:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].within.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment in the page: {data!r}")


def read_page(html: str) -> Element:
    """The page as a tree. AssertionError where elements do not nest."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    (root,) = reader.open
    return root


def unpacked(root: Element, name: str) -> Any:
    """What lies packed in a page: "rows" or "charts"."""
    text = root.one("script", id=f"packed-{name}").text
    return json.loads(gzip.decompress(base64.b64decode(text)))
