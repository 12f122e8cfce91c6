"""Cases for the kernels of the flex engine: calls of `attend`, their truth in float64, and plain attention's error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import flexdilated as fd
from bench._catalogue import names_for
from flexdilated._attend import checked_call
from flexdilated._validate import Place
from flexdilated.engines.flex._flex_op import run_time_program, static_program
from flexdilated.engines.flex._program import FlexProgram
from flexdilated.testing._closeness import DenseAttention, cotangents
from tests.support import oracle

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

# What a result may be off by: this many times what plain attention in the same dtype is off by, or than it is rounded.
# Few numbers, such as the gradient of a sink, are long sums that nearly cancel. Plain attention may be off by hardly
# anything in one draw: the worst of several draws counts for them.
MARGIN, FEW, DRAWS = 2.0, 64, 32
KINDS = ("full", "partial", "empty")


Results = dict[str, Tensor]
Attention = Callable[[Results], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One call of attend, forward and backward, over at least 3 x 3 blocks that end in the middle of one.

    text: the pattern, in the words of the catalogue and of `words`. run_time: the tensors handed over with the call.
    rate: above 1 q, k and v come in residue order. block: the sides of its blocks, which attend otherwise chooses.
    lacks: kinds of blocks that such a pattern has none of.
    """

    name: str
    text: str
    tokens: int
    heads: int = 1
    kv_heads: int | None = None
    keys: int | None = None
    q_offset: int = 0
    head_dim: int = 16
    value_dim: int | None = None
    dtype: str = "float16"
    batch: int = 1
    run_time: tuple[str, ...] = ()
    has_sinks: bool = False
    has_score_mod: bool = False
    rate: int = 1
    block: int | None = None
    in_graph: bool = False
    trains: bool = True
    lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, {'in a graph' if self.in_graph else 'eager'}"

    def pattern(self) -> Any:
        return eval(self.text, words(self.keys or self.tokens))

    def bindings(self, device: str) -> dict[str, Tensor]:
        return {name: words(self.tokens)[name].to(device) for name in self.run_time}

    def leaves(self, draw: int = 0) -> Results:
        """What gradients are taken of, on CPU."""
        generator = torch.Generator().manual_seed(self.tokens + draw)
        keys, kv_heads = self.keys or self.tokens, self.kv_heads or self.heads
        shapes: dict[str, tuple[int, ...]] = {"q": (self.batch, self.heads, self.tokens, self.head_dim)}
        dims = (("k", self.head_dim), ("v", self.value_dim or self.head_dim))
        shapes |= {name: (self.batch, kv_heads, keys, dim) for name, dim in dims}
        if self.has_sinks:
            shapes["sinks"] = (self.heads,)
        if self.has_score_mod:
            shapes |= {"slopes": (self.heads,), "bias": (keys,)}
        dtype = getattr(torch, self.dtype)
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}

    def attention(self, *, engine: str | None = None) -> Attention:
        """(out, lse) of leaves on the emulated device."""
        pattern, bindings = self.pattern(), self.bindings("cuda")
        order = fd.masks.Layout(self.tokens, self.rate) if self.rate > 1 else None
        fixed: dict[str, Any] = {"enable_gqa": self.kv_heads is not None, "q_offset": self.q_offset, "layout": order}
        fixed |= {"block_size": self.block, "engine": engine}

        def attend(leaves: Results) -> tuple[Tensor, Tensor]:
            options = fixed | ({"bindings": bindings} if bindings else {})
            options |= {"sinks": leaves["sinks"]} if self.has_sinks else {}
            tables = [leaves["slopes"], leaves["bias"]] if self.has_score_mod else []
            options |= {"score_mod": score_mod(tables)} if self.has_score_mod else {}
            q, k, v = leaves["q"], leaves["k"], leaves["v"]
            if order is None:
                out, lse = fd.attend(q, k, v, pattern, return_lse=True, **options)
            else:
                q, k, v = order.apply(q), order.apply(k), order.apply(v)
                out, lse = fd.attend(q, k, v, pattern, return_lse=True, **options)
                out, lse = order.invert(out), order.invert(lse, dim=-1)
            tables.clear()  # the backward needs them no more
            return out, lse

        torch.compiler.reset()
        return torch.compile(attend, fullgraph=True) if self.in_graph else attend

    def program(self, leaves: Results) -> FlexProgram:
        """What the engine runs for these leaves, from the plan cache."""
        layout = fd.masks.Layout(self.tokens, self.rate) if self.rate > 1 else None
        place, q, k = Place(self.q_offset, layout=layout, block_size=self.block), leaves["q"], leaves["k"]
        _, call, tensors, _ = checked_call(q, k, self.pattern(), place, None, self.bindings("cuda"))
        if tensors:
            return run_time_program(call, q.device, tensors, len(q), call.operands(q))
        return static_program(call, q.device, operands=call.operands(q))

    def counts(self, leaves: Results) -> Tensor:
        """(B, H, N, M): how often each pair is allowed, by the dense rule."""
        options: dict[str, Any] = {"bindings": self.bindings("cpu"), "q_offset": self.q_offset}
        return DenseAttention.of(leaves["q"], leaves["k"], leaves["v"], self.pattern(), **options).times()

    def modify(self, leaves: Results) -> Callable[[Tensor], Tensor]:
        """`score_mod` over all scores."""
        if not self.has_score_mod:
            return lambda scores: scores
        q, k = torch.arange(self.tokens) + self.q_offset, torch.arange(self.keys or self.tokens)
        ahead = (q[:, None] - k) / 64

        def modified(scores: Tensor) -> Tensor:
            slopes, bias = (_OneByOne.apply(x, scores) for x in (leaves["slopes"][:, None, None], leaves["bias"]))
            return scores + slopes * ahead + bias

        return modified


class _OneByOne(torch.autograd.Function):
    """A table for all scores, whose gradients are added up one after the other, as kernels add to what they share."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, scores: Tensor) -> Tensor:
        ctx.shape, ctx.scores = table.shape, scores.shape
        return table.expand_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), shape = grads, (*(1,) * (len(ctx.scores) - len(ctx.shape)), *ctx.shape)
        summed = [dim for dim, size in enumerate(shape) if size == 1]
        kept = [dim for dim, size in enumerate(shape) if size > 1]
        rows = grad.permute(*kept, *summed).flatten(len(kept)).numpy()
        return torch.from_numpy(np.cumsum(rows, axis=-1, dtype=rows.dtype)[..., -1].copy()).view(ctx.shape), None


def words(num_tokens: int) -> dict[str, Any]:
    """What patterns are written with, beside the catalogue's own words."""
    position = torch.arange(num_tokens)
    two = torch.stack([(position >= 90).long() + (position >= 480), (position >= 300).long()])
    return names_for(num_tokens) | {
        "documents": two[0],
        "documents_of_two": two,
        "lengths_of_two": torch.tensor([num_tokens - 60, num_tokens // 2]),
        "mask_of_two": torch.rand(2, 2, num_tokens, num_tokens, generator=torch.Generator().manual_seed(0)) < 0.3,
        "pairs": torch.cat([two[0], two[1]]),
        "which": torch.tensor([1, 0]),
        "starts": torch.tensor([256, 100]),
        "chosen": chosen,
        "chosen_rows": chosen(num_tokens, (64, 128), 2, tables=2),
        "visible": (position < 10) | (position >= 100) & (position < num_tokens - 20),
    }


def chosen(num_tokens: int, block: tuple[int, int], most: int, tables: int = 1) -> Tensor:
    """A table that names blocks at or before each row's own, some of them not at all."""
    rows = torch.arange(-(-num_tokens // block[0]))[:, None]
    drawn = torch.rand(tables, len(rows), most, generator=torch.Generator().manual_seed(num_tokens))
    return (drawn * (rows * block[0] // block[1] + 2)).long() - 1


def score_mod(tables: list[Tensor]) -> Callable[..., Tensor]:
    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        slopes, bias = tables
        return score + slopes[h] * ((q_idx - k_idx) / 64) + bias[k_idx]

    return biased


def results(attention: Attention, leaves: Results, trains: bool) -> Results:
    """out, lse and the gradients of a fixed functional of both, on CPU."""
    leaves = {name: leaf.detach().clone().requires_grad_(trains) for name, leaf in leaves.items()}
    out, lse = attention(leaves)
    found = {"out": out, "lse": lse}
    if trains:
        grad_out, grad_lse = cotangents(out.detach().cpu(), lse.detach().cpu())
        sent = grad_out.to(out.device, out.dtype), grad_lse.to(lse.device, lse.dtype)
        grads = torch.autograd.grad((out, lse), tuple(leaves.values()), sent)
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: value.detach().cpu().double() for name, value in found.items()}


def plain(leaves: Results, counts: Tensor, modify: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) as plain attention in the leaves' dtype has them: products summed, and softmax taken, in float32."""
    q, k, v = leaves["q"], *(leaves[x].repeat_interleave(leaves["q"].shape[1] // leaves[x].shape[1], 1) for x in "kv")
    empty = (counts == 0).all(-1)
    scores = modify(q.float() @ k.float().mT * q.shape[-1] ** -0.5) + counts.clamp(min=1).float().log()
    scores = scores.masked_fill((counts == 0) & ~empty[..., None], -torch.inf)
    if "sinks" in leaves:
        scores = scores.masked_fill(empty[..., None], -torch.inf)
        column = leaves["sinks"].float()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v, empty = torch.cat([scores, column], -1), pad(v, (0, 0, 0, 1)), torch.zeros_like(empty)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(v.dtype)
    out = (weights.float() @ v.float()).to(q.dtype)
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)


def shares(case: Case, found: Results) -> dict[str, float]:
    """Of each result its error over what it may be, of all numbers or of the worst row; NaN where it has a NaN."""
    counts = case.counts(case.leaves())

    def exact(wide: Results) -> tuple[Tensor, Tensor]:
        return oracle.attention(
            wide["q"], wide["k"], wide["v"], counts, None, wide.get("sinks"), modify=case.modify(wide)
        )

    def drawn(draw: int) -> tuple[Results, Results]:
        leaves = case.leaves(draw)
        truth = results(exact, {name: leaf.double() for name, leaf in leaves.items()}, case.trains)
        return truth, results(lambda own: plain(own, counts, case.modify(own)), leaves, case.trains)

    truth, ordinary = drawn(0)
    others = [drawn(draw) for draw in range(1, DRAWS)] if any(value.numel() < FEW for value in truth.values()) else []
    found_shares = {}
    for name, value in truth.items():
        draws = [(truth, ordinary), *(others if value.numel() < FEW else ())]
        usual = [_error(theirs[name], own[name]) for own, theirs in draws]
        eps = torch.finfo(torch.float32 if name == "lse" else getattr(torch, case.dtype)).eps
        found_shares[name] = _share(found[name], value, usual, eps)
    return found_shares


def _share(found: Tensor, truth: Tensor, usual: list[Tensor], eps: float) -> float:
    if not torch.equal(found == -torch.inf, truth == -torch.inf):
        return torch.inf
    wrong, size = _error(found, truth), _error(truth, torch.zeros_like(truth))
    whole = wrong.norm() / (MARGIN * max(eps / 2 * size.norm(), *(each.norm() for each in usual)))
    rows = _worst_row(wrong) / (2 * MARGIN * max(eps / 2 * _worst_row(size), *map(_worst_row, usual)))
    return float(whole.maximum(rows))


def _error(found: Tensor, truth: Tensor) -> Tensor:
    """Row by row, where both are finite."""
    return torch.atleast_2d((found - truth).masked_fill(truth == -torch.inf, 0.0).masked_fill(found == -torch.inf, 0.0))


def _worst_row(x: Tensor) -> Tensor:
    return x.norm(dim=-1).max()


def blocks(case: Case, program: FlexProgram) -> dict[str, int]:
    """The blocks of each kind over a program's steps; its steps, those with three blocks a side, and ragged ones."""
    found = dict.fromkeys((*KINDS, "three a side", "ragged"), 0) | {"steps": len(program.steps)}
    for step in program.steps:
        mask, slots = step.mask, (step.term.q.num_slots, step.term.k.num_slots)
        assert mask.full_kv_num_blocks is not None
        sides = [-(-count // side) for count, side in zip(slots, mask.BLOCK_SIZE, strict=True)]
        partial, full = int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())
        found["partial"] += partial
        found["full"] += full
        found["empty"] += mask.kv_num_blocks.numel() * sides[1] - partial - full
        found["three a side"] += min(sides) >= 3
        cut = any(count % side for count, side in zip(slots, mask.BLOCK_SIZE, strict=True))
        found["ragged"] += cut or bool((step.term.q.tokens() < 0).any())
    return found


def in_graph(case: Case) -> Case:
    return replace(case, in_graph=True)
