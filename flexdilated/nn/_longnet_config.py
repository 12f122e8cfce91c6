"""LongNetConfig: the sizes and choices of a LongNet model, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._engines import check_engine
from ..masks import Mixture, Pattern
from ..masks.core import require_bool, require_choice, require_finite, require_int
from ._dilated_attention import dilated_pattern

LAYOUTS = ("auto", "natural", "residue")


@dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """Sizes and choices of a LongNet; plain data, so `dataclasses.asdict` and `LongNetConfig(**data)` invert.

    vocab_size: tokens in, logits out; None for embedded input, with features out.
    segment_lengths, dilation_rates, offsets, heads: the branches, as in `masks.longnet`.
    ffn_dim: hidden width of the feed-forward; None means 4 * embed_dim.
    num_kv_heads: key/value heads, shared by num_heads / num_kv_heads query heads each; None means num_heads.
    rotary_base: base of the rotary wavelengths; raise it with the context.
    tie_embeddings: the output projection is the transposed token embedding.
    layout: order of the tokens between the model's input and output, invisible in its results. "natural": as
    given; "residue": one permutation at the input and its inverse at the output, under which dilated
    branches are dense; "auto": whichever the planner finds cheaper on the device, at the length of the
    longest segment.
    checkpoint: keep only the blocks' inputs in training and run each block again in the backward.
    engine: as in `attend`.

    Raises ValueError or TypeError for sizes and choices that do not fit together.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4)
    ... )
    """

    vocab_size: int | None
    embed_dim: int
    depth: int
    num_heads: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = True
    offsets: str = "interleaved"
    heads: str = "all"
    ffn_dim: int | None = None
    num_kv_heads: int | None = None
    rotary_base: float = 10000.0
    tie_embeddings: bool = False
    layout: str = "auto"
    checkpoint: bool = False
    engine: str | None = None

    def __post_init__(self) -> None:
        for name in ("embed_dim", "depth", "num_heads"):
            require_int(name, getattr(self, name), minimum=1)
        for name in ("vocab_size", "ffn_dim", "num_kv_heads"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum=1)
        for name in ("tie_embeddings", "checkpoint"):
            require_bool(name, getattr(self, name))
        require_choice("layout", self.layout, LAYOUTS)
        check_engine(self.engine)
        self._check_heads()
        if require_finite("rotary_base", self.rotary_base) <= 1.0:
            raise ValueError(f"rotary_base must be above 1; got rotary_base={self.rotary_base}")
        if self.tie_embeddings and self.vocab_size is None:
            raise ValueError("tie_embeddings needs a token embedding; got tie_embeddings=True, vocab_size=None")
        for name in ("segment_lengths", "dilation_rates"):
            if not isinstance(getattr(self, name), Sequence):
                raise TypeError(f"{name} must be a sequence of integers; got {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.pattern.check_heads(self.num_heads)

    def _check_heads(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads; got embed_dim={self.embed_dim} and "
                f"num_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                "the head dim, embed_dim / num_heads, must be even, as rotary positions turn pairs of "
                f"channels; got {self.embed_dim} / {self.num_heads} = {self.head_dim}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got num_heads={self.num_heads} and "
                f"num_kv_heads={self.num_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def hidden_dim(self) -> int:
        return 4 * self.embed_dim if self.ffn_dim is None else self.ffn_dim

    @property
    def pattern(self) -> Pattern | Mixture:
        """Who attends to whom, in every layer."""
        options = {"causal": self.causal, "offsets": self.offsets, "heads": self.heads}
        return dilated_pattern(self.segment_lengths, self.dilation_rates, **options)
