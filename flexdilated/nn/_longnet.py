"""LongNet: a pre-norm transformer over long sequences, of tokens or of embedded inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import masks
from .._attend import autocast_dtype
from .._validate import require_dense
from ..decoding import KVCache
from ..masks import Layout, Mixture, Pattern
from ..masks.patterns import on_host
from ._call_masks import without_padding
from ._generate import Sampling, generate
from ._longnet_block import Block, rotary_table
from ._longnet_config import LongNetConfig
from ._over_ranks import engine_text, over_ranks, pattern_text, ranks_text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import Sharding
    from ..distributed.wire import CodecChoice, PoolChoice

# B batch, N tokens, E embed dim, V vocabulary


class LongNet(nn.Module):
    """Dilated attention in every block, rotary positions, one projection to logits.

    Each block sees the segments of all branches, so cost grows linearly with the number of tokens while paths
    between any two tokens of a segment stay logarithmic in it. Any number of tokens, 1 included. With
    `config.layout` other than "natural" the tokens are permuted once at the input and back once at the
    output, for the whole model. Source: LongNet, arXiv 2307.02486.

    mesh: the ranks over which every sequence lies. Each gives its tokens, maybe none, and gets their logits; everything
    but attention needs no other rank. The tokens then stay in their order, as with layout="natural". The parameters'
    gradients are of this rank's tokens: those of all ranks add up. schedule, sharding, codec, error_bound, pool: as
    in `BlockSparseAttention`. The state_dict is that of a model without a mesh.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4)
    ... )
    >>> fd.LongNet(config)(torch.randint(256, (1, 300))).shape
    torch.Size([1, 300, 256])
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        mesh: DeviceMesh | None = None,
        schedule: str = "auto",
        sharding: Sharding | None = None,
        codec: CodecChoice = None,
        error_bound: float | None = None,
        pool: PoolChoice = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, LongNetConfig):
            raise TypeError(f"config must be a LongNetConfig; got {type(config).__name__}")
        self.config, self.pattern = config, config.pattern
        self.over_ranks = over_ranks(
            mesh, schedule=schedule, sharding=sharding, codec=codec, error_bound=error_bound, pool=pool
        )
        if mesh is not None and config.layout == "residue":
            raise ValueError(
                "with a mesh the tokens stay in their order: layout must be 'auto' or 'natural'; got 'residue'"
            )
        self.residue_rate = masks.layout(self.pattern, max(config.segment_lengths)).rate
        factory = {"device": device, "dtype": dtype}
        self.embedding: nn.Embedding | None = None
        self.head: nn.Linear | None = None
        if config.vocab_size is not None:
            self.embedding = nn.Embedding(config.vocab_size, config.embed_dim, **factory)
            if not config.tie_embeddings:
                self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False, **factory)
        self.blocks = nn.ModuleList(Block(config, self.over_ranks, **factory) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.embed_dim, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Embeddings of variance 1, or 1 / E where they are the output projection too; logits near 0."""
        E = self.config.embed_dim
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=E**-0.5 if self.config.tie_embeddings else 1.0)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.1 * E**-0.5)

    def forward(
        self,
        tokens: Int64[Tensor, "B N"] | Float[Tensor, "B N E"],
        *,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        caches: Sequence[KVCache] | None = None,
    ) -> Float[Tensor, "B N V"] | Float[Tensor, "B N E"]:
        """Logits for tokens in [0, vocab_size); with vocab_size=None, features for embedded inputs.

        key_padding_mask: True for tokens to which no token may attend; pad on the right, as positions count from
        the first token; with a mesh it is the mask of the whole sequence. With `caches`, from `new_caches`, the
        tokens follow those that went through them before.
        Raises ValueError or TypeError for another shape, dtype or device; a token outside the vocabulary raises
        IndexError, or what the device makes of it, when it is embedded.
        """
        if caches is not None and key_padding_mask is not None:
            raise ValueError("caches know no padding: give the real tokens alone, without key_padding_mask")
        return self._logits(self._features(tokens, caches, key_padding_mask))

    def new_caches(self, *, capacity: int | None = None) -> list[KVCache]:
        """Empty caches, one a block, for the tokens of a batch to go through in order. For a causal model.

        capacity: as in `KVCache`.
        """
        self._check_one_rank("new_caches")
        heads, engine = self.config.num_heads, self.config.engine
        return [KVCache(self.pattern, num_heads=heads, capacity=capacity, engine=engine) for _ in self.blocks]

    @torch.no_grad()
    def generate(
        self,
        tokens: Int64[Tensor, "B N"],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        stop: int | None = None,
        prefill_chunk: int = 8192,
    ) -> Int64[Tensor, "B N_plus_new"]:
        """The tokens and what follows them, drawn one by one from the model's logits.

        temperature: the logits' divisor; 0 takes the most likely token. top_k, top_p: only the k most likely
        tokens, only the most likely ones that together reach probability p; both may be given, and the most likely
        token always stays. generator: the source of randomness, on the model's device; None is torch's own. stop: a
        token after which a sequence has nothing else; once all have drawn it the result ends. prefill_chunk: tokens of
        the prompt that go through the model at once, which bounds memory.

        Raises ValueError or TypeError for a model that is not causal or has no vocabulary, and for bad values.
        """
        if self.config.vocab_size is None or not self.config.causal:
            raise ValueError(
                "generate needs a causal model with a vocabulary; "
                f"got vocab_size={self.config.vocab_size}, causal={self.config.causal}"
            )
        self._check_one_rank("generate")
        self._check(tokens)
        if not tokens.shape[1]:
            raise ValueError(f"generate needs a token to begin with; got shape {tuple(tokens.shape)}")
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        caches = self.new_caches()

        def next_logits(following: Tensor) -> Tensor:
            return self._logits(self._features(following, caches)[:, -1])

        options = {"max_new_tokens": max_new_tokens, "prefill_chunk": prefill_chunk}
        return torch.cat([tokens, generate(next_logits, tokens, sampling, stop=stop, **options)], dim=1)

    def _features(
        self, tokens: Tensor, caches: Sequence[KVCache] | None, padding: Tensor | None = None
    ) -> Float[Tensor, "B N E"]:
        """What the last norm gives, in the order of the tokens."""
        self._check(tokens)
        self._check_caches(caches)
        num_tokens = tokens.shape[1]
        layout = None if caches else self._layout(num_tokens, tokens.device)
        if self.over_ranks is not None:
            num_tokens = self.over_ranks.sharding_of(num_tokens).num_tokens
            positions, x = self.over_ranks.positions(tokens.shape[1], tokens.device), tokens
        elif layout is None:
            first = caches[0].num_tokens if caches else 0
            positions, x = torch.arange(first, first + num_tokens, device=tokens.device), tokens
        else:
            positions, x = layout.positions(tokens.device), layout.apply(tokens, dim=1)
        if self.embedding is not None:
            x = self.embedding(x)
        pattern = on_host(without_padding(self.pattern, padding, (tokens.shape[0], num_tokens)))
        x = self.norm(self._run_blocks(x, positions, pattern, layout, caches))
        return x if layout is None else layout.invert(x, dim=1)

    def _run_blocks(
        self,
        x: Tensor,
        positions: Tensor,
        pattern: Pattern | Mixture,
        layout: Layout | None,
        caches: Sequence[KVCache] | None,
    ) -> Tensor:
        config = self.config
        rotary = rotary_table(positions, head_dim=config.head_dim, base=config.rotary_base, dtype=x.dtype)
        remember_inputs_only = config.checkpoint and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            if caches is not None:
                x = block(x, rotary, pattern, layout, caches[index])
            elif remember_inputs_only:
                # No block draws random numbers, so there is no generator state to restore.
                x = checkpoint(block, x, rotary, pattern, layout, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotary, pattern, layout)
        return x

    def _logits(self, x: Float[Tensor, "... E"]) -> Tensor:
        if self.head is not None:
            return self.head(x)
        return x if self.embedding is None else F.linear(x, self.embedding.weight)

    def _layout(self, num_tokens: int, device: torch.device) -> Layout | None:
        """The model's token order at this length; None for the natural one."""
        if self.config.layout == "natural" or self.over_ranks is not None:
            return None
        if self.config.layout == "residue":
            return masks.Layout(num_tokens, self.residue_rate)
        # Asked at the longest segment, not at num_tokens: one answer for every length compiles once.
        longest = max(self.config.segment_lengths)
        best = masks.recommended_layout(self.pattern, longest, num_heads=self.config.num_heads, device=device)
        return None if best is None else masks.Layout(num_tokens, best.rate)

    def _check(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"the input must be a tensor; got {type(tokens).__name__}")
        require_dense("the input", tokens)
        device, shape, E = self.norm.weight.device, tuple(tokens.shape), self.config.embed_dim
        if tokens.device != device:
            raise ValueError(f"the input must be on the model's device {device}; got {tokens.device}")
        if self.embedding is not None:
            fits, rule = tokens.dim() == 2, "(batch, tokens)"
        else:
            fits, rule = tokens.dim() == 3 and shape[-1] == E, f"(batch, tokens, {E})"
        if not fits:
            raise ValueError(f"the input must have shape {rule}; got {shape}")
        if self.embedding is not None:
            if tokens.dtype != torch.int64:
                raise TypeError(f"tokens must be int64; got {tokens.dtype}")
        elif tokens.dtype != self.norm.weight.dtype and autocast_dtype(device) is None:
            raise TypeError(f"the input must have the model's dtype {self.norm.weight.dtype}; got {tokens.dtype}")

    def _check_one_rank(self, what: str) -> None:
        if self.over_ranks is not None:
            raise ValueError(
                f"{what} needs a model on one rank: load the state_dict into a LongNet without a mesh; "
                f"this one has {self.over_ranks}"
            )

    def _check_caches(self, caches: Sequence[KVCache] | None) -> None:
        if caches is None:
            return
        self._check_one_rank("a call with caches")
        if not isinstance(caches, Sequence) or not all(isinstance(cache, KVCache) for cache in caches):
            raise TypeError(f"caches must be a sequence of KVCache, as new_caches makes them; got {caches!r:.80}")
        seen = [cache.num_tokens for cache in caches]
        if len(seen) != len(self.blocks) or len(set(seen)) > 1:
            raise ValueError(
                f"a model of {len(self.blocks)} blocks needs as many caches that have seen the same tokens; "
                f"got {len(seen)} that have seen {seen}"
            )

    def extra_repr(self) -> str:
        way = f"{engine_text(self.config.engine)}{ranks_text(self.over_ranks)}"
        return f"{pattern_text(self.pattern)}, layout={self.config.layout!r}, {way}"
