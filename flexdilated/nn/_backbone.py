"""The common part of LongNet models: embeddings, blocks of dilated attention, and the last norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import masks
from .._attend import autocast_dtype
from .._over_ranks import engine_text, over_ranks, pattern_text, ranks_text
from .._validate import require_dense, run_time_tensors
from ..decoding import KVCache
from ..masks import Layout, Mixture, Pattern
from ..masks.core import advises, renamed, require_int
from ..masks.patterns import carrying, on_host
from ..selection import SelectedAttention
from ._call_masks import without_padding
from ._longnet_block import Block, KeysValues, norm, rotary_factors
from ._longnet_config import LongNetConfig
from ._pretrained import Pretrained

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import Sharding
    from ..distributed.wire import CodecChoice, PoolChoice

# B batch, N tokens, M tokens of the memory, E embed dim


class Memory(NamedTuple):
    """Keys and values of a memory, the sequence to which cross-attention attends.

    blocks: (keys, values) for each block of the model, each (B, G, M, D).
    pattern: allows all queries to attend to the tokens of the memory that are not padding.
    """

    blocks: list[KeysValues]
    pattern: Pattern | Mixture


@advises()
class LongNetBackbone(Pretrained):
    """Stack of blocks with sparse attention: tokens (B, N), or embedded inputs (B, N, E), -> features (B, N, E).

    Each block attends by the configuration's branches or pattern, or, in layers of `config.selection`, chooses its
    keys. With branches, cost grows linearly with the number of tokens. Learned positions, xPos, the pattern or a
    `sharding` may limit the number of tokens. `config.layout` may permute the tokens inside the model.
    Source: LongNet, arXiv 2307.02486.

    mesh: the ranks that share every sequence. Each rank passes its tokens, possibly none, and gets their features; only
        attention communicates. Gradients of parameters are for this rank's tokens; sum them over the ranks. The
        state_dict is that of a model without a mesh.
    schedule, sharding, codec, error_bound, pool: as in `BlockSparseAttention`; but layers that choose their keys
        (config.selection) gather all keys for any schedule, and take no codec.
    memory_dim: width of the memory, a second sequence to which every block also attends; None for a model without one.
    scales: (factor of x in the residual sums, gain of the initial weights of the projections whose results are added to
        x); None for the values of a model that is not part of an encoder-decoder.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4)
    ... )
    >>> fd.LongNetBackbone(config)(torch.randint(256, (1, 300))).shape
    torch.Size([1, 300, 64])
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
        memory_dim: int | None = None,
        scales: tuple[float, float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, LongNetConfig):
            made = ": write fd.LongNetConfig(**config)" if isinstance(config, dict) else ""
            raise TypeError(f"config must be a LongNetConfig; got {type(config).__name__}{made}")
        self.config, self.pattern = config, config.attention_pattern
        sent = {"codec": codec, "error_bound": error_bound, "pool": pool}
        self.over_ranks = over_ranks(mesh, schedule=schedule, sharding=sharding, **sent)
        self._check_mesh()
        self.residue_rate = masks.layout(self.pattern, config.planned_tokens).rate
        # False if costs differ by run-time tensors, or if the pattern limits the number of tokens.
        self.has_one_cost = not any(
            leaf.is_run_time or type(leaf).check_tokens is not Pattern.check_tokens for leaf in self.pattern.leaves()
        )
        factory = {"device": device, "dtype": dtype}
        self.memory_dim = None if memory_dim is None else require_int("memory_dim", memory_dim, minimum=1)
        E, deepest = config.embed_dim, max(1, config.depth - 1)
        self.embedding = None if config.vocab_size is None else nn.Embedding(config.vocab_size, E, **factory)
        self.positions = None if config.max_positions is None else nn.Embedding(config.max_positions, E, **factory)
        self.blocks = nn.ModuleList(
            Block(
                config,
                self.over_ranks,
                selected=self._selection(index),
                memory_dim=memory_dim,
                scales=scales,
                drop_path=config.drop_path * index / deepest,
                **factory,
            )
            for index in range(config.depth)
        )
        self.norm = nn.Identity() if config.deepnorm else norm(config, **factory)
        self.reset_parameters()

    def made_of(self) -> dict[str, Any]:
        """Return the constructor arguments that `save_pretrained` stores, by name."""
        return {"config": self.config}

    def reset_parameters(self) -> None:
        """Initialize embeddings with variance 1, or 1 / E if they are tied.

        Learned positions have standard deviation 0.02. The blocks initialize their own parameters.
        """
        E = self.config.embed_dim
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=E**-0.5 if self.config.tie_embeddings else 1.0)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)

    @advises(
        keywords={
            **renamed(tokens="input_ids inputs x input_embeds inputs_embeds", caches="past_key_values cache"),
            **dict.fromkeys(("attention_mask", "mask"), "write key_padding_mask=attention_mask == 0"),
            "labels": "write F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())",
            "use_cache": "write caches=model.new_caches(), and the same ones at the next call",
        },
        how="write model(tokens)",
    )
    def forward(
        self,
        tokens: Int64[Tensor, "B N"] | Float[Tensor, "B N E"],
        *,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        caches: Sequence[KVCache] | None = None,
        memory: Float[Tensor, "B M E_memory"] | None = None,
        memory_padding_mask: Bool[Tensor, "B M"] | None = None,
        bindings: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, "B N out"]:
        """Return features (B, N, E) of tokens in [0, vocab_size), or of embedded inputs with vocab_size=None.

        A `LongNet` returns logits (B, N, vocab_size) of the next tokens, or features if it has no vocabulary.

        key_padding_mask: True for tokens to which no token may attend; pad on the right, because positions count from
            the first token; with a mesh it is the mask of the whole sequence.
        caches: from `new_caches`; `tokens`, without padding, then continue the sequences of earlier calls with these
            caches, each from its own position; None for no earlier tokens.
        memory: the sequence to which every token also attends, in a model with memory_dim; None in a model without.
        memory_padding_mask: True for tokens of the memory to which no token may attend; for both masks, None means no
            padding.
        bindings: values of the run-time tensors that the pattern of the configuration names, for the whole sequence, as
            in `attend`.

        Raises ValueError or TypeError for inputs of other shapes, on another device, or, without autocast, of another
        dtype than the model's, and for a token outside the vocabulary; on an accelerator, and in a compiled graph, such
        a token causes the device's own error.
        """
        if caches is not None and key_padding_mask is not None:
            raise ValueError("a call with caches takes no key_padding_mask: give tokens without padding")
        x = self.features(tokens, caches, key_padding_mask, self.project_memory(memory, memory_padding_mask), bindings)
        return self._outputs(x)

    def _outputs(self, x: Float[Tensor, "... E"]) -> Tensor:
        """Return the result of `forward`, given the features x: x itself, unless a subclass overrides this method."""
        return x

    def new_caches(self, *, capacity: int | None = None) -> list[KVCache]:
        """Make empty caches, one per block, with which a model can process a batch in consecutive pieces.

        If the model is not causal, each piece must be whole chunks of its pattern, such as segments of the longest
        length: see `KVCache.chunk`.

        capacity: maximum number of keys in each cache, as in `KVCache`; None to grow as needed.

        Raises ValueError for a model over ranks, and as `KVCache` and `SelectedAttention.cache` do.
        """
        self._check_one_rank("new_caches")
        heads, engine = self.config.num_heads, self.config.engine
        selected = [self._block(index).selected for index in range(len(self.blocks))]
        return [
            KVCache(self.pattern, num_heads=heads, capacity=capacity, engine=engine)
            if own is None
            else own.cache(num_heads=heads, capacity=capacity)
            for own in selected
        ]

    def project_memory(self, memory: Tensor | None, padding: Tensor | None = None) -> Memory | None:
        """Return keys and values of a memory (B, M, E_memory) for every block, as `features` takes them.

        In a model without memory_dim, `memory` must be None, and the result is None.

        padding: (B, M), True for tokens of the memory to hide; None to hide none.

        Raises ValueError for a memory of another shape, for one without memory_dim, and for None with memory_dim.
        """
        if (memory is None) != (self.memory_dim is None):
            raise ValueError(
                "a model with memory_dim needs a memory, and a model without memory_dim takes none; got "
                f"memory_dim={self.memory_dim} and {'no' if memory is None else 'a'} memory"
            )
        if memory is None:
            return None
        if not isinstance(memory, Tensor) or memory.dim() != 3 or memory.shape[-1] != self.memory_dim:
            came = tuple(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
            raise ValueError(f"memory must have shape (batch, tokens, {self.memory_dim}); got {came}")
        pattern = without_padding(masks.every(), padding, tuple(memory.shape[:2]))
        return Memory([self._block(index).keys_values(memory) for index in range(len(self.blocks))], on_host(pattern))

    def features(
        self,
        tokens: Tensor,
        caches: Sequence[KVCache] | None = None,
        padding: Tensor | None = None,
        memory: Memory | None = None,
        bindings: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, "B N E"]:
        """Return features (B, N, E) after the last norm, in the order of `tokens`.

        padding: `forward`'s key_padding_mask.
        memory: from `project_memory`.

        Other arguments as in `forward`.
        """
        self._check_input(tokens)
        seen = self._check_caches(caches, tokens.shape[0])
        num_tokens = tokens.shape[1]
        layout = None if caches else self._layout(num_tokens, tokens.device)
        first = max(seen, default=0)
        if self.over_ranks is not None:
            num_tokens = self.over_ranks.sharding_of(num_tokens).num_tokens
            positions, x = self.over_ranks.positions(tokens.shape[1], tokens.device), tokens
        elif layout is None:
            starts = first if len(set(seen)) < 2 else torch.tensor(seen, device=tokens.device)[:, None]
            positions, x = starts + torch.arange(num_tokens, device=tokens.device), tokens
        else:
            positions, x = layout.positions(tokens.device), layout.apply(tokens, dim=1)
        self.config.check_num_tokens(first + num_tokens)
        x = self._embed(x, positions)
        rule = self.pattern
        if bindings is not None:
            run_time_tensors(rule, bindings, has_values=False)  # only checks the names
            rule = carrying(rule, bindings)
        pattern = on_host(without_padding(rule, padding, (tokens.shape[0], num_tokens)))
        visible = None
        if padding is not None and self._selects:
            visible = on_host(without_padding(masks.every(), padding, (tokens.shape[0], num_tokens)))
        rotary = rotary_factors(self.config, positions, x.dtype)
        recompute = caches is None and self.config.checkpoint and torch.is_grad_enabled()
        config = self.config
        draws = self.training and bool(config.dropout or config.attention_dropout or config.drop_path)
        for index, block in enumerate(self.blocks):
            read = (None, None) if memory is None else (memory.blocks[index], memory.pattern)
            given = (x, rotary, pattern, layout, None if caches is None else caches[index], *read, visible)
            x = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=draws) if recompute else block(*given)
        x = self.norm(x)
        return x if layout is None else layout.invert(x, dim=1)

    @property
    def _selects(self) -> bool:
        """True if any block chooses its keys from the data: its attribute `selected` is not None."""
        return any(self._block(index).selected is not None for index in range(len(self.blocks)))

    def _selection(self, index: int) -> SelectedAttention | None:
        if self.config.selection is None or not self.config.selects(index):
            return None
        options = {"causal": self.config.causal, "engine": self.config.engine, "over_ranks": self.over_ranks}
        return self.config.selection.attention(**options)

    def _block(self, index: int) -> Block:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def _embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the input (B, N, E) of the first block: embedded token ids, or embedded inputs as they came.

        Learned positions are added if the model has them, then dropout is applied.

        positions: (N,), or (B, N) if they differ between sequences.

        Raises as `forward` for a token outside the vocabulary.
        """
        if self.embedding is not None:
            try:
                x = self.embedding(x)
            except IndexError as error:
                raise ValueError(
                    f"tokens must be at least 0 and below vocab_size={self.embedding.num_embeddings} (padding tokens "
                    f"too); got values from {int(x.min())} to {int(x.max())}"
                ) from error
        if self.positions is not None:
            x = x + self.positions(positions)
        return F.dropout(x, self.config.dropout, self.training)

    def _layout(self, num_tokens: int, device: torch.device) -> Layout | None:
        """Return the permutation of the num_tokens tokens of a call without caches; None keeps the natural order."""
        if self.config.layout == "natural" or self.over_ranks is not None or self._selects:
            return None
        if self.config.layout == "residue":
            return masks.Layout(num_tokens, self.residue_rate)
        if not self.has_one_cost:
            return None
        # Decided for one length, not for num_tokens: one layout for all lengths avoids recompilation.
        planned = self.config.planned_tokens
        best = masks.recommended_layout(self.pattern, planned, num_heads=self.config.num_heads, device=device)
        return None if best is None else masks.Layout(num_tokens, best.rate)

    def _check_mesh(self) -> None:
        if self.over_ranks is None:
            return
        if self.config.selection is not None and self.over_ranks.codec is not None:
            raise ValueError(
                "codec must be None with a selection, as rounding keys would change which ones are selected; got "
                f"codec={self.over_ranks.codec!r}"
            )
        if self.config.layout == "residue":
            raise ValueError(
                "layout must be 'auto' or 'natural' with a mesh, as tokens keep their order; got 'residue'"
            )
        if self.config.drop_path:
            raise ValueError(
                "drop_path must be 0 with a mesh, as each rank would skip different sequences; got "
                f"drop_path={self.config.drop_path}"
            )

    def _check_input(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            made = ": for a batch of 1 write torch.tensor([tokens])" if isinstance(tokens, list) else ""
            raise TypeError(f"the input must be a tensor; got {type(tokens).__name__}{made}")
        require_dense("the input", tokens)
        weight = self._block(0).qkv.weight
        device, shape, E = weight.device, tuple(tokens.shape), self.config.embed_dim
        if tokens.device != device:
            raise ValueError(f"the input must be on the model's device {device}; got {tokens.device}")
        if self.embedding is not None:
            fits, rule = tokens.dim() == 2, "(batch, tokens)"
        else:
            fits, rule = tokens.dim() == 3 and shape[-1] == E, f"(batch, tokens, {E})"
        if not fits:
            advice = ": tokens[None] adds a batch dim" if tokens.dim() == len(rule.split(",")) - 1 else ""
            if self.embedding is not None and tokens.dim() == 3:
                advice = ": for embedded inputs make the model with vocab_size=None"
            raise ValueError(f"the input must have shape {rule}; got {shape}{advice}")
        if self.embedding is not None:
            if tokens.dtype != torch.int64:
                raise TypeError(f"tokens must be int64; got {tokens.dtype}: write tokens.long()")
        elif tokens.dtype != weight.dtype and autocast_dtype(device) is None:
            raise TypeError(f"the input must have the model's dtype {weight.dtype}; got {tokens.dtype}")

    def _check_one_rank(self, what: str) -> None:
        if self.over_ranks is not None:
            raise ValueError(
                f"{what} needs a model that was made without a mesh: load the state_dict into LongNet(config); got a "
                f"model with {self.over_ranks}"
            )

    def _check_caches(self, caches: Sequence[KVCache] | None, batch: int) -> list[int]:
        """Return the number of earlier tokens of each sequence; [] without caches, and for unused caches.

        Raises ValueError or TypeError for caches that do not fit the model, each other or the batch.
        """
        if caches is None:
            return []
        self._check_one_rank("a call with caches")
        if not isinstance(caches, Sequence) or not all(isinstance(cache, KVCache) for cache in caches):
            raise TypeError(f"caches must be a sequence of KVCache, as new_caches makes them; got {caches!r:.80}")
        seen = [cache._tokens_seen() for cache in caches]
        if len(seen) != len(self.blocks) or any(each != seen[0] for each in seen):
            numbers = [each[0] if len(set(each)) == 1 else each or 0 for each in seen]
            raise ValueError(
                f"caches must hold one cache for each of the {len(self.blocks)} blocks, with equal numbers of tokens; "
                f"got {len(seen)} with {numbers} tokens"
            )
        if seen[0] and len(seen[0]) != batch:
            raise ValueError(f"the input must have the batch of the caches, {len(seen[0])}; got batch {batch}")
        return seen[0]

    def extra_repr(self) -> str:
        way = f"{engine_text(self.config.engine)}{ranks_text(self.over_ranks)}"
        return f"{pattern_text(self.pattern)}, layout={self.config.layout!r}, {way}"
