"""The kernel of engine "portable": `flex_attention` in plain torch operations, with all gradients, on any device.

Each row of query blocks is a batch of matrix products with its key blocks and a softmax. Chunks of rows bound the
scores that exist at one time; the backward computes them again, so memory is linear in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from .._merge import sum_dtype
from .._ops import refuse, tensors_in
from .._score_mod import ScoreMod

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values
# T lists, one for each block row of a mask's heads and batch entries, W entries of the longest; Q, K sides of a block
# in a chunk: t lists with L entries, each shared by x problems: pairs of a batch entry and a query head

_SCORES_AT_ONCE = 1 << 20


def portable_attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    *,
    block_mask: BlockMask,
    scale: float,
    score_mod: ScoreMod | None = None,
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
    kernel_options: object = None,
) -> Float[Tensor, "B H N E"] | tuple[Float[Tensor, "B H N E"], AuxOutput]:
    """Attention with the arguments and results of torch's `flex_attention`, in plain torch operations.

    Returns the output (B, H, N, E) in the dtype of q or, if return_aux is not None, (output, AuxOutput) with the
    natural lse (B, H, N) in float32 or wider. A query without keys has output 0 and lse -inf. Gradients reach q, k, v
    and every tensor that score_mod captures. G may be a divisor of H, also without enable_gqa, which is ignored.
    kernel_options are for Triton's kernels and ignored, too.
    """
    captured = [] if score_mod is None else _captured(score_mod, q)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _Attention.apply(_Problems.of(block_mask, q, k), score_mod, scale, q, k, v, *captured)
    return out if return_aux is None else (out, AuxOutput(lse=lse))


class _Captured(TorchFunctionMode):
    """Torch-function mode that collects tensors with requires_grad that code inside it reads and did not create.

    `found` maps the id of each such tensor to the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        for x in tensors_in([*args, *given.values()]):
            if x.requires_grad and id(x) not in self._made:
                self.found[id(x)] = x
        made = func(*args, **given)
        self._made |= {id(x): x for x in tensors_in([made])}
        return made


def _captured(score_mod: ScoreMod, q: Tensor) -> list[Tensor]:
    """Tensors with requires_grad that score_mod captures, found by one call of it with zeros; [] if autograd is off."""
    if not torch.is_grad_enabled():
        return []
    with _Captured() as captured:
        score_mod(q.new_zeros(()), *(torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(4)))
    return list(captured.found.values())


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Attention problems that are computed at once: a problem is one query block over its L listed key blocks.

    t block lists of equal length are each used by x problems, one for each batch entry and head that shares the list.
    problem: index of the query block in the flattened (batch, heads, block rows). block: indices of key blocks in the
    flattened (batch, key/value heads, blocks). hidden: True for pairs that are not allowed, of each problem (y = x) or
    alike for all (y = 1); None if all are allowed. places: (batch entry, head, queries, keys) of the problems.
    """

    problem: Int64[Tensor, "x t"]
    block: Int64[Tensor, "x t L"]
    hidden: Bool[Tensor, "y t _ LK"] | None
    places: tuple[Int64[Tensor, "x t"], Int64[Tensor, "x t"], Int64[Tensor, "t Q"], Int64[Tensor, "t LK"]]

    def asked(self) -> tuple[Tensor, Tensor, Int32[Tensor, "y t Q"], Int32[Tensor, "y t Q LK"]]:
        """Return the arguments (b, h, q_idx, k_idx) with which score_mod is called for each pair of the chunk.

        score_mod may fail for pairs that are not allowed. Each is replaced by an allowed pair of its query or, for a
        query without keys, of the first query in the block that has one.
        """
        b, h, q, k = (x.int() for x in self.places)
        q, k = q[None], k[None, :, None].expand(-1, -1, q.shape[1], -1)
        if self.hidden is None:
            return b, h, q, k
        shown = ~self.hidden.expand(-1, -1, q.shape[2], -1)
        q, k = q.expand(len(shown), -1, -1), k.expand(len(shown), -1, -1, -1)
        some, first = shown.any(-1), shown.byte().argmax(-1)
        row = some.byte().argmax(2, keepdim=True).where(~some, torch.arange(q.shape[2], device=q.device))
        instead = k[:, :, 0].gather(2, first.gather(2, row))
        return b, h, q.gather(2, row), torch.where(shown, k, instead[..., None])


@dataclass(frozen=True, eq=False)
class _Problems:
    """Block lists of a BlockMask, one for each block row of its batch entries and heads, and the sizes of q and k.

    columns: key blocks of each list, first `partial` blocks with a mask, then full ones, `count` in all; padded.
    """

    mask: BlockMask
    columns: Int64[Tensor, "T W"]
    partial: Int64[Tensor, " T"]
    count: Int64[Tensor, " T"]
    sizes: tuple[int, int, int, int, int]  # B, H, G, N, M

    @classmethod
    def of(cls, mask: BlockMask, q: Tensor, k: Tensor) -> _Problems:
        partial, count = mask.kv_num_blocks.flatten().long(), mask.kv_num_blocks.flatten().long()
        columns = mask.kv_indices.flatten(0, 2).long()
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            count = partial + mask.full_kv_num_blocks.flatten()
            whole = mask.full_kv_indices.flatten(0, 2).long()
            place = torch.arange(max(1, int(count.max())), device=q.device).expand(len(count), -1)
            behind = (place - partial[:, None]).clamp(0, whole.shape[1] - 1)
            first = columns.gather(1, place.clamp(max=columns.shape[1] - 1))
            columns = torch.where(place < partial[:, None], first, whole.gather(1, behind))
        return cls(mask, columns, partial, count, (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]))

    @property
    def sides(self) -> tuple[int, int]:
        return self.mask.BLOCK_SIZE

    def by_query_block(self, x: Float[Tensor, "B H N ..."]) -> Float[Tensor, "BHR Q ..."]:
        return _blocks(x, self.sides[0])

    def by_key_block(self, x: Float[Tensor, "B G M ..."]) -> Float[Tensor, "BGC K ..."]:
        return _blocks(x, self.sides[1])

    def chunks(self) -> Iterator[_Chunk]:
        """Yield chunks that together have every query block with a non-empty list, the longest lists first."""
        device, (batch, heads, groups, queries, keys) = self.count.device, self.sizes
        side, k_side = self.sides
        own_batch, own_heads, rows = self.mask.kv_num_blocks.shape
        shared = (batch // own_batch) * (heads // own_heads)
        order = self.count.argsort(descending=True, stable=True)
        counts, begin, blocks = self.count[order].tolist(), 0, -(-keys // k_side)
        while begin < len(counts) and counts[begin]:
            length = counts[begin]
            lists = max(1, _SCORES_AT_ONCE // (side * k_side * length * shared))
            at = order[begin : begin + lists]
            at = at[: sum(count > 0 for count in counts[begin : begin + lists])]
            begin += len(at)
            row, head, entry = at % rows, at // rows % own_heads, at // (rows * own_heads)
            slots = torch.arange(side, device=device) + row[:, None] * side
            column = self.columns[at, :length]
            key_slots = (column[..., None] * k_side + torch.arange(k_side, device=device)).flatten(1)
            many_heads = torch.arange(heads // own_heads, device=device)[:, None] + head
            many_entries = torch.arange(batch // own_batch, device=device)[:, None] + entry
            b = many_entries.repeat_interleave(len(many_heads), 0)
            h = many_heads.repeat(len(many_entries), 1)
            problem = (b * heads + h) * rows + row
            block = ((b * groups + h // (heads // groups)) * blocks)[..., None] + column.clamp(max=blocks - 1)
            places = slots.clamp(max=queries - 1), key_slots.clamp(max=keys - 1)
            beyond = (key_slots >= keys) | (
                self.count[at][:, None] <= torch.arange(length, device=device)
            ).repeat_interleave(k_side, 1)
            some = max(1, _SCORES_AT_ONCE // (side * k_side * length * len(at)))
            for first in range(0, shared, some):
                part = slice(first, first + some)
                own = b[part], h[part], *places
                yield _Chunk(problem[part], block[part], self._hidden(self.partial[at], beyond, *own), own)

    def _hidden(
        self, partial: Int64[Tensor, " t"], beyond: Bool[Tensor, "t LK"], b: Tensor, h: Tensor, q: Tensor, k: Tensor
    ) -> Bool[Tensor, "y t _ LK"] | None:
        """True for pairs that are not allowed: masked ones in partial blocks, and those after the last block or key.

        None if every pair is allowed. The arguments are rows of a `_Chunk`; y is 1 if all its problems agree.
        """
        masked = int(partial.max()) * self.sides[1]
        if not masked:
            return beyond[None, :, None] if bool(beyond.any()) else None
        allowed = self.mask.mask_mod(b[..., None, None], h[..., None, None], q[:, :, None], k[:, None, :masked])
        allowed = allowed[(None,) * (4 - allowed.dim())]  # a mask that reads neither b nor h holds for all problems
        whole = partial[:, None] <= torch.arange(masked, device=partial.device) // self.sides[1]
        hidden = ~(allowed | whole[:, None]) | beyond[:, None, :masked]
        rest = beyond[None, :, None, masked:].expand(*hidden.shape[:1], -1, hidden.shape[2], -1)
        return torch.cat([hidden, rest], 3) if rest.shape[3] else hidden


class _Attention(torch.autograd.Function):
    """Autograd function (problems, score_mod, scale, q, k, v, *captured) -> (out, natural lse).

    Chunks bound the scores in memory; the backward recomputes each chunk's weights from the lse. captured: tensors that
    score_mod reads, which also get gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, problems: _Problems, score_mod: ScoreMod | None, scale: float, q: Tensor, k: Tensor, v: Tensor,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide, queries = sum_dtype(q), problems.by_query_block(q)
        keys, values = problems.by_key_block(k), problems.by_key_block(v)
        out = q.new_zeros(*queries.shape[:2], v.shape[3], dtype=wide)
        lse = q.new_full(queries.shape[:2], -torch.inf, dtype=wide)
        for chunk in problems.chunks():
            scores = _scores(chunk, queries, keys, score_mod, scale)
            top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(wide).min)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            found = weights @ _gathered(values, chunk.block, wide)
            out[chunk.problem] = found.div_(total.masked_fill(total == 0, 1.0))
            lse[chunk.problem] = (total.log() + top).squeeze(-1)
        out, lse = (_tokens(x, q) for x in (out, lse))
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.problems, ctx.score_mod, ctx.scale = problems, score_mod, scale
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse, *captured = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False), torch.no_grad():
            found = _gradients(ctx.problems, ctx.score_mod, ctx.scale, grads, q, k, v, out, lse, captured)
        if torch.is_grad_enabled():  # create_graph=True
            found = _Final.apply(len(found), *found, *grads, *ctx.saved_tensors)
        return None, None, None, *found


class _Final(torch.autograd.Function):
    """Autograd function (count, *tensors) -> copies of the first `count` tensors; its backward raises RuntimeError.

    Applied to the gradients of attention, it refuses a second derivative through any of the tensors.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors[:count])

    backward = staticmethod(
        refuse(
            "the portable engine has no second derivative; "
            "for double backward use engine='reference' (dense, small inputs)"
        )
    )


def _gradients(
    problems: _Problems,
    score_mod: ScoreMod | None,
    scale: float,
    grads: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captured: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, gradient of each captured tensor), each in its tensor's dtype; grads: gradients of out, lse."""
    (grad_out, grad_lse), wide = grads, lse.dtype
    delta = (grad_out.to(wide) * out).sum(-1) - grad_lse
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row without keys has no weights
    queries, grad_outs, deltas, lses = (problems.by_query_block(x) for x in (q, grad_out, delta, lse))
    keys, values = problems.by_key_block(k), problems.by_key_block(v)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (queries, keys, values))
    of_captured = [torch.zeros_like(x) for x in captured]
    for chunk in problems.chunks():
        own, grad = (x[chunk.problem].to(wide) for x in (queries, grad_outs))
        key, value = (_gathered(x, chunk.block, wide) for x in (keys, values))
        with torch.enable_grad():
            plain = (own @ key.mT).mul_(scale).requires_grad_(score_mod is not None)
            scores = plain if score_mod is None else _modified(chunk, plain, score_mod)
        weights = scores.detach() - lses[chunk.problem][..., None]
        weights = (weights if chunk.hidden is None else weights.masked_fill_(chunk.hidden, -torch.inf)).exp_()
        of_values = weights.mT @ grad
        of_scores = (grad @ value.mT).sub_(deltas[chunk.problem][..., None]).mul_(weights)
        if score_mod is not None:
            found = torch.autograd.grad(scores, (plain, *captured), of_scores, allow_unused=True)
            of_scores = torch.zeros_like(plain) if found[0] is None else found[0]
            for total, part in zip(of_captured, found[1:], strict=True):
                total += 0 if part is None else part
        of_scores = of_scores * scale
        dq[chunk.problem] = of_scores @ key
        for total, part in ((dk, of_scores.mT @ own), (dv, of_values)):
            total.index_add_(0, chunk.block.flatten(), part.unflatten(2, (-1, total.shape[1])).flatten(0, 2))
    found = (_tokens(x, like).to(like.dtype) for x, like in ((dq, q), (dk, k), (dv, v)))
    return *found, *of_captured


def _scores(
    chunk: _Chunk, queries: Tensor, keys: Tensor, score_mod: ScoreMod | None, scale: float
) -> Float[Tensor, "x t Q LK"]:
    wide = sum_dtype(queries)
    scores = (queries[chunk.problem].to(wide) @ _gathered(keys, chunk.block, wide).mT).mul_(scale)
    scores = scores if score_mod is None else _modified(chunk, scores, score_mod)
    return scores if chunk.hidden is None else scores.masked_fill_(chunk.hidden, -torch.inf)


def _modified(chunk: _Chunk, scores: Float[Tensor, "x t Q LK"], score_mod: ScoreMod) -> Float[Tensor, "x t Q LK"]:
    """Apply score_mod to each score, as FlexAttention does, with the indices of allowed pairs only; see `asked`."""
    b, h, q, k = chunk.asked()
    of_all = None if len(q) < len(b) or len(b) == 1 else 0
    q, k = (q[0], k[0]) if of_all is None else (q, k)
    every = torch.vmap(score_mod, in_dims=(0, None, None, None, 0))
    every = torch.vmap(every, in_dims=(0, None, None, 0, 0))
    every = torch.vmap(torch.vmap(every, in_dims=(0, 0, 0, 0, 0)), in_dims=(0, 0, 0, of_all, of_all))
    return every(scores, b, h, q, k).to(scores.dtype)


def _gathered(
    x: Float[Tensor, "n K D"], block: Int64[Tensor, "x t L"], dtype: torch.dtype
) -> Float[Tensor, "x t LK D"]:
    return x.index_select(0, block.flatten()).to(dtype).view(*block.shape[:2], -1, x.shape[2])


def _blocks(x: Float[Tensor, "B H N ..."], side: int) -> Float[Tensor, "n side ..."]:
    """Cut tokens into blocks of `side`, padded with zeros; n is (batch, heads, blocks) flattened."""
    missing = -x.shape[2] % side
    x = pad(x, (0, 0) * (x.dim() - 3) + (0, missing)) if missing else x
    return x.unflatten(2, (-1, side)).flatten(0, 2)


def _tokens(x: Float[Tensor, "n side ..."], like: Tensor) -> Float[Tensor, "B H N ..."]:
    """Inverse of `_blocks`: join n blocks to the tokens of a tensor with the first three dims of `like`."""
    return x.unflatten(0, (like.shape[0], like.shape[1], -1)).flatten(2, 3)[:, :, : like.shape[2]]
