"""Arguments PATTERN, --tokens, --heads and --bind, common to several commands."""

from __future__ import annotations

import argparse
import runpy
import struct
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from traceback import extract_tb

import torch
from torch import Tensor

from .. import masks
from ..masks import Mixture, Pattern
from ..masks.core import LARGEST, Expression, require_below
from ..masks.patterns import CarriedTensor, Lengths, RunTime, names, require_values, run_time_leaves
from ._terminal import CommandParser, UsageError, size_of

PATTERN = "an expression, a .json file, such as masks.to_json writes, or FILE.py:NAME, a pattern that this file makes"
MOST_HEADS = 1 << 12
_DEFAULT_TOKENS, _DEFAULT_HEADS = 1 << 16, 8
_MOST_BOUND_TOKENS = 1 << 24  # a run-time tensor is as long
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Errors of torch.load for bytes that it does not read.
_DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError),
    *(RuntimeError, TypeError, UnpicklingError, ValueError, struct.error),
)


def add_pattern_arguments(parser: CommandParser, *, no_size: Sequence[str] = ()) -> None:
    """Add the arguments PATTERN, --tokens, --heads and --bind, which `asked_from` reads.

    no_size: destinations (argparse `dest`) of options with which --tokens and --bind are an error.
    """
    add = parser.argument
    add("pattern", metavar="PATTERN", help=PATTERN)
    size = "queries, and as many keys, such as 5000, 64K or 1M (those of --bind's tensors, or of a grid; else 64K)"
    add("-n", "--tokens", metavar="N", excludes=no_size, help=size)
    number = f"query heads, over all devices ({_DEFAULT_HEADS}, or per_head's)"
    add("--heads", type=int, least=1, most=MOST_HEADS, metavar="H", help=number)
    bind = "a run-time tensor: FILE.pt is what torch.save wrote, such as document ids of shape (N,) or (B, N)"
    add("--bind", action="append", default=(), metavar="NAME=FILE.pt", excludes=no_size, help=bind)


@dataclass(frozen=True)
class AskedPattern:
    """A pattern with the values of its run-time tensors, and the numbers of tokens and query heads to bind it to."""

    pattern: Expression
    num_tokens: int
    num_heads: int

    @cached_property
    def num_entries(self) -> int:
        """Batch size of the run-time tensors, also if their entries are equal; 1 if all are common to all entries."""
        return self.pattern.bind(num_heads=self.num_heads, num_queries=self.num_tokens, num_keys=self.num_tokens).batch

    def require_in_range(self, *, head: int, batch: int) -> None:
        """Raise UsageError for a head or a batch entry out of range."""
        with as_usage_errors():
            require_below("head", head, self.num_heads, "heads")
            require_below("batch", batch, self.num_entries, "batch entries")

    def entry(self, batch: int) -> AskedPattern:
        """Return a copy with the run-time tensors of one batch entry; tensors common to all entries are kept."""
        found: dict[str, CarriedTensor] = {}

        def with_entry(leaf: Pattern) -> Pattern:
            if not isinstance(leaf, RunTime) or leaf.given is None:
                return leaf
            tensor = leaf.given.tensor
            given = found.setdefault(
                leaf.name, CarriedTensor(tensor[batch : batch + 1]) if leaf.differs_by_entry(tensor) else leaf.given
            )
            return replace(leaf, given=given)

        return replace(self, pattern=self.pattern.map_leaves(with_entry))


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Context in which TypeError and ValueError, except UnicodeEncodeError, become UsageError with their message."""
    try:
        yield
    except UnicodeEncodeError:  # of the output, not of what was asked
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def asked_from(options: argparse.Namespace) -> AskedPattern:
    """Return the pattern, its run-time tensors and the sizes that the command-line arguments ask for.

    Without --tokens the number of tokens is the largest that a run-time tensor implies, or, without such tensors, the
    largest that the pattern accepts, such as that of its grid; it is 64K if there is no such number. Without --heads
    the number of heads is 8 or, if the pattern does not accept 8, the smallest that it accepts.

    Raises UsageError for invalid patterns and sizes, and for tensors that are missing or do not fit.
    """
    pattern, tokens = read_pattern(options.pattern), options.tokens
    with as_usage_errors():
        tensors = pattern.given_tensors() | read_bindings(pattern, options.bind)
    missing = [name for name in names(pattern) if name not in tensors]
    if missing:
        raise UsageError(
            f"the pattern needs run-time tensors: give --bind {missing[0]}=FILE.pt; got none for {missing[0]}"
        )
    fixed = max(_implied_tokens(pattern, *each) for each in tensors.items()) if tensors else most_tokens(pattern)
    num_tokens = fixed or _DEFAULT_TOKENS
    if tokens is not None:
        num_tokens = size_of(tokens)
        if not num_tokens:
            raise UsageError(f"--tokens must be a whole number above 0, such as 5000, 64K or 1M; got {tokens!r}")
    if num_tokens > LARGEST:
        raise UsageError(f"--tokens must be at most {LARGEST}; got {num_tokens}")
    if tensors and num_tokens > _MOST_BOUND_TOKENS:
        raise UsageError(f"--tokens must be at most {_MOST_BOUND_TOKENS} with --bind; got {num_tokens}")
    num_heads = fitting_heads(pattern, _DEFAULT_HEADS) if options.heads is None else options.heads

    def with_tensor(leaf: Pattern) -> Pattern:
        if isinstance(leaf, RunTime) and leaf.name in tensors:
            return replace(leaf, given=CarriedTensor(tensors[leaf.name]))
        return leaf

    asked = AskedPattern(pattern.map_leaves(with_tensor), num_tokens, num_heads)
    with as_usage_errors():
        _ = asked.num_entries  # binds
    return asked


def read_bindings(pattern: Expression, texts: Sequence[str]) -> dict[str, Tensor]:
    """Load the tensors of texts NAME=FILE.pt; return them by name.

    Raises UsageError for other texts, for files without a tensor, for names that are no run-time tensor of the pattern,
    and for a name that is given twice.
    """
    found: dict[str, Tensor] = {}
    for text in texts:
        name, _, file = (part.strip() for part in text.partition("="))
        if not name or not file.endswith(".pt"):
            raise UsageError(f"--bind takes NAME=FILE.pt, a tensor that torch.save wrote; got {text!r}")
        if name not in names(pattern):
            needed = ", ".join(names(pattern)) or "none"
            raise UsageError(f"--bind must name a run-time tensor of the pattern, which needs {needed}; got {name!r}")
        if name in found:
            raise UsageError(f"--bind gives each run-time tensor one value; got two for {name!r}")
        found[name] = _load_tensor(name, file)
    return found


def _load_tensor(name: str, file: str) -> Tensor:
    try:
        with warnings.catch_warnings(action="ignore"):  # of an old format
            tensor = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"--bind {name} must name a file that can be read; {error}") from None
    except _DAMAGE as error:
        raise UsageError(
            f"--bind {name} must name a file with a tensor; torch.load does not read {file} ({type(error).__name__})"
        ) from None
    if not isinstance(tensor, Tensor):
        raise UsageError(f"--bind {name} must name a file with a tensor; {file} holds a {type(tensor).__name__}")
    return tensor


def _implied_tokens(pattern: Expression, name: str, tensor: Tensor) -> int:
    """Return the number of tokens that a run-time tensor implies: the size of its last axis; 0 if it has no axes.

    For a tensor that only `masks.lengths` patterns read it is the largest value, or 0 if there are no values or they
    are no integers.

    name: name of the run-time tensor.

    Raises UsageError for invalid or too many values.
    """
    with as_usage_errors():
        require_values(name, tensor)
    if tensor.numel() > LARGEST:  # an expanded one is a small file
        raise UsageError(f"--bind {name} takes at most {LARGEST} values; got {tensor.numel()}")
    if {type(leaf) for leaf in run_time_leaves(pattern) if leaf.name == name} == {Lengths}:
        return int(tensor.max()) if tensor.numel() and tensor.dtype in _INTEGERS else 0
    return tensor.shape[-1] if tensor.dim() else 0


@cache
def most_tokens(pattern: Expression) -> int | None:
    """Return the largest number of tokens that the pattern accepts, such as that of its grid.

    Returns None if the pattern accepts LARGEST, and if it accepts no power of two and no number up to 4096.

    The search starts at the largest power of two that the pattern accepts, else at the largest number up to 4096. It
    assumes that the pattern accepts all numbers from there to the result.
    """

    def binds(num_tokens: int) -> bool:
        with suppress(ValueError):
            pattern.check_tokens(range(num_tokens), range(num_tokens))
            return True
        return False

    if binds(LARGEST):
        return None
    low = next(filter(binds, chain((1 << power for power in reversed(range(31))), range(1 << 12, 0, -1))), None)
    if low is None:
        return None
    return bisect_left(range(LARGEST), True, lo=low + 1, key=lambda num_tokens: not binds(num_tokens)) - 1


def fitting_heads(pattern: Expression, usual: int) -> int:
    """Return `usual` if the pattern accepts that number of heads, else the smallest that it accepts.

    If it accepts no number up to MOST_HEADS, returns `usual`.
    """
    for num_heads in (usual, *range(1, MOST_HEADS + 1)):
        with suppress(ValueError):
            pattern.check_heads(num_heads)
            return num_heads
    return usual  # `bind` refuses it


def read_pattern(text: str) -> Pattern | Mixture:
    """Read a pattern from an expression, FILE.json, or FILE.py:NAME, a variable of a Python file, which is run.

    Raises UsageError for a text or a file that gives no pattern.
    """
    file, colon, name = text.rpartition(":")
    try:
        if colon and file.endswith(".py"):
            return _pattern_of_python_file(file, name)
        if text.endswith(".json"):
            return masks.from_json(Path(text).read_text("utf-8"))
        return masks.parse(text)
    except OSError as error:
        raise UsageError(f"PATTERN must be an expression or a file that can be read; {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"PATTERN must be an expression or a file of JSON in UTF-8; got {text}: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _pattern_of_python_file(file: str, name: str) -> Pattern | Mixture:
    if not Path(file).is_file():
        raise UsageError(f"PATTERN must be an expression or a file that can be read; got {file!r}, which is no file")
    try:
        variables = runpy.run_path(file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the file's own code may raise anything
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
        reached = f", line {lines[-1]}" if lines else ""
        try:
            raised = f"{type(error).__name__}: {error}"
        except Exception:  # of its __str__
            raised = type(error).__name__
        raise UsageError(f"{file} must run without an error{reached}; got {raised}") from error
    made = {key: value for key, value in variables.items() if isinstance(value, Pattern | Mixture)}
    if name not in made:
        held = ", ".join(map(repr, made)) or "none"
        raise UsageError(f"{file} must make a pattern of that name; got {name!r}, and the patterns in it are {held}")
    return made[name]
