"""score_mod: a caller's function of scores, called by kernels with global heads and positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CellType, FunctionType

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from ..masks.core import Expression, Recorded, RecordError, record
from ..masks.planning import PaddedTerm, Term

# N query tokens, M key tokens, H heads of a term
# x problems: pairs of a batch entry and a head; t groups of Q queries and K keys that they share; y is x or 1

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class IndexMap:
    """Map from a kernel's (batch, head, query, key) indices to batch entry, global head and positions.

    The kernel computes one term. translate(function, *numbers) returns a function of the kernel's (score, batch, head,
    query, key) that calls `function` with global head and positions.
    """

    translate: Callable[..., ScoreMod]
    numbers: tuple[Int64[Tensor, "..."], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the map's tensors that grow with the number of tokens or heads; single numbers are not counted."""
        return sum(each.nbytes for each in self.numbers if each.dim())

    def on(self, device: torch.device) -> IndexMap:
        return IndexMap(self.translate, tuple(x.to(device) for x in self.numbers))

    def at_positions(self, function: ScoreMod) -> ScoreMod:
        return self.translate(function, *self.numbers)


def fixed_score_mod(score_mod: ScoreMod | None, dtype: torch.dtype, device: torch.device) -> ScoreMod | None:
    """Return a score_mod as engines take it: a `Recorded` or, in a graph of torch.compile, a function.

    A `Recorded` has the score_mod's operations, with the Python values that it reads as constants; tensors that it
    reads are kept, not copied. The function calls score_mod and checks its result. None and a `Recorded` are returned
    unchanged.

    dtype, device: of the scores.

    Raises TypeError or ValueError if the score_mod does not return one score or cannot be recorded, as when it converts
    a score to a Python value or writes to a tensor that it captured, and any error that the score_mod raises. In a
    graph, only the returned function raises, for a result that is not one score.
    """
    if score_mod is None or isinstance(score_mod, Recorded):
        return score_mod
    if torch.compiler.is_compiling():
        return _with_checked_result(score_mod)
    try:
        recorded = record(score_mod, (dtype, *[torch.int32] * 4), device)
    except RecordError as error:
        raise error.about("score_mod") from None
    _require_scalar(recorded.shape)
    return recorded


def plain_function(score_mod: ScoreMod) -> ScoreMod:
    """Return a fixed score_mod as a plain function, for torch.compile: the function of a `Recorded`, or score_mod."""
    return score_mod.function if isinstance(score_mod, Recorded) else score_mod


def through(score_mod: ScoreMod, translate: Callable[..., ScoreMod], *tensors: Tensor) -> ScoreMod:
    """Return translate(score_mod, *tensors) of a fixed score_mod, as a `Recorded` if score_mod is one.

    translate: a function at module level.
    """
    if isinstance(score_mod, Recorded):
        return score_mod.through(translate, *tensors)
    return translate(score_mod, *tensors)


def tensors_read(score_mod: ScoreMod, q: Tensor) -> Sequence[Tensor]:
    """Return the tensors that a fixed score_mod reads.

    In a graph of torch.compile, where they are unknown, return one tensor that depends on them: the score_mod's result
    for a score of 0.
    """
    if isinstance(score_mod, Recorded):
        return score_mod.tensors
    with torch.inference_mode(False), torch.enable_grad():
        indices = (torch.tensor(0, device=q.device) for _ in range(4))  # a constant, which can index
        return [score_mod(q.new_zeros(()), *indices)]


def _with_checked_result(score_mod: ScoreMod) -> ScoreMod:
    def new_score(score, b, h, q, k):
        found = score_mod(score, b, h, q, k)
        if not isinstance(found, Tensor):
            raise TypeError(f"score_mod must return a tensor; got {type(found).__name__}")
        if found.shape != score.shape:
            _require_scalar(found.shape)
        return found

    return new_score


def _require_scalar(shape: Sequence[int]) -> None:
    if len(shape):
        rule = "score_mod must return a tensor of shape (): it is called with one score"
        raise ValueError(f"{rule}; got shape {tuple(shape)}")


def apply_score_mod(
    score_mod: ScoreMod,
    scores: Float[Tensor, "x t Q K"],
    b: Int[Tensor, "x t"],
    h: Int[Tensor, "x t"],
    q: Int[Tensor, "t Q"],
    k: Int[Tensor, "t K"],
    hidden: Bool[Tensor, "y t _ K"] | None = None,
) -> Float[Tensor, "x t Q K"]:
    """Return the scores after score_mod, which is called for one score at a time, as in FlexAttention.

    b, h, q, k: batch entry and head of each problem, and its queries and keys, by the indices or positions that
        score_mod takes.
    hidden: True for pairs that are not allowed, for which score_mod may fail. For such a pair, score_mod gets the
        indices of an allowed pair of the same group of queries and keys, if there is one; callers must mask the result.
    """
    if torch.compiler.is_compiling():
        score_mod = _with_one_element_score(score_mod)
    b, h, q, k = (x.int() for x in (b, h, q, k))
    q, k = q[None], k[None, :, None].expand(-1, -1, q.shape[1], -1)
    if hidden is not None:
        q, k = _replace_hidden_pairs(~hidden.expand(-1, -1, q.shape[2], -1), q, k)
    of_all = None if len(q) == 1 else 0
    q, k = (q[0], k[0]) if of_all is None else (q, k)
    every = torch.vmap(score_mod, in_dims=(0, None, None, None, 0))
    every = torch.vmap(every, in_dims=(0, None, None, 0, 0))
    every = torch.vmap(torch.vmap(every, in_dims=(0, 0, 0, 0, 0)), in_dims=(0, 0, 0, of_all, of_all))
    return every(scores, b, h, q, k).to(scores.dtype)


def _with_one_element_score(score_mod: ScoreMod) -> ScoreMod:
    """Return a score_mod that takes a score of shape () and calls `score_mod` with the score in shape (1,).

    In a graph, torch.vmap cannot add a symbolic integer, such as a size that score_mod reads, to a float of shape ().
    """

    def new_score(score, b, h, q, k):
        found = score_mod(score[None], b, h, q, k)
        return found if found.dim() == 0 else found[0]

    return new_score


def _replace_hidden_pairs(
    shown: Bool[Tensor, "y t Q K"], q: Int[Tensor, "1 t Q"], k: Int[Tensor, "1 t Q K"]
) -> tuple[Int[Tensor, "y t Q"], Int[Tensor, "y t Q K"]]:
    """Return (q, k), in which each pair that is not allowed has the indices of an allowed pair of its query.

    If the query has none, the pair has the indices of an allowed pair of another query: the first query of the group
    that has one. If no query of the group has one, it has the indices of the group's first pair.

    shown: True for allowed pairs.
    """
    q, k = q.expand(len(shown), -1, -1), k.expand(len(shown), -1, -1, -1)
    some, first = shown.any(-1), shown.byte().argmax(-1)
    row = some.byte().argmax(2, keepdim=True).where(~some, torch.arange(q.shape[2], device=q.device))
    instead = k[:, :, 0].gather(2, first.gather(2, row))
    return q.gather(2, row), torch.where(shown, k, instead[..., None])


def index_map_of(term: Term, device: torch.device) -> IndexMap:
    """Return the map from a term's kernel indices to global heads and positions, with its tensors on this device.

    A slot without a token is mapped to the position of some token.
    """

    def scalar(value: int) -> Tensor:
        return torch.tensor(value, device=device)

    heads = torch.tensor(term.heads, device=device) + term.head_offset
    if isinstance(term, PaddedTerm):
        sides = (term.q, term.q_offset), (term.k, term.k_offset)
        ends = ((side.begin + offset, side.end - 1 + offset) for side, offset in sides)
        starts = (torch.tensor(side.offsets, device=device) + side.start + offset for side, offset in sides)
        numbers = map(scalar, (term.q.width, term.q.segment, term.q.step, *chain(*ends)))
        return IndexMap(in_segments, (heads, *starts, *numbers))
    if term.q.is_natural and term.k.is_natural:
        return IndexMap(at_offsets, (heads, scalar(term.q_offset), scalar(term.k_offset)))
    positions = (
        side.tokens(device)[:, 0].clamp(min=0).expand(len(term.heads), -1) + offset
        for side, offset in ((term.q, term.q_offset), (term.k, term.k_offset))
    )
    return IndexMap(in_order, (heads, *positions))


# FlexAttention takes a plain closure; its parameters are tensors so that other values need no recompilation.


def in_order(
    function: ScoreMod,
    heads: Int64[Tensor, " H"],
    q_positions: Int64[Tensor, "H S"],
    k_positions: Int64[Tensor, "H S"],
) -> ScoreMod:
    """Return a function of (score, batch, head, query slot, key slot) that calls `function` with head and positions.

    heads: global head of each head of the term.
    q_positions, k_positions: position in each slot of each head.
    """

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
    """Return a function of (score, batch, head, query slot, key slot) for slots in padded segments.

    It calls `function` with global head and positions. A segment of `segment` positions has `width` slots, `step`
    positions apart: slot s is at position start + s // width * segment + s % width * step.

    heads: global head of each head of the term.
    q_starts, k_starts: start for each head of the term.
    q_first, q_last, k_first, k_last: bounds to which positions are clamped, as those of padding slots could not index
        tables.
    """

    def at_positions(score, b, h, q, k):
        q_position = q_starts[h] + q // width * segment + q % width * step
        k_position = k_starts[h] + k // width * segment + k % width * step
        q_position = torch.minimum(torch.maximum(q_position, q_first), q_last)
        k_position = torch.minimum(torch.maximum(k_position, k_first), k_last)
        return function(score, b, heads[h], q_position, k_position)

    return at_positions


def at_offsets(
    function: ScoreMod, heads: Int64[Tensor, " H"], q_offset: Int64[Tensor, ""], k_offset: Int64[Tensor, ""]
) -> ScoreMod:
    """Return a function of (score, batch, head, query index, key index) for a kernel over all tokens in order.

    It calls `function` with the global head, heads[head], and with positions: the indices plus q_offset and k_offset.
    """

    def at_positions(score, b, h, q, k):
        return function(score, b, heads[h], q + q_offset, k + k_offset)

    return at_positions


def function_key(x: object, depth: int = 4) -> Hashable:
    """Return a hashable key of x; that of a function has its code, and the keys of its captured and default values.

    Python numbers, strings, bytes, ranges, dtypes, devices and patterns count by type and value, as they are constants
    of a traced graph. Functions, lists, tuples, dicts and sets count by their contents, up to `depth` levels deep.
    Deeper ones, tensors and other objects, which may hold tensors, count by type alone.
    """
    if isinstance(x, float | complex):
        return type(x), repr(x)  # 0.0 equals -0.0, and NaN not itself
    if depth and isinstance(x, FunctionType):
        held = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]  # an empty one has none
        held += [*(x.__defaults__ or ()), x.__kwdefaults__]
        return x.__code__, *(function_key(each, depth - 1) for each in held)
    if depth and isinstance(x, list | tuple):
        return tuple(function_key(each, depth - 1) for each in x)
    if depth and isinstance(x, dict):
        return tuple((function_key(key, depth - 1), function_key(each, depth - 1)) for key, each in x.items())
    if depth and isinstance(x, set | frozenset):
        return frozenset(function_key(each, depth - 1) for each in x)
    if isinstance(x, Expression):
        return type(x), x.text
    return (type(x), x) if isinstance(x, int | str | bytes | range | torch.dtype | torch.device) else type(x)
