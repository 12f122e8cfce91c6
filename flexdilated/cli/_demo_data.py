"""The demo's data: bytes of source text with whole files held out, windows of them, and byte models to compare with."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from hashlib import sha256
from os import fsencode
from pathlib import Path

import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from ._command_parser import UsageError

# Installed packages are not the standard library, and its test suites are mostly data.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# A sixteenth of the bytes is held out; files of more than a 64th are held out last.
_HELD_OUT_SHARE, _LONG_FILE_SHARE = 16, 64
_END_OF_FILE = b"\0"  # source text does not hold it
_BYTES = 256


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

    def __str__(self) -> str:
        sides = ("training", self.train, self.train_files), ("validation", self.validation, self.validation_files)
        sizes = (
            f"{name} {len(text) / 1e6:.2f} MB in {len(files)} file{'s' if len(files) != 1 else ''}"
            for name, text, files in sides
        )
        return f"{self.source}: {', '.join(sizes)}"


def load_corpus(data: Path | None, *, context: int) -> Corpus:
    """Read a file or folder, or the standard library's source where `data` is None.

    Files are joined in the order of their names. Held out are files in the order of a digest of their names, very long
    ones last, until they hold a sixteenth of the bytes and one window of context + 1; of a single file, its end. Files
    that cannot be read or are empty are left out. Raises UsageError where no file is left, and where a side is shorter
    than a window.
    """
    source, texts = _read(data)
    sides = _split(texts, window=context + 1)
    train, validation = (b"".join(text + _END_OF_FILE for text in side.values()) for side in sides)
    if min(len(train), len(validation)) < context + 1:
        raise UsageError(
            f"training and validation need a window of context + 1 = {context + 1} bytes each; "
            f"{source} gives them {len(train)} and {len(validation)}: use more data or a smaller --context"
        )
    digest = sha256(sha256(train).digest() + sha256(validation).digest()).hexdigest()
    tensors = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, validation)]
    return Corpus(source, tensors[0], tensors[1], tuple(sides[0]), tuple(sides[1]), digest)


def _read(data: Path | None) -> tuple[str, dict[str, bytes]]:
    """What was read, and its files by name, in order."""
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = (path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & {*path.relative_to(root).parts})
        source, none = "Python's standard library", "this Python's standard library is not readable; name --data"
    elif not data.exists():
        raise UsageError(f"--data must name a file or folder; nothing is at {data}")
    else:
        root, paths = (data, data.rglob("*")) if data.is_dir() else (data.parent, [data])
        source, none = str(data), f"--data must hold at least one readable file that is not empty; {data} has none"
    texts = {path.relative_to(root).as_posix(): _bytes_of(path) for path in paths}
    if not any(texts.values()):
        raise UsageError(none)
    return source, {name: texts[name] for name in sorted(texts) if texts[name]}


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError:
        return b""


def _split(texts: dict[str, bytes], *, window: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    total = sum(map(len, texts.values()))
    needed = max(window, total // _HELD_OUT_SHARE)
    if len(texts) == 1:
        ((name, text),) = texts.items()
        return {name: text[:-needed]}, {name: text[-needed:]}
    # A very long file would be most of the held-out text, and stand for nothing else.
    order = sorted(
        texts, key=lambda name: (len(texts[name]) > total // _LONG_FILE_SHARE, sha256(fsencode(name)).digest())
    )
    held_out: set[str] = set()
    for name in order:
        if needed <= 0:
            break
        held_out.add(name)
        needed -= len(texts[name])
    train, validation = ({name: text for name, text in texts.items() if (name in held_out) == out} for out in (0, 1))
    return train, validation


def training_window(
    text: UInt8[Tensor, " n"], step: int, *, context: int, seed: int
) -> UInt8[Tensor, " context_plus_1"]:
    """The window of one step: every window of the text once in a drawn order, then again in another.

    A function of its arguments alone, so a run that goes on from a checkpoint sees what it would have seen. Windows
    start `context` apart; each pass shifts all of them by an amount drawn below the text's remainder.
    """
    spare = len(text) - context - 1
    count = spare // context + 1
    each_pass = (seed * 1_000_003 + step // count) % 2**63  # neighbouring seeds must not share passes
    generator = torch.Generator().manual_seed(each_pass)
    order = torch.randperm(count, generator=generator)
    shift = int(torch.randint(spare % context + 1, (), generator=generator))
    start = int(order[step % count]) * context + shift
    return text[start : start + context + 1]


def validation_windows(text: UInt8[Tensor, " n"], *, context: int, limit: int) -> UInt8[Tensor, "w m"]:
    """At most `limit` windows, spread evenly over the text, none overlapping another."""
    size = context + 1
    available = len(text) // size
    chosen = torch.linspace(0, available - 1, min(limit, available)).round().long()
    return torch.stack([text[int(i) * size : (int(i) + 1) * size] for i in chosen])


def unigram_bits(train: UInt8[Tensor, " n"], windows: UInt8[Tensor, "w m"]) -> float:
    """Bits per byte of each window's bytes after the first, under the byte frequencies of `train`."""
    return float(-_unigram(train).log2()[windows[:, 1:].long()].mean())


def bigram_bits(train: UInt8[Tensor, " n"], windows: UInt8[Tensor, "w m"]) -> float:
    """Bits per byte of each window's bytes after the first, each given the byte before it in the window.

    Pairs are counted in `train`, with one pseudo-count for each first byte, spread as the unigram has it.
    """
    pairs = train[:-1].long() * _BYTES + train[1:].long()
    smoothed = torch.bincount(pairs, minlength=_BYTES**2).double().view(_BYTES, _BYTES) + _unigram(train)
    bits = -(smoothed / smoothed.sum(dim=1, keepdim=True)).log2()
    return float(bits[windows[:, :-1].long(), windows[:, 1:].long()].mean())


def _unigram(train: UInt8[Tensor, " n"]) -> Float64[Tensor, " byte"]:
    """Frequencies, each byte counted once more than it occurs so that none is impossible."""
    counts = torch.bincount(train.long(), minlength=_BYTES).double() + 1
    return counts / counts.sum()
