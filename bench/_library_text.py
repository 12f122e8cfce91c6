"""The text of byte models: the source of Python's standard library, with whole files held out, and windows of it."""

from __future__ import annotations

import sysconfig
from hashlib import sha256
from os import fsencode
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

# Installed packages are not the standard library, and its test suites are mostly data.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# A sixteenth of the bytes is held out; files of more than a 64th are held out last.
_HELD_OUT_SHARE, _LONG_FILE_SHARE = 16, 64
_END_OF_FILE = b"\0"  # source text does not hold it


class LibraryText(NamedTuple):
    """Bytes of disjoint files."""

    train: UInt8[Tensor, " bytes"]
    validation: UInt8[Tensor, " bytes"]


def library_text() -> LibraryText:
    """Files joined in the order of their names.

    Held out are files in the order of a digest of their names, very long ones last, until they hold a sixteenth of the
    bytes.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & {*path.relative_to(root).parts})
    texts = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    names, total = sorted(name for name in texts if texts[name]), sum(map(len, texts.values()))

    def late_and_drawn(name: str) -> tuple[bool, bytes]:
        """A very long file would be most of the held-out text."""
        return len(texts[name]) > total // _LONG_FILE_SHARE, sha256(fsencode(name)).digest()

    held_out, needed = set(), total // _HELD_OUT_SHARE
    for name in sorted(names, key=late_and_drawn):
        if needed <= 0:
            break
        held_out.add(name)
        needed -= len(texts[name])
    sides = ([name for name in names if (name in held_out) == out] for out in (False, True))
    joined = (b"".join(texts[name] + _END_OF_FILE for name in side) for side in sides)
    return LibraryText(*(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in joined))


def validation_windows(text: UInt8[Tensor, " n"], *, context: int, limit: int) -> UInt8[Tensor, "w m"]:
    """At most `limit` windows, spread evenly over the text, none overlapping another."""
    size = context + 1
    available = len(text) // size
    chosen = torch.linspace(0, available - 1, min(limit, available)).round().long()
    return torch.stack([text[int(i) * size : (int(i) + 1) * size] for i in chosen])
