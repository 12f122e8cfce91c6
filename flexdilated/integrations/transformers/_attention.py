"""Functions for transformers' registries: a mask function, called for each mask of a forward pass, and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ... import biases
from ..._attend import attend
from ..._validate import offset_as_int
from ...engines import ScoreMod
from ...masks import Mixture, Pattern, documents, every, selected_blocks, selected_keys, visible_keys
from ...masks.core import advises
from ...masks.patterns import names
from ...selection import SelectedAttention
from ._cache import KeyOrigin, origin_of
from ._documents import ModelCall, running_call, watch
from ._layers import (
    Patterns,
    attention_layers,
    choose_patterns,
    layer_pattern,
    patch_config_to_dict,
    set_implementation,
    store_patterns,
)
from ._mask_functions import PACKED, RulePatterns, all_of, pattern_from_mask_function
from ._unsupported_models import KEEP, unserved_parts

# B batch entries, H query heads, G key/value heads, N queries, M keys, D head dim, L positions

_Model = TypeVar("_Model", bound=nn.Module)

_PADDING, _UNPADDED, _CHOSEN = "padding", "unpadded", "chosen_keys"  # names of run-time tensors
_CPU = torch.device("cpu")
_HIDDEN = -1e4  # models add this, or less, to scores of hidden keys


@advises()
def register(name: str = "flexdilated") -> None:
    """Register this library's attention as an `attn_implementation` of transformers; `set_pattern` does so too.

    A model without patterns that is loaded with this name, or switched to it, gives the outputs of "sdpa" up to
    rounding. After this call, saved configs that have patterns include the implementation's name.

    >>> fd.integrations.transformers.register()  # doctest: +SKIP
    >>> model = AutoModel.from_pretrained(path, attn_implementation="flexdilated")  # doctest: +SKIP
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, visibility)
    patch_config_to_dict()


@advises(how="write set_pattern(model, pattern)")
def set_pattern(
    model: _Model, pattern: Patterns | None = None, *, compose: str = "and", name: str = "flexdilated"
) -> _Model:
    """Set patterns on the attention layers of a model, in place, with attention by this library; returns the model.

    model: a `PreTrainedModel`, or a module that contains one, such as PEFT's.
    pattern: a pattern for all layers; or a mapping from layer number (index into `attention_layers(model)`) to pattern;
        or a function from a layer's module to its pattern. A layer without a pattern, or with None, keeps the model's
        rule. By default, patterns come from the model's config, where `save_pretrained` stores them. In place of a
        pattern, a layer may get a `fd.SelectedAttention`: it then selects its keys from the data, within its selector's
        rule and, with compose="and", the model's. Its blocks count from the first position of a sequence, padding
        included. It is not registered as a submodule, so optimize the parameters of its gate separately; the config
        stores only its repr, from which it cannot be loaded.
    compose: "and", the intersection of the pattern with the model's rule (causal order, sliding windows, chunks);
        "replace", the pattern without the model's rule. Padding and packed sequences are masked in both cases, and
        a pattern's positions count from a sequence's first token that is not padding, so padding around its tokens does
        not change its outputs.
    name: the `attn_implementation` to register and to set.

    A part with a config of its own that cannot be served, such as a vision tower that makes its masks itself, keeps the
    attention of transformers; a warning names it.

    Raises TypeError for a model or a pattern of another type. Raises ValueError, before any change, for a pattern that
    does not fit the heads of a layer or has run-time tensors, for unknown layer numbers, for a config without patterns
    if `pattern` is None, and for models that do not use transformers' registry of attention functions, change their
    masks themselves or give each query a sink.

    >>> set_pattern(model, masks.longnet((2048, 8192), (1, 4)))  # doctest: +SKIP
    """
    inner = None
    if isinstance(model, nn.Module):
        inner = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if inner is None:
        raise TypeError(
            "set_pattern takes (model, pattern), where model is a PreTrainedModel of transformers or contains one; got "
            f"{type(model).__name__}" + (": write fd.convert(model, pattern)" if isinstance(model, nn.Module) else "")
        )
    unserved = unserved_parts(inner, attention_layers(inner))
    layers, chosen, compose = choose_patterns(inner, pattern, compose, unserved)
    register(name)
    set_implementation(inner, name, unserved)
    store_patterns(inner, layers, chosen, compose, name)
    watch(inner)
    return model


@dataclass(eq=False)
class Visibility:
    """Replacement of a mask tensor: the model's rule and padding as patterns, without the patterns of layers.

    function: the model's mask function (batch, head, query, key) -> bool; None allows all pairs.
    begin: pattern that divides each sequence into documents; in a document, positions count from its start. None for
        no division.
    unpadded: pattern of unpadded keys within a document; None if all are unpadded.
    tensors: run-time tensors of `begin` and `unpadded`.
    q_offset, kv_offset: positions of the first query and key.
    shape: shape of the replaced mask, (B, 1, N, M).
    device: of the replaced mask.
    is_offset_known: False if q_offset is a number that a compiled graph reads from a tensor.
    are_documents_read: True once position_ids were searched for the beginnings of documents.
    restricted: this mask restricted to the documents that the search found; None before the search, if it found none,
        and if the model's rule restricts to documents itself.
    """

    function: Callable[..., Any] | None
    begin: Pattern | None
    unpadded: Pattern | None
    tensors: dict[str, Tensor]
    q_offset: int
    kv_offset: int
    shape: tuple[int, int, int, int]
    device: torch.device = _CPU
    is_offset_known: bool = True
    are_documents_read: bool = field(default=False, init=False)
    restricted: Visibility | None = field(default=None, init=False)
    _rule_patterns: RulePatterns | None = field(default=None, init=False)

    # Models read ndim of a ready-made mask, and may call contiguous().
    ndim = 4

    def contiguous(self) -> Visibility:
        """Return self; there is no memory to copy."""
        return self

    def __getitem__(self, index: tuple[Any, ...]) -> Visibility | Bool[Tensor, "B N M"]:
        """Return the mask of consecutive queries and of the first keys, for all batch entries, as models slice masks.

        With the index (:, 0, :, :) the result is a tensor instead, True for keys that the model's rule, documents and
        padding allow. Models that choose keys by the scores of all pairs need it.

        Raises ValueError for other indices.
        """
        given = index if isinstance(index, tuple) else (index,)
        index = (*given, *[slice(None)] * (4 - len(given)))
        if index == (slice(None), 0, slice(None), slice(None)):
            layer = nn.Identity()  # like all layers with an indexer it is causal
            if running_call(layer) is None and not self.are_documents_read:
                return self._dense_mask  # the layers hand over no position_ids either
            queries = torch.empty(1, 1, self.shape[2], 1, device="meta")
            return _restrict_to_documents(self, layer, queries, {}, ready_made=False, evicts=False)._dense_mask
        slices = [one.indices(size) for one, size in zip(index, self.shape, strict=False) if isinstance(one, slice)]
        batch, heads, queries, keys = slices if len(slices) == len(index) == 4 else [(0, 0, 0)] * 4
        if (batch, heads, queries[2], keys[0], keys[2]) != ((0, self.shape[0], 1), (0, 1, 1), 1, 0, 1):
            raise ValueError(
                "of a mask of flexdilated a model may take all batch entries, consecutive queries and the first keys; "
                f"got {index}: {KEEP} takes any"
            )
        shape = (*self.shape[:2], len(range(*queries)), len(range(*keys)))
        return replace(self, q_offset=self.q_offset + queries[0], shape=shape)

    @cached_property
    def _dense_mask(self) -> Bool[Tensor, "B N M"]:
        """True for the pairs of query and key that the model's rule, documents and padding allow."""
        b = torch.arange(self.shape[0], device=self.device)[:, None, None]
        q = self.q_offset + torch.arange(self.shape[2], device=self.device)[:, None]
        k = self.kv_offset + torch.arange(self.shape[3], device=self.device)
        shown = torch.ones(self.shape[0], self.shape[2], self.shape[3], dtype=torch.bool, device=self.device)
        if self.function is not None:
            shown = shown & self.function(b, torch.zeros_like(b), q, k)
        tensors = {name: x.to(self.device) for name, x in self.tensors.items()}
        if PACKED in tensors:
            shown = shown & (tensors[PACKED][b, q] == tensors[PACKED][b, k])
        visible = self.visible()
        return shown if visible is None else shown & visible.to(self.device)[b, k]

    def visible(self) -> Bool[Tensor, "B L"] | None:
        """Return booleans, True for keys that are not padding, at positions from 0 on; None if there is no padding.

        In a compiled graph it is None only without a padding mask.
        """
        if _PADDING not in self.tensors:
            return None
        visible = self.tensors[_PADDING] >= 0
        return visible & self.tensors[_UNPADDED] if _UNPADDED in self.tensors else visible

    @property
    def rule_patterns(self) -> RulePatterns:
        """The model's rule as patterns, and the run-time tensors of rule and padding."""
        # Computed on first access, as a model may make masks that no layer uses.
        if self._rule_patterns is None:
            found = (
                RulePatterns(None, self.begin, None, {})
                if self.function is None
                else pattern_from_mask_function(self.function, self.begin)
            )
            tables = {name: _on_host(x) for name, x in found.tensors.items()}
            self._rule_patterns = replace(found, tensors=self.tensors | tables)
        return self._rule_patterns

    def rule(self, pattern: Pattern | Mixture | None, *, replaces: bool) -> Pattern | Mixture:
        """Return the pattern by which a layer attends: its own and the model's rule, within documents, without padding.

        The layer's pattern, and the part of the model's rule that is about positions, count positions from the first
        token of each document; from the first token that is not padding, if sequences are padded in front.

        pattern: the layer's; None if it has none.
        replaces: True to omit the model's rule, but not padding or documents, if the layer has a pattern.
        """
        model = [] if replaces and pattern is not None else [self.rule_patterns.positions]
        found = all_of([pattern, *model])
        if self.rule_patterns.begin is not None:
            found = (every() if found is None else found).per_document(self.rule_patterns.begin)
        found = all_of([found, *([self.rule_patterns.further] if model else []), self.unpadded])
        return every() if found is None else found


def visibility(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = causal_mask_function,
    attention_mask: Tensor | Visibility | None = None,
    device: torch.device = _CPU,
    **_: Any,
) -> Visibility:
    """Mask function for transformers: return the model's rule and the padding as patterns, not as an (N, M) tensor.

    batch_size, q_length, kv_length: B, N and M.
    q_offset, kv_offset: positions of the first query and key.
    mask_function: the model's rule (batch, head, query, key) -> bool; None allows all pairs.
    attention_mask: booleans (B, L), True for tokens that are not padding, where tokens from L on are padding; None for
        no padding; a `Visibility` is returned unchanged.
    device: of the replaced mask.
    """
    if isinstance(attention_mask, Visibility):
        return attention_mask  # made earlier; `generate` does so for static caches
    begin, unpadded, tensors = None, None, {}
    if attention_mask is not None:
        begin, unpadded, tensors = _padding_patterns(_on_host(attention_mask), kv_offset + kv_length)
    is_known = not (isinstance(q_offset, Tensor) and torch.compiler.is_compiling())
    # A tensor is the cache's counter, which it increments before attention is called.
    q_offset = offset_as_int("q_offset", q_offset)
    shape = (batch_size, 1, q_length, kv_length)
    return Visibility(mask_function, begin, unpadded, tensors, q_offset, kv_offset, shape, device, is_known)


def _restrict_to_documents(
    mask: Visibility, module: nn.Module, query: Tensor, options: dict[str, Any], *, ready_made: bool, evicts: bool
) -> Visibility:
    """Return the mask restricted to packed documents, whose beginnings are found in position_ids.

    Returns `mask` itself if no documents are found or the model's rule has them already. The search is made once for
    all layers that get `mask`; in a model without hooks, a module that is not causal does not begin it.

    query: only its number of queries is read.
    options: `options` of `attention`; their position_ids are used in a model without hooks.
    ready_made: True if the model passed a mask tensor or None, from which `mask` was made.
    evicts: True for keys of a `FlexdilatedCache`.

    Raises ValueError for documents that the model or its cache cannot keep apart.
    """
    if mask.are_documents_read:  # first: layers that are recomputed in a backward have no running call
        return mask.restricted or mask
    call = running_call(module)
    if call is None:
        if not getattr(module, "is_causal", True):
            return mask
        call = ModelCall(None, options, None)
    mask.are_documents_read = True
    own = query.shape[2] if not ready_made or query.shape[2] == mask.shape[3] else -1
    ids = call.documents(module, own, mask.q_offset, mask.visible(), is_known=mask.is_offset_known, evicts=evicts)
    if ids is not None and PACKED not in mask.rule_patterns.tensors:
        if ready_made:
            call.refuse_checkpointing()
        mask.restricted = _within_documents(mask, ids)
    return mask.restricted or mask


def _within_documents(mask: Visibility, ids: Int64[Tensor, "B N"]) -> Visibility:
    """Return the mask restricted to pairs within documents.

    Keys before the queries belong to document 0; padding and keys after the queries belong to none.

    ids: number of each query's document, from 0.
    """
    num_tokens, length = ids.shape[1], mask.kv_offset + mask.shape[3]
    place = torch.arange(length, device=ids.device) - mask.q_offset
    table = ids[:, place.clamp(0, num_tokens - 1)]
    table = torch.where(place < 0, 0, torch.where(place < num_tokens, table, -1))
    if _PADDING in mask.tensors:
        table = torch.where(mask.tensors[_PADDING] < 0, -1, table)
    return replace(mask, begin=documents(PACKED), tensors={**mask.tensors, PACKED: table})


def _on_host(x: Tensor) -> Tensor:
    """Return x on the CPU; in a compiled graph return x itself."""
    return x if torch.compiler.is_compiling() else x.cpu()


def _padding_patterns(
    visible: Bool[Tensor, "B L"], length: int
) -> tuple[Pattern | None, Pattern | None, dict[str, Tensor]]:
    """Convert a padding mask, True for tokens that are not padding, to patterns for the first `length` positions.

    Positions from L on are padding. Returns (pattern of documents, pattern of unpadded keys, run-time tensors of both):
    (None, None, {}) if nothing is padded. If all padding lies before or after the tokens of its sequence, the documents
    hide it, and the second pattern is None. Else the documents begin each sequence at its first unpadded token, and the
    second pattern hides later padding. In a compiled graph the values are unknown, so both are returned.
    """
    visible = pad(visible[:, :length], (0, max(0, length - visible.shape[1])))
    begun = visible.cumsum(1) > 0
    if not torch.compiler.is_compiling():
        if bool(visible.all()):
            return None, None, {}
        trailing = (~visible).flip(1).cummin(1).values.flip(1)  # True for padding after the last token
        if not bool((begun & ~visible & ~trailing).any()):
            return documents(_PADDING), None, {_PADDING: visible.int() - 1}  # document 0; -1 for padding
    tensors = {_PADDING: begun.int() - 1, _UNPADDED: visible}
    return documents(_PADDING), visible_keys(_UNPADDED), tensors


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    attention_mask: Visibility | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    position_bias: Tensor | None = None,
    indices: Int[Tensor, "B N k"] | None = None,
    block_indices: Int[Tensor, "B T N k"] | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B N H D"], None]:
    """Attention function for transformers: returns (output, None for weights, which are never formed).

    attention_mask: result of `visibility`; or a tensor (B or 1, 1, 1, M), boolean or additive, that only hides keys; or
        None: as with "sdpa", causal order if is_causal and N > 1, else all pairs.
    is_causal: None for the module's attribute.
    dropout: probability of dropping an attention weight.
    scaling: factor of the scores; None is D**-0.5.
    softcap: bound of the scores, by tanh; None for no bound.
    s_aux: a sink logit per head; None for no sinks.
    options: position_ids, to find packed documents, and output_attentions; others are ignored.
    position_bias: (B or 1, H, N, M), added to the scores; None for none.
    indices: the keys that the model's own indexer chose for each query, such as DeepSeek-V3.2's, to which the rule is
        restricted; None for all.
    block_indices: the blocks of `module.indexer.block_size` keys that such an indexer chose, as MiniMax-M3's does, in T
        tables of H / T consecutive heads each, padded with -1; None for all.

    Raises TypeError for an attention_mask of another type, such as a BlockMask. Raises ValueError for a mask tensor
    that differs between queries or changes scores of visible keys, for packed documents that the model or its cache
    cannot keep apart, for output_attentions=True, for dropout, position_bias, indices or block_indices with a
    FlexdilatedCache, and for these or softcap in a layer that selects blocks.
    """
    if options.get("output_attentions"):
        raise ValueError(
            "flexdilated forms no attention weights: call without output_attentions=True. "
            "flexdilated.attention_received tells how much attention each key gets"
        )
    features = {"dropout": dropout or None, "softcap": softcap, "position_bias": position_bias}
    features |= {"indices": indices, "block_indices": block_indices}
    given, ready_made = origin_of(key), not isinstance(attention_mask, Visibility)
    if attention_mask is None:
        attention_mask = _visibility_without_mask(module, query, key, given, is_causal)
    elif isinstance(attention_mask, Tensor):
        visible = _unmasked_keys(attention_mask)
        attention_mask = visibility(
            len(query), query.shape[2], key.shape[2], 0, 0, None, visible.expand(len(query), -1)
        )
    elif not isinstance(attention_mask, Visibility):
        raise TypeError(
            "flexdilated takes the attention_mask (batch, tokens) of a tokenizer, and rules as patterns: give "
            f"masks.custom(block_mask) to set_pattern(model, pattern); got {type(attention_mask).__name__}"
        )
    attention_mask = _restrict_to_documents(
        attention_mask, module, query, options, ready_made=ready_made, evicts=given is not None
    )
    pattern, replaces = layer_pattern(module)
    if isinstance(pattern, SelectedAttention):
        _refuse_features("a layer that selects blocks", features, "give the layer a pattern")
        return _attend_selected(pattern, attention_mask, replaces, query, key, value, scaling, s_aux), None
    rule = attention_mask.rule(pattern, replaces=replaces)
    bindings = {name: attention_mask.rule_patterns.tensors[name] for name in names(rule)}
    if given is not None:
        _refuse_features(
            "a FlexdilatedCache", features | {"softcap": None}, "leave the cache to transformers, a DynamicCache"
        )
        out = given.layer.attend(
            given,
            query,
            key,
            value,
            rule,
            scale=scaling,
            score_mod=_score_mod(softcap, None, attention_mask),
            sinks=s_aux,
            module=module,
            q_offset=attention_mask.q_offset,
        )
        return out.transpose(1, 2), None
    if indices is not None:
        rule, bindings[_CHOSEN] = rule & selected_keys(_CHOSEN, most=indices.shape[-1]), indices.unsqueeze(1)
    if block_indices is not None:
        block = int(module.get_submodule("indexer").block_size)  # type: ignore[arg-type]
        rule = rule & selected_blocks(_CHOSEN, block=(1, block), most=block_indices.shape[-1])
        bindings[_CHOSEN] = block_indices
    out = attend(
        query,
        key,
        value,
        rule,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=True,
        score_mod=_score_mod(softcap, position_bias, attention_mask),
        sinks=s_aux,
        bindings=bindings,
        q_offset=attention_mask.q_offset,
        k_offset=attention_mask.kv_offset,
    )
    return out.transpose(1, 2), None


def _attend_selected(
    layer: SelectedAttention,
    mask: Visibility,
    replaces: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    sinks: Tensor | None,
) -> Float[Tensor, "B N H D"]:
    """Return the attention output of a layer that selects key blocks; every call needs all keys, from position 0.

    replaces: True to omit the model's rule.

    Raises ValueError for a `FlexdilatedCache`, for a model's rule that is a mixture, and for queries after cached keys
    whose choice would depend on other queries of their block.
    """
    own, begun = layer.selector, offset_as_int("q_offset", mask.q_offset)
    if origin_of(k) is not None or mask.kv_offset:
        raise ValueError("a layer that selects blocks needs all keys: leave the cache to transformers, a DynamicCache")
    if begun and own.future_in_choice:
        raise ValueError(
            "future_in_choice=True is for prefill only, as decoding would select other keys: give the selector "
            f"query_summary='first'; got queries from position {begun} on"
        )
    side = own.largest_query_block
    if begun % side:
        raise ValueError(
            "queries of a query block use the selection of its first query, which a later call does not have: decode "
            f"with query_block=1; got {side} and queries from position {begun} on"
        )
    # The layer applies its own `within`; every() adds no constraint if the model's rule is replaced.
    rule = mask.rule(every() if replaces else None, replaces=replaces)
    if isinstance(rule, Mixture):
        raise ValueError(f"a layer that selects blocks needs a model whose pattern is not a mixture; got {rule!r}")
    end = begun + q.shape[2]  # a cache of fixed size is longer, and so is what the mask says of its keys
    bindings = {name: mask.rule_patterns.tensors[name][..., :end] for name in names(rule)}
    k, v = k[:, :, :end], v[:, :, :end]
    options = {"scale": scale, "sinks": sinks, "q_offset": begun, "bindings": bindings or None}
    return layer(q, k, v, enable_gqa=True, within=rule, **options).transpose(1, 2)


def _visibility_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, given: KeyOrigin | None, is_causal: bool | None
) -> Visibility:
    """Return the `Visibility` for a model that makes no mask, without padding.

    Its rule is causal order if is_causal, and N > 1 or `given` is not None; else all pairs.

    given: origin of the keys if a `FlexdilatedCache` returned them, else None.
    is_causal: None for the module's attribute.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    function = causal_mask_function if is_causal and (given is not None or query.shape[2] > 1) else None
    begun, shape = 0 if given is None else given.tokens.start, (len(query), 1, query.shape[2], key.shape[2])
    return Visibility(function, None, None, {}, begun, 0, shape)


def _unmasked_keys(mask: Tensor) -> Bool[Tensor, "B M"]:
    """Return booleans, True for the keys that a mask tensor (B or 1, 1, 1, M), boolean or additive, does not hide.

    Raises ValueError for masks of another shape, and for additive masks that change the scores of visible keys.
    """
    said = (
        "flexdilated takes the attention_mask (batch, tokens) of a tokenizer, one that only hides keys, and rules as "
        f"patterns; got a ready-made mask of shape {tuple(mask.shape)}"
    )
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        raise ValueError(f"{said}. Give the pattern to set_pattern(model, pattern)")
    if mask.dtype == torch.bool:
        return mask[:, 0, 0]
    visible = mask[:, 0, 0] == 0
    if not bool((visible | (mask[:, 0, 0] <= _HIDDEN)).all()):
        raise ValueError(f"{said}, which adds other numbers than 0 and less than {_HIDDEN:g} to scores")
    return visible


def _refuse_features(what: str, features: dict[str, Any], advice: str) -> None:
    """Raise ValueError if any of `features`, values by argument name, is not None.

    what: the part that does not support them.
    advice: text of the remedy.
    """
    for name, value in features.items():
        if value is not None:
            came = "a tensor" if isinstance(value, Tensor) else value
            raise ValueError(f"{what} takes no {name}: {advice}; got {name}={came}")


def _score_mod(
    softcap: float | None, position_bias: Float[Tensor, "B|1 H N M"] | None, mask: Visibility
) -> ScoreMod | None:
    """Return a score_mod that caps the scores at +-softcap by tanh, then adds position_bias; None if both are None.

    mask: gives the positions of the first query and key, at which position_bias begins.
    """
    if position_bias is None:
        return None if softcap is None else biases.softcap(softcap)
    shared, q_offset, k_offset = len(position_bias) == 1, mask.q_offset, mask.kv_offset

    def biased(score, b, h, q_idx, k_idx):
        return score + position_bias[0 if shared else b, h, q_idx - q_offset, k_idx - k_offset]

    return biased if softcap is None else biases.compose(biases.softcap(softcap), biased)
