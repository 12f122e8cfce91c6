"""KV cache for transformers that evicts keys no later query can see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import finalize

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ..._attend import autocast
from ..._validate import check_sinks, check_tensors
from ...decoding import HeldKeys, Reader, refuse_gradients, stay_out_of_graphs
from ...engines import MOST_ROWS, ScoreMod, with_sinks
from ...masks import Mixture, Pattern, causal
from ...masks.attended import RowSource
from ...masks.core import require_int
from ...masks.patterns import names

# B batch entries, H query heads, G key/value heads, N new tokens, M tokens held, D head dim

_ORIGIN = "_flexdilated_given"  # attribute of the keys that a layer returns
_DEFAULT_UNDO = 64
_ALL_KEYS = [RowSource(causal(), 0, 1)]  # a rule by which no key is evicted


def _require_config(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a cache, wrapped so that it raises ValueError if the cache was made without a config."""

    @wraps(method)
    def checked(self: Cache, *args: Any, **kwargs: Any) -> Any:
        if self.layer_class_to_replicate is not None:
            raise ValueError(
                "a FlexdilatedCache learns from the model's config which layers hold the states of linear attention or "
                "convolutions in place of keys: FlexdilatedCache(model.config)"
            )
        return method(self, *args, **kwargs)

    return checked


class FlexdilatedCache(Cache):
    """KV cache of a model's attention layers that evicts keys no later query can see.

    Pass it to a model with this library's attention: `generate(past_key_values=FlexdilatedCache())`, from transformers
    5.24 on `generate(cache=FlexdilatedCache())`. A pattern with bounded lookback has bounded memory for any number of
    generated tokens; a decoding step computes only the pairs of the new token. In an encoder-decoder it caches
    self-attention: `EncoderDecoderCache(FlexdilatedCache(), DynamicCache())`.

    config: the model's config. Required for models with linear attention or convolutions, whose states are then cached
        as transformers does.
    undo: number of last tokens that `crop` can remove, for rejected drafts of assisted generation and prompt lookup.

    It is for inference. Calls of the model raise ValueError if a layer's rule lets a query see keys that are not
    appended yet, for padding and packed sequences, for attention of another library, and if the model computes keys
    from the cache's output, such as from latents; use a `DynamicCache` for these.

    >>> model.generate(tokens, past_key_values=FlexdilatedCache(), max_new_tokens=100_000)  # doctest: +SKIP
    """

    get_conv_state = _require_config(Cache.get_conv_state)
    update_conv_state = _require_config(Cache.update_conv_state)
    get_recurrent_state = _require_config(Cache.get_recurrent_state)
    update_recurrent_state = _require_config(Cache.update_recurrent_state)
    has_previous_state = _require_config(Cache.has_previous_state)

    def __init__(self, config: PreTrainedConfig | None = None, *, undo: int = _DEFAULT_UNDO) -> None:
        require_int("undo", undo, minimum=0)
        if config is None:
            super().__init__(layer_class_to_replicate=lambda: _Layer(undo))  # type: ignore[arg-type]
        else:
            super().__init__(layers=[_replacement_layer(layer, undo) for layer in DynamicCache(config=config).layers])

    def update_indexer(self, *_: Any, **__: Any) -> Tensor:
        """Raise ValueError: layers with an indexer (`DynamicIndexedLayer` of transformers) are not supported."""
        raise _unsupported_layer("DynamicIndexedLayer")


@dataclass(frozen=True, eq=False)
class KeyOrigin:
    """Origin of keys that `_Layer.update` of a `FlexdilatedCache` returned, stored as an attribute of the keys.

    layer: the cache layer.
    tokens: positions of the tokens that this update appended.
    update: number of the update in its layer, from 1.
    """

    layer: _Layer
    tokens: range
    update: int


def origin_of(keys: Tensor) -> KeyOrigin | None:
    """Return the origin of a tensor of keys if a `FlexdilatedCache` returned it, else None."""
    return getattr(keys, _ORIGIN, None)


def set_origin(keys: Tensor, given: KeyOrigin) -> None:
    """Store `given` on a tensor of keys, for `origin_of`."""
    setattr(keys, _ORIGIN, given)


class _Layer(CacheLayerMixin):
    """Cached keys and values of one model layer.

    `update` appends tokens; then any number of attention modules, each with its own rule, may read them by `attend`.

    undo: number of last tokens that `crop` can remove.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, undo: int) -> None:
        super().__init__()
        stay_out_of_graphs(_Layer, "update", "attend")
        self.undo, self.num_updates = undo, 0
        self._forget()

    def _forget(self) -> None:
        self.held: HeldKeys | None = None
        self.num_tokens = 0
        self.readers: dict[Any, Reader] = {}  # by rule; they read the keys of the last update
        self.previous_readers: dict[Any, Reader] = {}  # of the previous update's keys

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Mark as initialized. Buffers are allocated by `update`."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, N, D); return all keys and values that the cache then holds, (B, G, M, D).

        Raises ValueError if no attention of this library has read the keys of the previous update, for another batch
        size, heads, head dim, dtype or device than before, and where a gradient would be needed.
        """
        if self.held is not None and not self.readers:
            raise ValueError(
                "a FlexdilatedCache serves attention of flexdilated that reads keys as the cache returned them, and "
                "none has read those of the last tokens. Where the model computes keys from what a cache returns, as "
                "from latents, leave the cache to transformers, a DynamicCache; where attention is another library's, "
                "call flexdilated.integrations.transformers.set_pattern(model)"
            )
        _, k, v = autocast(key_states, key_states, value_states)
        refuse_gradients(k, v)
        if self.held is None:
            self.held = HeldKeys(k, v, _ALL_KEYS, undo=self.undo)
        else:
            self.held.check_continues(k, v)
            self.held.sources = _sources(self.readers)
        self.lazy_initialization(k, v)
        self.previous_readers, self.readers = self.readers, {}
        self.held.append(k, v, self.num_tokens)
        given = KeyOrigin(self, range(self.num_tokens, self.num_tokens + k.shape[2]), self.num_updates + 1)
        self.num_tokens, self.num_updates = given.tokens.stop, given.update
        keys, values = self._views(self.held)
        set_origin(keys, given)
        if k.shape[2] > MOST_ROWS:
            # After the last reference to the keys is gone, all rules that read them are known.
            finalize(given, _Layer._shrink, self, given.update).atexit = False
        return keys, values

    def _shrink(self, update: int) -> None:
        if update == self.num_updates and self.held is not None and self.readers:
            self.held.sources = _sources(self.previous_readers | self.readers)
            self.held.shrink(self.num_tokens)

    def attend(
        self,
        given: KeyOrigin,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M E"],
        rule: Pattern | Mixture,
        *,
        scale: float | None,
        score_mod: ScoreMod | None,
        sinks: Float[Tensor, " H"] | None,
        module: nn.Module,
        q_offset: int,
    ) -> Float[Tensor, "B H N D"]:
        """Return the attention output of the new tokens over the cached keys that `rule` allows.

        given: origin of k, as `origin_of(k)` returns it; the new tokens are those in `given.tokens`.
        k, v: as `update` returned them.
        module: the model's attention module, which must be causal.
        scale, score_mod, sinks: as in `flexdilated.attend`.
        q_offset: position of the first query.

        Raises ValueError unless the queries are the tokens of the last update and the module is causal, for a rule with
        run-time tensors or one that allows evicted keys or keys not appended yet, and where a gradient would be needed.
        """
        _require_own_queries(given, module, range(q_offset, q_offset + q.shape[2]))
        q, k, v = autocast(q, k, v)
        check_tensors(q, k, v, enable_gqa=True)
        check_sinks(sinks, q)
        refuse_gradients(q, k, v, sinks)
        assert self.held is not None
        reader = self._reader(rule, q.shape[1], scale, given.tokens)
        reader.check_end(given.tokens.start, q.shape[2])
        out, lse = reader.attend(q, k, v, first=given.tokens.start, held=self.held, score_mod=score_mod)
        if sinks is not None:
            out, _ = with_sinks(out, lse, sinks)
        return out.to(q.dtype)

    def _reader(self, rule: Pattern | Mixture, num_heads: int, scale: float | None, tokens: range) -> Reader:
        """Return the `Reader` that attends by `rule` from queries at positions `tokens`.

        A reader of this or the previous update is reused if its rule, number of heads and scale are equal.

        Raises ValueError for a rule that has run-time tensors, sees evicted keys, or rejects these positions.
        """
        key = rule, num_heads, scale
        reader = self.readers.get(key) or self.previous_readers.get(key)
        if reader is None:
            if names(rule):
                raise ValueError(
                    "a FlexdilatedCache takes batches in which one rule holds for all rows; here it depends on "
                    f"{', '.join(map(repr, names(rule)))}. Generate from rows of one length, without padding, or "
                    "leave the cache to transformers"
                )
            reader = Reader(rule, num_heads=num_heads, scale=scale)
            assert self.held is not None
            if self.held.lacks(tokens.start, reader.sources):
                raise ValueError(
                    f"the layer's keys were evicted by the rules that read them so far, and {rule!r} sees more of "
                    "them: begin with a new FlexdilatedCache"
                )
        reader.check_tokens(tokens)
        self.readers[key] = reader
        return reader

    @staticmethod
    def _views(held: HeldKeys) -> tuple[Tensor, Tensor]:
        return held.keys[:, :, : held.num_used], held.values[:, :, : held.num_used]

    @property
    def keys(self) -> Tensor | None:
        """Held keys (B, G, M, D); None before the first update."""
        return None if self.held is None else self._views(self.held)[0]

    @keys.setter
    def keys(self, value: None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Do nothing: CacheLayerMixin assigns None."""

    @property
    def values(self) -> Tensor | None:
        """Held values (B, G, M, D); None before the first update."""
        return None if self.held is None else self._views(self.held)[1]

    @values.setter
    def values(self, value: None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Do nothing: CacheLayerMixin assigns None."""

    def get_seq_length(self) -> int:
        """Number of tokens seen, evicted ones included."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of new tokens, position of the first): the mask covers the new tokens only."""
        # `attend` applies the rule to the earlier tokens, whose positions the cache knows.
        return query_length, self.num_tokens

    def get_max_length(self) -> int:
        """Return -1, which means unbounded."""
        return -1

    def activate_past_recording(self) -> None:
        """Do nothing: the keys that a crop by `undo` tokens needs are always kept."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens; the number is 0 or negative, as in transformers.

        Raises ValueError for a positive number, for more tokens than were seen, if a remaining token sees the key of a
        removed one, and if evicted keys would be needed.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.num_tokens:
            raise ValueError(
                f"tokens_to_remove must be 0 or negative, and at least -{self.num_tokens}; got {tokens_to_remove}"
            )
        if self.held is not None:
            for reader in (self.previous_readers | self.readers).values():
                reader.check_crop(self.num_tokens + tokens_to_remove)
            self.held.sources = _sources(self.previous_readers | self.readers)
            self.held.crop(self.num_tokens + tokens_to_remove, self.num_tokens)
            self.num_tokens += tokens_to_remove

    def reset(self) -> None:
        """Remove all tokens."""
        self._forget()

    def reorder_cache(self, beam_idx: Int64[Tensor, " B"]) -> None:
        """Replace the batch by its entries with these indices, in this order; indices may repeat."""
        if self.held is not None:
            self.held.select(beam_idx.long())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do the same as `reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry `repeats` times; the copies of an entry are consecutive."""
        if self.held is not None:
            self.reorder_cache(torch.arange(len(self.held.keys)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Raise ValueError, as offloading is not supported."""
        raise ValueError("a FlexdilatedCache cannot be offloaded; it evicts keys that no later query can see")


class _LayerWithStates(LinearAttentionLayer, _Layer):
    """Cache of one model layer that has attention as well as states of linear attention or convolutions."""

    is_compileable = False

    def __init__(self, undo: int, number_of_states: int) -> None:
        _Layer.__init__(self, undo)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *keys: Any, **states: Any) -> None:
        """Initialize the states passed by keyword; with none, mark keys and values as initialized."""
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)
        else:
            _Layer.lazy_initialization(self, *keys)

    def reset(self) -> None:
        """Remove all tokens and states."""
        LinearAttentionLayer.reset(self)
        _Layer.reset(self)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Do as `_Layer.reorder_cache` with the states, keys and values."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        _Layer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens, also from the states; the number is 0 or negative.

        Raises RuntimeError before `activate_past_recording` was called, and ValueError as `_Layer.crop`.
        """
        if self.record_past:  # else the states' crop raises; the keys are cropped first, as only theirs can be refused
            _Layer.crop(self, tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def offload(self) -> None:
        _Layer.offload(self)


def _replacement_layer(layer: Any, undo: int) -> Any:
    """Return the layer of a `FlexdilatedCache` that takes the place of a layer of transformers' DynamicCache.

    A layer that holds only states, or nothing, is returned unchanged.

    undo: number of last tokens that `crop` can remove.

    Raises ValueError for unsupported kinds of layers.
    """
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return _Layer(undo)
    if type(layer) in (LinearAttentionLayer, DummyLayer):
        return layer
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return _LayerWithStates(undo, layer.number_of_states)
    raise _unsupported_layer(type(layer).__name__)


def _unsupported_layer(kind: str) -> ValueError:
    return ValueError(
        f"a FlexdilatedCache holds keys and values, and states of linear attention; the model needs a {kind}. Leave "
        "the cache to transformers, a DynamicCache"
    )


def _sources(readers: dict[Any, Reader]) -> list[RowSource]:
    """Return the rules by which the readers attend; without readers, [causal order], by which all keys are kept."""
    return [source for reader in readers.values() for source in reader.sources] or _ALL_KEYS


def _require_own_queries(given: KeyOrigin, module: nn.Module, queries: range) -> None:
    """Raise ValueError unless the attention is causal and its queries are the tokens of the last cache update.

    given: origin of the keys.
    module: the model's attention module.
    queries: positions of the queries.
    """
    if queries != given.tokens or given.update != given.layer.num_updates or not getattr(module, "is_causal", True):
        raise ValueError(
            "a FlexdilatedCache holds the keys of causal self-attention, for queries of the tokens that came last; got "
            f"{type(module).__name__} with queries {queries} over keys of {given.tokens}. In an encoder-decoder give "
            "EncoderDecoderCache(FlexdilatedCache(), DynamicCache()); else leave the cache to transformers"
        )
