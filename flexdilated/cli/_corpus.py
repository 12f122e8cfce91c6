"""The corpus: bytes of source text, with whole files held out for validation."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from os import fsencode
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from ._usage import UsageError

# Installed packages are not the standard library, and its test suites are mostly data.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# A sixteenth of the bytes is held out; files of more than a 64th are held out last.
_HELD_OUT_SHARE, _LONG_FILE_SHARE = 16, 64
# Ends every file: source text does not hold it.
_END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes from disjoint files (disjoint ends, where there is only one file).

    `fingerprint` is a digest of both texts: equal fingerprints mean equal corpora.
    """

    source: str
    train: UInt8[Tensor, " bytes"]
    validation: UInt8[Tensor, " bytes"]
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True)
class _Text:
    """A file's name, relative to the corpus, and its bytes."""

    name: str
    data: bytes


def load_corpus(data: Path | None, *, context: int) -> Corpus:
    """Read a file or folder, or the standard library's source where `data` is None.

    Files are joined in the order of their names. Held out are files in the order of a digest of their names,
    very long ones last, until they hold a sixteenth of the bytes and one window of context + 1; of a single
    file, its end. Files that cannot be read or are empty are left out. Raises UsageError where no file is
    left, and where a side is shorter than a window.
    """
    source, texts = _standard_library() if data is None else _read(data)
    train, validation = _split(texts, window=context + 1)
    corpus = _join(source, train, validation)
    shortest = min(len(corpus.train), len(corpus.validation))
    if shortest < context + 1:
        raise UsageError(
            f"training and validation need a window of context + 1 = {context + 1} bytes each; "
            f"{source} gives them {len(corpus.train)} and {len(corpus.validation)}: "
            "use more data or a smaller --context"
        )
    return corpus


def _standard_library() -> tuple[str, list[_Text]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)]
    texts = _read_files(root, paths)
    if not texts:
        raise UsageError("this Python has no readable source of its standard library: name a corpus with --data")
    return "Python's standard library", texts


def _read(data: Path) -> tuple[str, list[_Text]]:
    if not data.exists():
        raise UsageError(f"--data must name a file or folder; nothing is at {data}")
    texts = _read_files(data, data.rglob("*")) if data.is_dir() else _read_files(data.parent, [data])
    if not texts:
        raise UsageError(f"--data must hold at least one readable file that is not empty; {data} has none")
    return str(data), texts


def _read_files(root: Path, paths) -> list[_Text]:
    files = sorted((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())
    texts = (_Text(name, _bytes_of(path)) for name, path in files)
    return [text for text in texts if text.data]


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _split(texts: Sequence[_Text], *, window: int) -> tuple[list[_Text], list[_Text]]:
    total = sum(len(text.data) for text in texts)
    needed = max(window, total // _HELD_OUT_SHARE)
    if len(texts) == 1:
        name, data = texts[0].name, texts[0].data
        return [_Text(name, data[:-needed])], [_Text(name, data[-needed:])]
    held_out: set[str] = set()
    # a very long file would be most of the held-out text, and stand for nothing else
    order = sorted(texts, key=lambda t: (len(t.data) > total // _LONG_FILE_SHARE, sha256(fsencode(t.name)).digest()))
    for text in order:
        if needed <= 0:
            break
        held_out.add(text.name)
        needed -= len(text.data)
    return [t for t in texts if t.name not in held_out], [t for t in texts if t.name in held_out]


def _join(source: str, train: Sequence[_Text], validation: Sequence[_Text]) -> Corpus:
    parts = [b"".join(text.data + _END_OF_FILE for text in texts) for texts in (train, validation)]
    digest = sha256()
    for part in parts:
        digest.update(sha256(part).digest())
    names = [tuple(text.name for text in texts) for texts in (train, validation)]
    return Corpus(source, _tensor(parts[0]), _tensor(parts[1]), names[0], names[1], digest.hexdigest())


def _tensor(data: bytes) -> UInt8[Tensor, " bytes"]:
    # frombuffer refuses an empty buffer and shares memory: a bytearray makes it writable
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
