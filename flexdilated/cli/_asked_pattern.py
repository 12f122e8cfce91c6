"""The pattern that a command is asked about: read, given the values of its run-time tensors, and bound once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..masks.core._bound import Bound
from ..masks.core._check import LARGEST, require_below
from ..masks.core._pattern import Expression
from ..masks.patterns.run_time._run_time import names
from ._bindings import carried, one_entry, read_bindings, with_values
from ._fixed_sizes import MOST_HEADS, fitting_heads, most_tokens
from ._read_pattern import read_pattern
from ._sizes import parse_tokens
from ._usage import UsageError

_MOST_BOUND_TOKENS = 1 << 24  # a run-time tensor is as long


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
        _require(lambda: require_below("head", head, self.num_heads, "heads"))
        _require(lambda: require_below("batch", batch, self.num_entries, "batch entries"))


def ask(
    text: str, tokens: str | None, heads: int | None, bindings: Sequence[str], *, usual: tuple[str, int]
) -> AskedPattern:
    """Tokens None: those of the run-time tensors, or else of the pattern's grid; heads None: as many as it takes.

    `usual` (tokens, heads) are taken where nothing fixes them. Raises UsageError for a pattern that does not read, for
    sizes, and for values that are missing or do not fit.
    """
    if heads is not None and not 1 <= heads <= MOST_HEADS:
        rule = "at least 1" if heads < 1 else f"at most {MOST_HEADS}"
        raise UsageError(f"--heads must be {rule}; got {heads}")
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
    _require(asked.bind)
    return asked


def one_rule(asked: AskedPattern) -> Expression:
    """The pattern with the values of its run-time tensors in its rule. Raises UsageError where they differ by entry."""
    if asked.num_entries > 1:
        raise UsageError(
            "what is planned is the rule of one batch entry, whatever their number: give --bind the values of one; "
            f"got those of {asked.num_entries} entries"
        )
    return asked.bind().pattern


def _require(check: Callable[[], object]) -> None:
    try:
        check()
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
