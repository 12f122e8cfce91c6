"""LightningIndexer: chooses single keys for each query, as DeepSeek-V3.2 does, and is trained by the attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..._validate import check_tensors, resolve_scale
from ...decoding import KVCache
from ...masks import Pattern, causal
from ...masks.core import advises, require_finite, require_int
from .._choose import TopK
from .._index_op import index_keys, index_loss
from .._selector import BlockSelector
from ._rotary import angles_at, rotate

# B batch, h index heads, H query heads, G key/value heads, N tokens, E embedding dim, F dim of the queries' input,
# R rotated channels, d index head dim, D head dim

Rotary = tuple[Float[Tensor, "#B N R"], Float[Tensor, "#B N R"]]  # cosines and sines, each half of R equal


@advises()
class LightningIndexer(nn.Module):
    """Chooses the `top` keys that each query attends to, for all heads: the lightning indexer of DeepSeek-V3.2.

    The index score of key s for query t is I(t, s) = sum_h w(t, h) · ReLU(q(t, h) · k(s)) / sqrt(head_dim * num_heads),
    over the index heads h. q is linear in the queries' input, w is linear in the tokens, and k = LayerNorm(linear in
    the tokens), one for all heads; the first `rope_dim` channels of q and k are rotated by position. Of the keys that
    `within` allows, the `top` keys with the highest scores are chosen, or all if there are fewer.

    Scores are computed in chunks of queries, in float32 or wider, so that memory is linear in the sequence length. The
    choice has no gradient: `loss` trains the indexer. The published model rotates q and k by a Hadamard matrix and
    rounds them to 8 bits, which is left out here: the rotation does not change scores.

    embed_dim: E, size of the tokens.
    top: keys of each query; 2048 in the paper.
    query_dim: F, size of the queries' input, such as the latent vector from which the model makes its queries; None:
        the tokens are this input.
    num_heads, head_dim: of the index queries.
    rope_dim: rotated channels of a head, even; 0 for none.
    base: base of the rotary embedding's frequencies.
    within: a set pattern, the pairs that may be chosen; causal() in the paper.

    Its parameters have the names and shapes of the indexer in published checkpoints: wq_b, wk, k_norm, weights_proj.

    Raises TypeError or ValueError for other values.
    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.

    >>> indexer = fd.selection.recipes.LightningIndexer(32, top=64, num_heads=4, head_dim=16, rope_dim=8)
    >>> x, q, k, v = torch.randn(1, 256, 32), *torch.randn(3, 1, 8, 256, 16)
    >>> chosen = indexer(x)
    >>> chosen.shape
    torch.Size([1, 1, 256, 64])
    >>> out = fd.attend(q, k, v, masks.selected_keys("chosen", most=64), bindings={"chosen": chosen})
    >>> indexer.loss(x, q, k, chosen=chosen).backward()
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        top: int,
        query_dim: int | None = None,
        num_heads: int = 64,
        head_dim: int = 128,
        rope_dim: int = 64,
        base: float = 10_000.0,
        within: Pattern = causal(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        require_int("embed_dim", embed_dim, minimum=1)
        query_dim = require_int("query_dim", embed_dim if query_dim is None else query_dim, minimum=1)
        self.num_heads = require_int("num_heads", num_heads, minimum=1)
        self.head_dim = require_int("head_dim", head_dim, minimum=1)
        self.rope_dim = require_int("rope_dim", rope_dim, minimum=0, maximum=head_dim)
        if rope_dim % 2:
            raise ValueError(f"rope_dim must be even, as the embedding rotates pairs of channels; got {rope_dim=}")
        if require_finite("base", base) <= 1:
            raise ValueError(f"base must be above 1; got {base=}")
        self.base = float(base)
        self.selector = BlockSelector(
            block=1, choose=TopK(require_int("top", top, minimum=1)), within=within, share="all"
        )
        self.wq_b = nn.Linear(query_dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(embed_dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(embed_dim, num_heads, bias=False)

    @property
    def top(self) -> int:
        """Number of keys of each query: the width of the tables."""
        return self.selector.choose.most

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        queries: Float[Tensor, "B N F"] | None = None,
        *,
        rotary: Rotary | None = None,
        bindings: Mapping[str, Tensor] | None = None,
        within: Pattern | None = None,
        cache: KVCache | None = None,
    ) -> Int64[Tensor, "B 1 N top"]:
        """Return a table for `masks.selected_keys`: each query's chosen keys, in descending order of score, then -1.

        x: the tokens.
        queries: input of the index queries; None: x.
        rotary: (cosines, sines) of the model's rotary embedding for these tokens, each (B or 1, N, rope_dim) with equal
            halves, as models of transformers hand them to their layers; None: by position, with `base`.
        bindings: the run-time tensors that the patterns name but do not carry.
        within: a pattern for this call, intersected with the indexer's, such as the documents of a packed batch.
        cache: from the method `cache`, for decoding: x has the next tokens, whose index keys are appended, and keys are
            chosen among all tokens so far.

        Raises ValueError or TypeError for inputs that do not fit together.
        """
        with torch.no_grad():
            q_offset = 0 if cache is None else cache.num_tokens
            q, k, w = self._index_tensors(x, queries, rotary, q_offset)
            if cache is not None:
                cache.append(k.unsqueeze(1), k.new_zeros(len(k), 1, k.shape[1], 1))
                k = cache.held()[1].squeeze(1)
            if 0 in q.shape or 0 in k.shape:
                return q.new_full((len(q), 1, q.shape[2], self.top), -1, dtype=torch.int64)
            options = {"scale": 1.0, "q_offset": q_offset, "bindings": bindings, "within": within}
            _, tensors, call = self.selector.prepared(q[:, :1], k.unsqueeze(1), **options)
            return index_keys(q, k, w, tensors, *call.arguments)

    def loss(
        self,
        x: Float[Tensor, "B N E"],
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G N D"],
        queries: Float[Tensor, "B N F"] | None = None,
        *,
        chosen: Int64[Tensor, "B 1 N top"] | None = None,
        scale: float | None = None,
        rotary: Rotary | None = None,
        bindings: Mapping[str, Tensor] | None = None,
        within: Pattern | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean over queries of KL(p ‖ softmax(I)), in nats: a loss that trains only the indexer.

        p: the mean over heads of the attention weights. p and the softmax are over the chosen keys; without `chosen`,
            as in the paper's warm-up stage, they are over all keys that the patterns allow. Queries without keys are
            left out of the mean.
        x, queries, rotary, bindings, within: as in `forward`.
        q, k: queries and keys of the attention; G divides H.
        chosen: the result of `forward`, or another table of keys, in which a repeated key counts once. -1 stands for
            none, and on accelerators so does every other number that is no key.
        scale: the attention's factor on scores, a number; None: 1 / sqrt(D).

        Gradients reach only the indexer's parameters, and are exact; all other inputs count as constants.

        Raises ValueError or TypeError for inputs that do not fit together.

        >>> indexer = fd.selection.recipes.LightningIndexer(32, top=64, num_heads=4, head_dim=16, rope_dim=8)
        >>> indexer.loss(torch.randn(1, 256, 32), *torch.randn(2, 1, 8, 256, 16)).backward()  # warm-up
        """
        q, k = q.detach(), k.detach()
        check_tensors(q, k, k, enable_gqa=True)
        own_q, own_k, w = self._index_tensors(x.detach(), None if queries is None else queries.detach(), rotary, 0)
        if (len(q), *q.shape[2:3], k.shape[2]) != (len(own_k), *own_k.shape[1:2] * 2):
            raise ValueError(
                f"q and k must be those of the tokens x, {tuple(x.shape)}; got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        options = {"scale": resolve_scale(scale, q.shape[-1]), "q_offset": 0, "bindings": bindings, "within": within}
        _, tensors, call = self.selector.prepared(q[:, :1], k[:, :1], **options)
        if chosen is not None:
            _check_table(chosen, len(q), q.shape[2])
            chosen = chosen.detach()
        if 0 in q.shape or 0 in own_q.shape:
            return sum((each.sum() * 0.0 for each in self.parameters()), q.new_zeros(()))
        total, number = index_loss(own_q, own_k, w, q, k, chosen, tensors, *call.arguments)
        return total / number.clamp(min=1)

    def cache(self, *, capacity: int | None = None) -> KVCache:
        """Make an empty cache of index keys, for decoding with `forward`; one for each layer.

        It is a `KVCache` whose keys are index keys; its values, of width 1, are not used. All batch entries must be at
        one position.

        capacity: most tokens, as in `KVCache`.

        >>> indexer = fd.selection.recipes.LightningIndexer(32, top=64, num_heads=4, head_dim=16, rope_dim=8)
        >>> cache = indexer.cache()
        >>> indexer(torch.randn(1, 100, 32), cache=cache).shape, indexer(torch.randn(1, 1, 32), cache=cache).shape
        (torch.Size([1, 1, 100, 64]), torch.Size([1, 1, 1, 64]))
        """
        return KVCache(causal(), num_heads=1, capacity=capacity)

    def _index_tensors(
        self, x: Tensor, queries: Tensor | None, rotary: Rotary | None, q_offset: int
    ) -> tuple[Float[Tensor, "B h N d"], Float[Tensor, "B N d"], Float[Tensor, "B N h"]]:
        """Return (index queries, index keys, weights of the index heads times the scale of the score) of the tokens."""
        queries, size = x if queries is None else queries, self.wk.in_features
        if x.dim() != 3 or x.shape[2] != size:
            raise ValueError(f"x must have shape (batch, tokens, {size}); got {tuple(x.shape)}")
        expected = (*x.shape[:2], self.wq_b.in_features)
        if tuple(queries.shape) != expected:
            raise ValueError(f"queries must have shape {expected}, one for each token of x; got {tuple(queries.shape)}")
        q = self.wq_b(queries).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.wk(x))
        w = self.weights_proj(x) * (self.num_heads * self.head_dim) ** -0.5
        if self.rope_dim:
            cos, sin = self._cosines_and_sines(x, rotary, q_offset)
            q, k = self._rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), self._rotate(k, cos, sin)
        return q, k, w

    def _cosines_and_sines(self, x: Tensor, rotary: Rotary | None, q_offset: int) -> tuple[Tensor, Tensor]:
        """Return (cosines, sines) of the angles of each token's pairs of channels, each (B or 1, N, rope_dim / 2)."""
        if rotary is None:
            positions = torch.arange(q_offset, q_offset + x.shape[1], device=x.device)
            angles = angles_at(positions, self.rope_dim, self.base).unsqueeze(0)
            return angles.cos(), angles.sin()
        for each in rotary:
            if each.dim() != 3 or each.shape[0] not in (1, len(x)) or each.shape[1:] != (x.shape[1], self.rope_dim):
                raise ValueError(
                    f"rotary must be (cosines, sines), each of shape ({len(x)} or 1, {x.shape[1]}, {self.rope_dim}); "
                    f"got {tuple(each.shape)}"
                )
        cos, sin = (each.detach()[..., : self.rope_dim // 2] for each in rotary)
        return cos, sin

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x.split([self.rope_dim, self.head_dim - self.rope_dim], -1)
        return torch.cat([rotate(turned, cos, sin), rest], -1)

    def extra_repr(self) -> str:
        sizes = f"{self.wk.in_features}, top={self.top}, query_dim={self.wq_b.in_features}, num_heads={self.num_heads}"
        return f"{sizes}, head_dim={self.head_dim}, rope_dim={self.rope_dim}, base={self.base}"


def _check_table(chosen: object, batch: int, queries: int) -> None:
    """Raise TypeError or ValueError unless `chosen` is a table of keys, one for all heads; its numbers are not read."""
    if not isinstance(chosen, Tensor) or chosen.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"chosen must be a tensor of int32 or int64, from the indexer; got {chosen!r:.80}")
    if chosen.dim() != 4 or chosen.shape[:3] != (batch, 1, queries):
        raise ValueError(f"chosen must have shape ({batch}, 1, {queries}, keys); got {tuple(chosen.shape)}")
