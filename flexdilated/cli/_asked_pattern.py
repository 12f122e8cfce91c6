"""The pattern that a command is asked about: read, given the values of its run-time tensors, and bound once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import masks
from ..masks._bound import Bound
from ..masks._check import LARGEST, require_below
from ..masks._pattern import Expression
from ..masks._run_time import names
from ._bindings import one_entry, read_bindings, with_values
from ._sizes import parse_tokens
from ._usage import UsageError

_TOKENS = 1 << 16
MOST_HEADS = 1 << 12
_MOST_BOUND_TOKENS = 1 << 24  # a run-time tensor is as long


@dataclass(frozen=True)
class AskedPattern:
    """A pattern that carries its run-time tensors, and the sizes to which it binds."""

    pattern: Expression
    num_tokens: int
    num_heads: int

    def bind(self) -> Bound:
        sizes = {"num_queries": self.num_tokens, "num_keys": self.num_tokens}
        return self.pattern.bind(num_heads=self.num_heads, **sizes)

    @property
    def num_entries(self) -> int:
        """Batch entries that run-time tensors tell apart; 1 if all are alike."""
        return self.bind().batch

    def entry(self, batch: int) -> AskedPattern:
        """The same with the run-time tensors of one batch entry."""
        return replace(self, pattern=one_entry(self.pattern, batch))

    def require(self, *, head: int, batch: int) -> None:
        """Raise UsageError for a head or a batch entry that there is not."""
        _require(lambda: require_below("head", head, self.num_heads, "heads"))
        _require(lambda: require_below("batch", batch, self.num_entries, "batch entries"))


def read_expression(text: str) -> Expression:
    """The pattern of an expression, or of a JSON file. Raises UsageError where it is neither."""
    path = Path(text)
    try:
        return masks.from_json(path.read_text("utf-8")) if path.suffix == ".json" else masks.parse(text)
    except OSError as error:
        raise UsageError(f"PATTERN must be an expression or a file that can be read; {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"PATTERN must be an expression or a file of JSON in UTF-8; got {text}: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def ask(text: str, tokens: str | None, num_heads: int, bindings: Sequence[str]) -> AskedPattern:
    """Raises UsageError for a pattern that does not read, for sizes, and for values that are missing or do not fit."""
    if not 1 <= num_heads <= MOST_HEADS:
        rule = "at least 1" if num_heads < 1 else f"at most {MOST_HEADS}"
        raise UsageError(f"--heads must be {rule}; got {num_heads}")
    pattern = read_expression(text)
    values = read_bindings(pattern, bindings)
    missing = [name for name in names(pattern) if name not in values]
    if missing:
        raise UsageError(f"the pattern needs run-time tensors: give --bind {missing[0]}=...; got none for {missing[0]}")
    positions = max((value.positions for value in values.values()), default=0) or _TOKENS
    num_tokens = positions if tokens is None else parse_tokens(tokens)
    if num_tokens > LARGEST:
        raise UsageError(f"--tokens must be at most {LARGEST}; got {num_tokens}")
    if values and num_tokens > _MOST_BOUND_TOKENS:
        raise UsageError(f"--tokens must be at most {_MOST_BOUND_TOKENS} with --bind; got {num_tokens}")
    asked = AskedPattern(with_values(pattern, values, num_tokens), num_tokens, num_heads)
    _require(asked.bind)
    return asked


def _require(check: Callable[[], object]) -> None:
    try:
        check()
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
