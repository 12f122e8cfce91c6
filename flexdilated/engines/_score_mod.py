"""score_mod: a caller's function of scores, called with global heads and positions in place of a term's indices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import chain
from types import CellType, FunctionType

import torch
from jaxtyping import Int64
from torch import Tensor

from ..masks.planning import PaddedTerm, Term

# N query tokens, M key tokens, H heads of a term

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Indices:
    """Map of a term's (batch, head, query, key) indices to batch entry, global head and positions.

    translate(function, *numbers): `function`, of (score, b, h, q, k) as a score_mod, for a term's indices.
    """

    translate: Callable[..., ScoreMod]
    numbers: tuple[Int64[Tensor, "..."], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that grow with tokens or heads."""
        return sum(each.nbytes for each in self.numbers if each.dim())

    def at_positions(self, function: ScoreMod) -> ScoreMod:
        return self.translate(function, *self.numbers)


def checked(score_mod: ScoreMod) -> ScoreMod:
    """The score_mod; its calls raise TypeError or ValueError unless its result is a tensor of shape ()."""

    def new_score(score, b, h, q, k):
        found = score_mod(score, b, h, q, k)
        if not isinstance(found, Tensor):
            raise TypeError(f"score_mod must return the new score, a tensor; got {type(found).__name__}")
        if found.dim() != 0:
            raise ValueError(f"score_mod must make one score of one score; got shape {tuple(found.shape)}")
        return found

    return new_score


def probe(score_mod: ScoreMod, q: Tensor, head: int, q_position: int, k_position: int) -> Tensor:
    """Call score_mod with a score of 0, for batch entry 0, to check its result."""
    indices = (torch.tensor(index, device=q.device) for index in (0, head, q_position, k_position))
    return checked(score_mod)(q.new_zeros(()), *indices)


def indices_of(term: Term, device: torch.device) -> Indices:
    """The map of a term's indices, in its most compact form."""

    def scalar(value: int) -> Tensor:
        return torch.tensor(value, device=device)

    heads = torch.tensor(term.heads, device=device) + term.head_offset
    if isinstance(term, PaddedTerm):
        sides = (term.q, term.q_offset), (term.k, term.k_offset)
        ends = ((side.begin + offset, side.end - 1 + offset) for side, offset in sides)
        starts = (torch.tensor(side.offsets, device=device) + side.start + offset for side, offset in sides)
        numbers = map(scalar, (term.q.width, term.q.segment, term.q.step, *chain(*ends)))
        return Indices(in_segments, (heads, *starts, *numbers))
    if term.q.is_natural and term.k.is_natural:
        return Indices(shifted, (heads, scalar(term.q_offset), scalar(term.k_offset)))
    positions = (
        side.tokens(device)[:, 0].clamp(min=0).expand(len(term.heads), -1) + offset
        for side, offset in ((term.q, term.q_offset), (term.k, term.k_offset))
    )
    return Indices(in_order, (heads, *positions))


# FlexAttention takes a plain closure; its parameters are tensors so that other values need no recompilation.


def in_order(
    function: ScoreMod,
    heads: Int64[Tensor, " H"],
    q_positions: Int64[Tensor, "H S"],
    k_positions: Int64[Tensor, "H S"],
) -> ScoreMod:
    """`function` of slots instead of positions: q_positions and k_positions list the position of each slot."""

    def at_positions(score, b, h, q, k):
        return function(score, b, heads[h], q_positions[h, q], k_positions[h, k])

    return at_positions


def in_segments(
    function: ScoreMod,
    heads: Int64[Tensor, " H"],
    q_starts: Int64[Tensor, " H"],
    k_starts: Int64[Tensor, " H"],
    width: Tensor,
    segment: Tensor,
    step: Tensor,
    q_first: Tensor,
    q_last: Tensor,
    k_first: Tensor,
    k_last: Tensor,
) -> ScoreMod:
    """`function` of the slots of padded segments; positions of padding slots are clamped, so that they can index tables."""

    def at_positions(score, b, h, q, k):
        q_position = q_starts[h] + q // width * segment + q % width * step
        k_position = k_starts[h] + k // width * segment + k % width * step
        q_position = torch.minimum(torch.maximum(q_position, q_first), q_last)
        k_position = torch.minimum(torch.maximum(k_position, k_first), k_last)
        return function(score, b, heads[h], q_position, k_position)

    return at_positions


def shifted(
    function: ScoreMod, heads: Int64[Tensor, " H"], q_offset: Int64[Tensor, ""], k_offset: Int64[Tensor, ""]
) -> ScoreMod:
    """`function` of a term over all tokens in order."""

    def at_positions(score, b, h, q, k):
        return function(score, b, heads[h], q + q_offset, k + k_offset)

    return at_positions


def plain_values(x: object, depth: int = 4) -> Hashable:
    """Code of a function with its captured numbers and strings, which are constants in a traced graph.

    Tensors, other objects and values nested deeper than `depth` count by type alone.
    """
    if x is None or isinstance(x, int | float | str):
        return x
    if depth and isinstance(x, FunctionType):
        held = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]  # an empty one has none
        return x.__code__, *(plain_values(each, depth - 1) for each in (*held, *(x.__defaults__ or ())))
    if depth and isinstance(x, list | tuple):
        return tuple(plain_values(each, depth - 1) for each in x)
    if depth and isinstance(x, dict):
        return tuple((plain_values(key, depth - 1), plain_values(each, depth - 1)) for key, each in x.items())
    if depth and isinstance(x, set | frozenset):
        return frozenset(plain_values(each, depth - 1) for each in x)
    return type(x)
