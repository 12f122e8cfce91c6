"""Receptive field: after how many layers which tokens can have heard of which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..core._bound import Bound
from ..patterns._band import Causal
from ..patterns._block_list import BlockList
from ..patterns._random_blocks import RandomBlocks
from ..patterns.run_time._visible_keys import KeySet
from ._receptive_field_grid import GridField, grid_of
from ._receptive_field_layers import SectionField, TokenPair
from ._receptive_field_runs import RunField
from ._receptive_field_stretches import StretchField
from ._relations import Relations
from ._sections import Section
from ._squares import TooManySquaresError

_Field = SectionField | GridField | RunField | StretchField

_ALL_LAYERS = 8  # so few are told one by one; of more those that are powers of two, and the last


@dataclass(frozen=True)
class ReceptiveField:
    """What a token can have heard of after some layers of one pattern, exactly.

    A token knows of itself, and after each layer of all that the tokens know which it sees in any head: heads are mixed
    between layers, and what a token knew stays with it, as by residual connections. Pairs are (token, token it has
    heard of) with (t, t) among them, and indices count from the first token.

    `layers` are enough: more bring nothing, and `slowest` needs them all. `growth` says how many pairs there are after
    some numbers of layers, of which the last is `layers`. All others never meet, however many layers there are:
    `never_earlier` of them with an earlier token, `never_later` with a later one, each with its first pair.
    """

    num_tokens: int
    layers: int
    growth: tuple[tuple[int, int], ...]
    slowest: TokenPair | None
    never_earlier: int
    never_later: int
    first_never_earlier: TokenPair | None
    first_never_later: TokenPair | None

    @property
    def pairs(self) -> int:
        """All pairs that ever meet."""
        return self.growth[-1][1]

    @property
    def earlier_pairs(self) -> int:
        """All pairs of a token with an earlier one; as many as of a token with a later one."""
        return self.num_tokens * (self.num_tokens - 1) // 2

    def to_data(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {**asdict(self), "growth": [{"layers": layers, "pairs": pairs} for layers, pairs in self.growth]}


def receptive_field_of(relations: Relations) -> ReceptiveField:
    """Raises ValueError if queries and keys are not the same tokens, TooManySquaresError if too little repeats."""
    _require_self_attention(relations.bound)
    tokens = relations.bound.num_queries
    fields = _fields(relations)
    alone = tokens - sum(field.tokens * field.times for field in fields)
    layers = max((field.layers for field in fields), default=0)
    growth = tuple((number, alone + sum(field.pairs_after(number) for field in fields)) for number in _told(layers))
    earlier = sum(field.earlier for field in fields)
    later = growth[-1][1] - tokens - earlier
    half = tokens * (tokens - 1) // 2
    slowest = (pair for field in fields if field.layers == layers and (pair := field.slowest()) is not None)
    first = next((field for field in fields if field.start == 0), None)
    return ReceptiveField(
        tokens,
        layers,
        growth,
        min(slowest, default=None),
        half - earlier,
        half - later,
        _first_missing(first, tokens, earlier=True),
        _first_missing(first, tokens, earlier=False),
    )


def _require_self_attention(bound: Bound) -> None:
    if not bound.is_self_attention:
        raise ValueError(
            "a receptive field needs queries and keys that are the same tokens; got "
            f"{bound.num_queries} queries from {bound.q_offset} on and {bound.num_keys} keys from {bound.k_offset} on"
        )


def _fields(relations: Relations) -> Sequence[_Field]:
    """Those of the sections; that of a grid by its axes."""
    grid = grid_of(relations)
    if grid is not None:
        return [GridField(grid)]
    return [_field(relations, section) for section in relations.sections]


def _field(relations: Relations, section: Section) -> _Field:
    """From what repeats in the rules, or from what else makes them simple; that first where hardly anything repeats."""
    leaves = {leaf for group in section.groups for rule, _ in group.rules for leaf in rule.leaves()}
    kinds = []
    if any(isinstance(leaf, KeySet) for leaf in leaves):
        kinds.append(RunField)
    if all(isinstance(leaf, RandomBlocks | BlockList | Causal) for leaf in leaves):
        kinds.append(StretchField)
    first = _first(kinds, relations, section)
    if first is not None:
        return first
    try:
        return SectionField(relations, section)
    except TooManySquaresError:
        other = _first([kind for kind in (RunField, StretchField) if kind not in kinds], relations, section)
        if other is None:
            raise
        return other


def _first(
    kinds: Sequence[type[RunField] | type[StretchField]], relations: Relations, section: Section
) -> RunField | StretchField | None:
    return next((found for kind in kinds if (found := kind.of(relations, section)) is not None), None)


def _first_missing(first: _Field | None, num_tokens: int, *, earlier: bool) -> TokenPair | None:
    """The first pair of all that never meets. `first` is the section that begins with token 0, if there is one."""
    stop = 1 if first is None else first.tokens  # token 0 and the tokens from here on never meet
    across = [] if stop >= num_tokens else [(stop, 0) if earlier else (0, stop)]
    inside = None if first is None else first.first_missing(earlier=earlier)
    return min([*across, *([] if inside is None else [inside])], default=None)


def _told(layers: int) -> list[int]:
    """The numbers of layers that growth tells."""
    if layers <= _ALL_LAYERS:
        return list(range(layers + 1))[min(layers, 1) :]
    return [*(1 << power for power in range((layers - 1).bit_length())), layers]
