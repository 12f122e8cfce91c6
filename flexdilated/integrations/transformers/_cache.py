"""A cache of transformers that keeps only the keys that later queries can see, and whose steps cost what these cost."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...decoding import KVCache
from ...masks import Mixture, Pattern
from ...masks.patterns import names

# B batch entries, H query heads, G key/value heads, N new tokens, M tokens held, D head dim

_LAYER = "_flexdilated_layer"  # of the keys that a layer hands to attention
_UNDO = 64


class FlexdilatedCache(Cache):
    """Keys and values of a model's layers, each in a `KVCache` of its layer's rule.

    For models whose attention is this library's: `generate(past_key_values=FlexdilatedCache())`. Keys that no later
    query can see are evicted, so that a pattern that looks back over a bounded number of tokens keeps memory bounded,
    however many are generated; a step computes the pairs of its own row.

    undo: tokens that `crop` can take back, as assisted generation and prompt lookup do with what they drafted.

    For inference, and for batches whose rows have no padding: all rows stand at one position. Raises ValueError where a
    layer's rule lets a query see later keys, for padding, and where attention is another library's.

    >>> model.generate(tokens, past_key_values=FlexdilatedCache(), max_new_tokens=100_000)  # doctest: +SKIP
    """

    def __init__(self, *, undo: int = _UNDO) -> None:
        super().__init__(layer_class_to_replicate=lambda: _Layer(undo))  # type: ignore[arg-type]


class _Layer(CacheLayerMixin):
    """One layer's keys: the new ones come by `update`, and are held once attention has been computed with them."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, undo: int) -> None:
        super().__init__()
        self.undo = undo
        self.cache: KVCache | None = None
        self.rule: Pattern | Mixture | None = None
        self.came: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is known of the rule before attention is called."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values themselves, (B, G, N, D): attention finds this layer by them."""
        if self.came is not None:
            raise ValueError(
                "a FlexdilatedCache goes with flexdilated's attention, which has not been called since the last tokens "
                "came: call flexdilated.integrations.transformers.set_pattern(model)"
            )
        self.lazy_initialization(key_states, value_states)
        self.came = key_states = key_states.view_as(key_states)  # an object of its own
        setattr(key_states, _LAYER, self)
        return key_states, value_states

    def attend(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G N D"],
        v: Float[Tensor, "B G N D"],
        rule: Pattern | Mixture,
        scale: float | None,
        sinks: Float[Tensor, " H"] | None,
    ) -> Float[Tensor, "B H N D"]:
        """Attention of the new tokens over all that they see."""
        if self.cache is None or rule != self.rule:
            if names(rule):
                raise ValueError(
                    "a FlexdilatedCache takes rows without padding, which all stand at one position: generate from "
                    "rows of one length, or leave the cache to transformers"
                )
            if self.get_seq_length():
                raise ValueError(f"the layer's rule changed from {self.rule!r} to {rule!r} while its cache holds keys")
            self.cache, self.rule = KVCache(rule, num_heads=q.shape[1], scale=scale, undo=self.undo), rule
        self.came = None
        return self.cache.attend(q, k, v, sinks=sinks)

    @property
    def keys(self) -> Tensor | None:
        """The keys that are held, (B, G, M, D)."""
        return None if self.cache is None else self.cache.held()[1]

    @keys.setter
    def keys(self, value: None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The class below sets none."""

    @property
    def values(self) -> Tensor | None:
        """The values that are held, (B, G, M, D)."""
        return None if self.cache is None else self.cache.held()[2]

    @values.setter
    def values(self, value: None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The class below sets none."""

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return 0 if self.cache is None else self.cache.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(the new tokens, the position of the first): attention gets no others."""
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def activate_past_recording(self) -> None:
        """`undo` tokens are kept at any time."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative; got {tokens_to_remove}")
        if self.cache is not None:
            self.cache.crop(self.cache.num_tokens + tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        self.came = None
        if self.cache is not None:
            self.cache.reset()

    def reorder_cache(self, beam_idx: Int64[Tensor, " B"]) -> None:
        """Go on with these batch entries."""
        if self.cache is not None:
            self.cache.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these batch entries."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Go on with so many copies of each batch entry."""
        if self.cache is not None and self.keys is not None:
            self.cache.select(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Keys stay where they are."""
        raise ValueError("a FlexdilatedCache is not offloaded: it holds the keys that are needed alone")


def layer_of(keys: Tensor) -> _Layer | None:
    """The layer of a `FlexdilatedCache` that handed over these keys, if one did."""
    return getattr(keys, _LAYER, None)


def hand_to(keys: Tensor, layer: _Layer) -> None:
    """Let these keys stand for those that the layer handed over."""
    setattr(keys, _LAYER, layer)
