"""LongNetConfig: the sizes and options of a LongNet model, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from .. import masks
from .._engine_choice import check_engine
from .._over_ranks import OverRanks
from ..masks import Mixture, Pattern
from ..masks.core import (
    HEADS,
    LENGTH,
    WIDTH,
    advises,
    renamed,
    require_bool,
    require_choice,
    require_expression,
    require_finite,
    require_int,
    require_probability,
)
from ..masks.patterns import OF_BRANCHES
from ..selection import BlockSelector, SelectedAttention, TopK
from ._attention import pattern_from_arguments


@advises()
@dataclass(frozen=True, kw_only=True)
class SelectedLayers:
    """Settings of the layers of a LongNet that attend to the key blocks with the best scores, not by the branches.

    block, scorer, share, query_block: as in `BlockSelector`, but scorer must be a name. The selector's `within` is
        causal order in a causal model; a query block then chooses by its first query.
    most: number of blocks that each query block chooses, as in `TopK`.
    always: pattern of pairs that are attended to without being chosen, unless `within` forbids them, in the text form
        of `masks.parse`; None: the keys in the block of the query.
    gradient: "none" or "bias", as in `SelectedAttention`.
    layers: numbers of the layers, from 0; None for all layers.

    Raises ValueError or TypeError for invalid values.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4),
    ...     selection=fd.SelectedLayers(block=32, most=4, layers=(1,)),
    ... )
    >>> fd.LongNet(config).blocks[1].selected.gradient
    'none'
    """

    block: int
    most: int
    scorer: str = "mean"
    share: str = "head"
    query_block: int = 1
    always: str | None = None
    gradient: str = "none"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            if not isinstance(self.layers, Sequence):
                raise TypeError(f"layers must be a sequence of integers, or None for all; got {self.layers!r}")
            object.__setattr__(self, "layers", tuple(require_int("layers", each, minimum=0) for each in self.layers))
        if not isinstance(self.scorer, str):
            raise TypeError(
                "scorer must be the name of one, as a configuration is plain data: for a module, assign "
                f"model.blocks[i].selected = fd.SelectedAttention(selector); got {type(self.scorer).__name__}"
            )
        self.attention(causal=True)

    def attention(
        self, *, causal: bool, engine: str | None = None, over_ranks: OverRanks | None = None
    ) -> SelectedAttention:
        """Make the attention module of one of these layers.

        causal: True if the model is causal.
        engine: as in `attend`.
        over_ranks: the model's mesh and sharding; None for one device.
        """
        always = masks.chunked(self.block) if self.always is None else masks.parse(self.always)
        if not isinstance(always, Pattern):
            raise TypeError(f"always must be the text of a pattern that is not a mixture; got {self.always!r}")
        selector = BlockSelector(
            block=self.block,
            query_block=self.query_block,
            scorer=self.scorer,
            choose=TopK(self.most),
            within=masks.causal() if causal else masks.every(),
            always=always,
            share=self.share,
            query_summary="first" if causal else "mean",
        )
        where = {} if over_ranks is None else {"mesh": over_ranks.mesh, "sharding": over_ranks.sharding}
        return SelectedAttention(selector, self.gradient, engine=engine, **where)


LAYOUTS = ("auto", "natural", "residue")
NORMS = ("layer", "rms")
POSITIONS = ("rotary", "xpos", "learned")
XPOS_SPAN = 126  # most tokens in units of xpos_scale: (2 / 7)^63, the smallest factor, is in float32's range


OTHER_NAMES = {
    **renamed(
        embed_dim=WIDTH,
        depth="num_layers n_layer n_layers num_hidden_layers layers",
        num_heads=HEADS,
        num_kv_heads="num_key_value_heads n_kv_heads kv_heads",
        vocab_size="num_tokens n_vocab vocab",
        ffn_dim="hidden_dim intermediate_size dim_feedforward mlp_dim ff_dim",
        causal="is_causal",
        norm="norm_type",
        tie_embeddings="tie_word_embeddings weight_tying",
        rotary_base="rope_theta",
        max_positions="max_position_embeddings",
    ),
    **dict.fromkeys(LENGTH.split(), "leave it out, as a model takes any number of tokens"),
    **OF_BRANCHES,
}
_HOW = (
    "write fd.LongNetConfig(vocab_size=256, embed_dim=512, depth=12, num_heads=8, segment_lengths=(2048, 4096), "
    "dilation_rates=(1, 2))"
)
_PLANNED_TOKENS = 8192


@advises(keywords=OTHER_NAMES, how=_HOW)
@dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """Sizes and options of a LongNet as plain data: `LongNetConfig(**data)` inverts `dataclasses.asdict`.

    vocab_size: number of token ids, for token ids in and logits out; None for embedded inputs in and features out.
    embed_dim, num_heads: width of the model, number of query heads of each block; num_heads divides embed_dim.
    depth: number of blocks.
    causal: True intersects the branches or the pattern with `masks.causal()`, so that no token attends to later ones;
        False for an encoder.
    segment_lengths, dilation_rates, offsets, heads: the branches, as in `masks.longnet`.
    pattern: a pattern or mixture that replaces the branches, or its text: an expression for `masks.parse`, or JSON from
        `masks.to_json`. The field stores JSON, so custom functions are not possible, and run-time tensors must be given
        by name, with values passed to the model as `bindings`.
    ffn_dim: hidden width of the feed-forward; None means 4 * embed_dim.
    num_kv_heads: key/value heads, shared by num_heads / num_kv_heads query heads each; None means num_heads.
    position: "rotary" (RoFormer, arXiv 2104.09864); "xpos": rotary with scores that decay with distance (arXiv
        2212.10554), in a causal model of up to 126 * xpos_scale tokens; "learned": a vector for each of max_positions
        positions is added to the embeddings; None: no positions, as for inputs that include them.
    rotary_base: base of the rotary wavelengths; raise it for longer contexts.
    xpos_scale: distance in tokens over which each channel pair of xpos decays by its factor, 2/7 or more; 512 in the
        paper.
    bias: True gives biases to the projections in the blocks, and to the norms if norm="layer".
    norm: "layer" or "rms", before each half of a block (attention, feed-forward).
    subln: a further norm before the last projection of each half, and the gain of Magneto, arXiv 2210.06423.
    deepnorm: norms after the sums instead of before the halves, with DeepNet's scales, arXiv 2203.00555; no last norm.
    dropout: probability of zeroing an element of the embeddings and of each half's output, in training.
    attention_dropout: probability of zeroing an attention weight, in training; it must be 0 with a selection.
    drop_path: probability that a sequence skips a half of the last block, in training; it rises linearly from 0 in the
        first block (arXiv 1603.09382), so it has no effect with depth 1.
    tie_embeddings: True makes the output projection the transposed token embedding.
    layout: order of the tokens inside the model; its output is in the order of its input. "natural": unchanged;
        "residue": one permutation at the input and its inverse at the output, under which dilated branches are dense;
        "auto": the order with the lower predicted cost on the device, for a sequence of the longest segment length, or
        of 8,192 tokens with `pattern`; but the natural order for a pattern with run-time tensors or a limited number of
        tokens. With caches, a mesh or a selection the order is natural; "residue" with a mesh or a selection is an
        error.
    checkpoint: True keeps only the blocks' inputs for the backward, which runs each block again; without caches only.
    engine: as in `attend`.
    selection: layers that choose their keys from the data, not by the branches, as `SelectedLayers` or a mapping of its
        fields; over ranks these layers gather all keys.

    Raises ValueError or TypeError for sizes and options that do not fit together.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4)
    ... )
    """

    vocab_size: int | None
    embed_dim: int
    depth: int
    num_heads: int
    segment_lengths: tuple[int, ...] | None = None
    dilation_rates: tuple[int, ...] | None = None
    pattern: Pattern | Mixture | str | None = None
    causal: bool = True
    offsets: str = "interleaved"
    heads: str = "all"
    ffn_dim: int | None = None
    num_kv_heads: int | None = None
    position: str | None = "rotary"
    max_positions: int | None = None
    rotary_base: float = 10000.0
    xpos_scale: int = 512
    bias: bool = False
    norm: str = "layer"
    subln: bool = False
    deepnorm: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    tie_embeddings: bool = False
    layout: str = "auto"
    checkpoint: bool = False
    engine: str | None = None
    selection: SelectedLayers | None = None

    def __post_init__(self) -> None:
        for name in ("embed_dim", "depth", "num_heads", "xpos_scale"):
            require_int(name, getattr(self, name), minimum=1)
        for name in ("vocab_size", "ffn_dim", "num_kv_heads", "max_positions"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum=1)
        for name in ("tie_embeddings", "checkpoint", "bias", "subln", "deepnorm"):
            require_bool(name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "drop_path"):
            require_probability(name, getattr(self, name))
        require_choice("norm", self.norm, NORMS)
        self._check_positions()
        if self.subln and self.deepnorm:
            raise ValueError("subln and deepnorm place the norms of a block differently: choose one; got both")
        require_choice("layout", self.layout, LAYOUTS)
        check_engine(self.engine)
        self._check_heads()
        if require_finite("rotary_base", self.rotary_base) <= 1.0:
            raise ValueError(f"rotary_base must be above 1; got rotary_base={self.rotary_base}")
        if self.tie_embeddings and self.vocab_size is None:
            raise ValueError("tie_embeddings needs a token embedding; got tie_embeddings=True, vocab_size=None")
        for name in ("segment_lengths", "dilation_rates"):
            value = getattr(self, name)
            if not isinstance(value, Sequence | None):
                raise TypeError(f"{name} must be a sequence of integers, such as (2048,); got {value!r}")
            object.__setattr__(self, name, None if value is None else tuple(value))
        if self.pattern is not None:
            object.__setattr__(self, "pattern", _pattern_json(self.pattern))
        self.attention_pattern.check_heads(self.num_heads)
        self._read_selection()

    def _read_selection(self) -> None:
        """Replace a mapping in the field `selection` by `SelectedLayers`.

        Raises ValueError or TypeError for a selection that does not fit the other fields.
        """
        if isinstance(self.selection, Mapping):
            known = [each.name for each in fields(SelectedLayers)]
            if strangers := [name for name in self.selection if name not in known]:
                raise ValueError(f"selection has {', '.join(known)}; got {', '.join(map(str, strangers))}")
            object.__setattr__(self, "selection", SelectedLayers(**self.selection))
        if self.selection is None:
            return
        if not isinstance(self.selection, SelectedLayers):
            raise TypeError(f"selection must be SelectedLayers or None; got {self.selection!r:.80}")
        if self.attention_dropout:
            came = f"got attention_dropout={self.attention_dropout}"
            raise ValueError(f"attention_dropout must be 0 with a selection, whose layers drop no weights; {came}")
        if self.layout == "residue":
            raise ValueError(
                "layout must be 'auto' or 'natural' with a selection, as tokens keep their order; got 'residue'"
            )
        if any(layer >= self.depth for layer in self.selection.layers or ()):
            raise ValueError(f"layers of the selection must be below depth={self.depth}; got {self.selection.layers}")

    def selects(self, layer: int) -> bool:
        """True if the layer with this number, from 0, chooses its keys from the data."""
        return self.selection is not None and (self.selection.layers is None or layer in self.selection.layers)

    def _check_heads(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads; got embed_dim={self.embed_dim} and "
                f"num_heads={self.num_heads}"
            )
        if self.head_dim % 2 and self.position in ("rotary", "xpos"):
            raise ValueError(
                "the head dim, embed_dim / num_heads, must be even, as rotary positions rotate pairs of "
                f"channels; got {self.embed_dim} / {self.num_heads} = {self.head_dim}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got num_heads={self.num_heads} and "
                f"num_kv_heads={self.num_kv_heads}"
            )

    def _check_positions(self) -> None:
        if self.position is not None:
            require_choice("position", self.position, POSITIONS)
        if self.position == "xpos" and not self.causal:
            raise ValueError(
                "position='xpos' needs causal=True, as scores of later keys grow with distance; got causal=False"
            )
        if self.position == "learned" and self.max_positions is None:
            raise ValueError("position='learned' needs max_positions=, the number of learned positions; got None")
        if self.position != "learned" and self.max_positions is not None:
            raise ValueError(
                "max_positions is the number of learned positions: leave it out, or take position='learned'; got "
                f"position={self.position!r}, max_positions={self.max_positions}"
            )

    def check_num_tokens(self, num_tokens: int, of: str = "") -> None:
        """Raise ValueError if num_tokens exceeds the number of learned positions, or the most that xPos can represent.

        of: text to append to the number of tokens in the error.
        """
        if self.max_positions is not None and num_tokens > self.max_positions:
            raise ValueError(
                f"the model has {self.max_positions} learned positions: make it with more max_positions, or take "
                f"position='rotary'; got {num_tokens} tokens{of}"
            )
        if self.position == "xpos" and num_tokens > XPOS_SPAN * self.xpos_scale:
            raise ValueError(
                f"xPos reaches {XPOS_SPAN * self.xpos_scale} tokens with xpos_scale={self.xpos_scale}: raise it, or "
                f"take position='rotary'; got {num_tokens} tokens{of}"
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
    def attention_pattern(self) -> Pattern | Mixture:
        """`pattern` or the pattern of the branches, causal if `causal`; for all layers except those of `selection`."""
        pattern = None if self.pattern is None else _pattern_of(self.pattern)
        options = {"causal": self.causal, "offsets": self.offsets, "heads": self.heads}
        return pattern_from_arguments(pattern, self.segment_lengths, self.dilation_rates, **options, how=_HOW)

    @property
    def planned_tokens(self) -> int:
        """Number of tokens for which `layout` picks the order: the longest segment length, or 8,192 for a `pattern`."""
        return _PLANNED_TOKENS if self.segment_lengths is None else max(self.segment_lengths)


def _pattern_of(pattern: Pattern | Mixture | str) -> Pattern | Mixture:
    """Return a pattern unchanged, or read it from an expression or JSON.

    Raises ValueError for text of no pattern, and TypeError for other values.
    """
    if isinstance(pattern, str):
        return masks.from_json(pattern) if pattern.lstrip().startswith("{") else masks.parse(pattern)
    require_expression(pattern)
    return pattern


def _pattern_json(pattern: Pattern | Mixture | str) -> str:
    """Return a pattern, or its text, as JSON.

    Raises ValueError if it holds tensors, TypeError if it has custom functions, and as `_pattern_of`.
    """
    read = _pattern_of(pattern)
    if held := read.given_tensors():
        names = ", ".join(map(repr, held))
        raise ValueError(
            "the pattern of a configuration must only name its run-time tensors: write masks.documents('ids'), and "
            f"pass the model bindings={{'ids': ids}}; got a pattern that holds {names}"
        )
    return masks.to_json(read)
