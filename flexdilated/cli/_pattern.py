"""The pattern that a command is asked about: its arguments, read in one way, with run-time tensors, bound once."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from traceback import extract_tb
from typing import Any

from .. import masks
from ..masks import Mixture, Pattern
from ..masks.core import LARGEST, Bound, Expression, require_below
from ..masks.patterns import names
from ._bindings import carried, one_entry, read_bindings, with_values
from ._command_parser import CommandParser, UsageError
from ._sizes import parse_tokens

PATTERN = "an expression, a .json file, such as masks.to_json writes, or FILE.py:NAME, a pattern that this file makes"
MOST_HEADS = 1 << 12
_HEADS = 8
_MOST_BOUND_TOKENS = 1 << 24  # a run-time tensor is as long


def add_pattern_arguments(
    parser: CommandParser,
    *,
    tokens: str = "64K",
    heads: int = _HEADS,
    no_size: Sequence[str] = (),
    needs: Sequence[str] = (),
    **how: Any,
) -> None:
    """PATTERN, --tokens, --heads and --bind, which `asked_from` reads.

    `tokens` and `heads` are taken where neither the pattern nor a run-time tensor fixes them. Options of `no_size` look
    at other sizes, and take neither --tokens nor --bind. All but PATTERN need what `needs` names.
    """
    add = parser.argument
    add("pattern", metavar="PATTERN", help=PATTERN, **how)
    size = f"queries, and as many keys, such as 5000, 64K or 1M (those of --bind's values, or of a grid; else {tokens})"
    add("-n", "--tokens", metavar="N", excludes=no_size, needs=needs, help=size)
    number = f"query heads, over all devices ({heads}, or per_head's)"
    add("--heads", type=int, least=1, most=MOST_HEADS, metavar="H", needs=needs, help=number)
    bind = (
        "a run-time tensor: the lengths of packed documents, as in documents=100,200,300; of padded sequences, as in "
        "lengths=500; the visible keys, as in visible_keys=0:100,200:300; or the tensor itself from a .json or .pt "
        "file. Batch entries are separated by /"
    )
    add("--bind", action="append", default=(), metavar="NAME=VALUE", excludes=no_size, needs=needs, help=bind)
    parser.set_defaults(usual=(tokens, heads))


@dataclass(frozen=True)
class AskedPattern:
    """A pattern that carries its run-time tensors, and the sizes to which it binds."""

    pattern: Expression
    num_tokens: int
    num_heads: int

    def bind(self) -> Bound:
        return self.pattern.bind(**self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """What `bind` takes."""
        return {"num_heads": self.num_heads, "num_queries": self.num_tokens, "num_keys": self.num_tokens}

    @property
    def num_entries(self) -> int:
        """Batch entries that run-time tensors tell apart; 1 if all are alike."""
        return self.bind().batch

    def entry(self, batch: int) -> AskedPattern:
        """The same with the run-time tensors of one batch entry."""
        return replace(self, pattern=one_entry(self.pattern, batch))

    def require(self, *, head: int, batch: int) -> None:
        """Raise UsageError for a head or a batch entry that there is not."""
        with refusals():
            require_below("head", head, self.num_heads, "heads")
            require_below("batch", batch, self.num_entries, "batch entries")


@contextmanager
def refusals() -> Iterator[None]:
    """What the library refuses in here is refused by the command, in the same words."""
    try:
        yield
    except UnicodeEncodeError:  # of the output, not of what was asked
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def asked_from(options: argparse.Namespace) -> AskedPattern:
    """The pattern with the values of its run-time tensors in place, and its sizes; it binds to them.

    Raises UsageError for a pattern that does not read, for sizes, and for values that are missing or do not fit.
    """
    return ask(options.pattern, options.tokens, options.heads, options.bind, usual=options.usual)


def ask(
    text: str, tokens: str | None, heads: int | None, bindings: Sequence[str], *, usual: tuple[str, int]
) -> AskedPattern:
    """Tokens None: those of the run-time tensors, or else of the pattern's grid; heads None: as many as it takes.

    `usual` (tokens, heads) are taken where nothing fixes them. Raises UsageError for a pattern that does not read, for
    sizes, and for values that are missing or do not fit.
    """
    pattern = read_pattern(text)
    values = carried(pattern) | read_bindings(pattern, bindings)
    missing = [name for name in names(pattern) if name not in values]
    if missing:
        raise UsageError(f"the pattern needs run-time tensors: give --bind {missing[0]}=...; got none for {missing[0]}")
    fixed = max((value.positions for value in values.values()), default=0) if values else most_tokens(pattern)
    num_tokens = parse_tokens(usual[0] if tokens is None else tokens) if tokens is not None or not fixed else fixed
    if num_tokens > LARGEST:
        raise UsageError(f"--tokens must be at most {LARGEST}; got {num_tokens}")
    if values and num_tokens > _MOST_BOUND_TOKENS:
        raise UsageError(f"--tokens must be at most {_MOST_BOUND_TOKENS} with --bind; got {num_tokens}")
    num_heads = fitting_heads(pattern, usual[1]) if heads is None else heads
    asked = AskedPattern(with_values(pattern, values, num_tokens), num_tokens, num_heads)
    with refusals():
        asked.bind()
    return asked


def one_rule(asked: AskedPattern) -> Expression:
    """The pattern with the values of its run-time tensors in its rule. Raises UsageError where they differ by entry."""
    if asked.num_entries > 1:
        raise UsageError(
            "what is planned is the rule of one batch entry, whatever their number: give --bind the values of one; "
            f"got those of {asked.num_entries} entries"
        )
    return asked.pattern if asked.pattern.pads else asked.bind().pattern


@cache
def most_tokens(pattern: Expression) -> int | None:
    """The most tokens that the pattern binds to, as those of its grid; None where any number does, or none."""

    def binds(num_tokens: int) -> bool:
        try:
            pattern.check_tokens(range(num_tokens), range(num_tokens))
        except ValueError:
            return False
        return True

    if binds(LARGEST):
        return None
    low = next(filter(binds, chain((1 << power for power in reversed(range(31))), range(1 << 12, 0, -1))), None)
    if low is None:
        return None
    high = LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binds(middle) else (low, middle)
    return low


def fitting_heads(pattern: Expression, usual: int) -> int:
    """`usual` where the pattern takes so many heads, or else the fewest that it takes."""
    for num_heads in (usual, *range(1, MOST_HEADS + 1)):
        try:
            pattern.check_heads(num_heads)
        except ValueError:
            continue
        return num_heads
    return usual  # which does not bind, and is answered there


def read_pattern(text: str) -> Pattern | Mixture:
    """The pattern of an expression, of FILE.json, or of FILE.py:NAME. Raises UsageError where it is none of these."""
    file, colon, name = text.rpartition(":")
    try:
        if colon and file.endswith(".py"):
            return _of_module(file, name)
        if text.endswith(".json"):
            return masks.from_json(Path(text).read_text("utf-8"))
        return masks.parse(text)
    except OSError as error:
        raise UsageError(f"PATTERN must be an expression or a file that can be read; {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"PATTERN must be an expression or a file of JSON in UTF-8; got {text}: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _of_module(file: str, name: str) -> Pattern | Mixture:
    if not Path(file).is_file():
        raise UsageError(f"PATTERN must be an expression or a file that can be read; got {file!r}, which is no file")
    made = {key: value for key, value in _run(file).items() if isinstance(value, Pattern | Mixture)}
    if name not in made:
        held = ", ".join(map(repr, made)) or "none"
        raise UsageError(f"{file} must make a pattern of that name; got {name!r}, and the patterns in it are {held}")
    return made[name]


def _run(file: str) -> dict[str, Any]:
    """What the file has defined at its end. Raises UsageError, with its last line that was reached, where it raises."""
    try:
        return runpy.run_path(file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the file's own code may raise anything, and what it raises may not print
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
        reached = f", line {lines[-1]}" if lines else ""
        raise UsageError(f"{file} must run without an error{reached}; got {_said(error)}") from error


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
