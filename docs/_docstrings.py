"""An extension of griffe: docstrings, written to be read by `help`, as the API reference shows them."""

from __future__ import annotations

import re
from typing import Any

import griffe

# "left, right: keys before and after" at the beginning of a paragraph, or after a full stop: sentences do not begin so.
ENTRY = re.compile(r"(?:\A|(?<=\.)\s+)(?=[a-z_]\w*(?:,\s[a-z_]\w*)*:\s)")
# What ends an entry beside the next one: a line at the margin below one that is not, and what docstrings end with.
MARGIN = re.compile(r"(\n +.*)\n(?=\S)|\n(?=Raises |Source: )")


class Docstrings(griffe.Extension):
    """Docstrings as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Each docstring, when its object is read."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Entries "name: text" become a list, lines that begin with Raises or Source paragraphs, examples code."""
    return "\n\n".join(map(_paragraph, re.split(r"\n{2,}", text)))


def _paragraph(text: str) -> str:
    if text.startswith(">>> "):
        return f"```pycon\n{text}\n```"
    before, *entries = ENTRY.split(MARGIN.sub(r"\1\n\n", text))
    return "\n\n".join([before, *map(_item, entries)]).strip("\n")


def _item(entry: str) -> str:
    names, _, said = entry.partition(":")
    said, *after = said.split("\n\n")
    names = re.sub(r"\w+", r"`\g<0>`", " ".join(names.split()))
    return "\n\n".join([f"- {names}: {' '.join(said.split())}", *after])
