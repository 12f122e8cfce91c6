"""Documents packed in one sequence: their starts, according to the position_ids of a model's forward pass.

A token whose position is below that of the token before it begins another document. Hooks around a model's forward keep
the arguments of the running pass, and the first attention layer of the pass computes the documents. In a compiled graph
the documents are tensors, and refusals are assertions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..._torch_private import assert_async

# B batch entries, or 1 for all of them, N tokens of a call, L positions of a sequence

_ARGUMENTS, _NESTED = "_flexdilated_arguments", "_flexdilated_is_nested"  # attributes of a model
_MIXES = "_flexdilated_mixes_tokens"
_LAST_POSITION = "_flexdilated_last_position"  # attribute of a cache
_SEVERAL = torch.iinfo(torch.int64).max  # the last position of a cache that holds several documents
_LOWEST = torch.iinfo(torch.int64).min
_POSITIONS = ("position_ids", "decoder_position_ids")
_MASKS = ("attention_mask", "decoder_attention_mask")
_ENCODER_STATES = ("encoder_hidden_states", "cross_attention_states")
_ROWS_ADVICE = "give each document a row of its own, padded, with an attention_mask"
_ERROR_START = "position_ids begin several documents in one row, and"
_CACHE_ERROR = (
    f"{_ERROR_START} cached keys do not record their document: call the model on whole rows with use_cache=False"
)
_MASK_ERROR = (
    "attention_mask must hold 0 and 1, where 0 is padding; it holds other numbers. For several documents in a row "
    "write position_ids that begin at 0 in each document, and 1 in the attention_mask"
)
_CHECKPOINTING_ERROR = (
    f"{_ERROR_START} gradient checkpointing would recompute a layer without them, as the model hands it no mask that "
    f"can keep them: call model.gradient_checkpointing_disable(), or {_ROWS_ADVICE}"
)


class ModelCall:
    """A running forward pass of one model, with its position_ids, its cache and its documents.

    model: None for an attention layer that is called outside of a watched model.
    given: arguments of the pass, by name.
    outer: the running pass of the model that contains this model; None if there is none.

    Attribute `positions`: the position_ids among the arguments, from `_text_positions`; None if there are none. Within
    an outer pass, they are replaced by the outer pass's `positions` if these are None or have the same N.
    """

    def __init__(self, model: nn.Module | None, given: dict[str, Any], outer: ModelCall | None) -> None:
        self.model, self.outer = model, outer
        name = next((each for each in _POSITIONS if isinstance(given.get(each), Tensor)), None)
        self.positions = None if name is None else _text_positions(given[name])
        self.uses_positions = name in getattr(model, _ARGUMENTS, _POSITIONS)
        if outer is not None and self.positions is not None:
            theirs = outer.positions
            if theirs is None or theirs.shape[1] == self.positions.shape[1]:
                self.positions = theirs
        self.masks = [x for x in map(given.get, _MASKS) if isinstance(x, Tensor) and x.dim() == 2]
        self.cache = _cache_in(given.values())
        self.has_encoder = any(given.get(each) is not None for each in _ENCODER_STATES)
        # True once an attention layer was called; once one was given the documents; once they were searched for.
        self.has_layers = self.is_read = self.is_searched = False
        self.document_ids: Tensor | None = None
        self.last_position: Tensor | None = None

    def documents(
        self,
        module: nn.Module,
        num_tokens: int,
        q_offset: int,
        visible: Bool[Tensor, "B L"] | None,
        *,
        is_known: bool,
        evicts: bool,
    ) -> Int64[Tensor, "B N"] | None:
        """Return the index of each query's document in its sequence, from 0; None if `module` needs no indices.

        It needs none without position_ids for these queries, for sequences of one document, and in cross-attention. A
        graph cannot tell how many documents there are: it may return indices that are all 0.

        module: an attention layer.
        num_tokens: number of its queries; -1 for queries that position_ids do not describe.
        q_offset: position of the first query.
        visible: False for padding; None for no padding.
        is_known: False if q_offset is a number that a graph reads from a tensor.
        evicts: True for keys of a `FlexdilatedCache`.

        Raises ValueError for documents that the model or its cache cannot keep apart, and for an attention mask with
        numbers above 1.
        """
        self.has_layers = True
        if self.has_encoder and not getattr(module, "is_causal", True):
            largest = self._take_largest_in_masks()
            if largest is not None:
                _refuse_if((_on_host(largest) > 1).any(), _MASK_ERROR)
            return None  # cross-attention: keys are no tokens of the sequence
        if not self.is_searched:
            self.is_searched = True
            self._find_documents(num_tokens, q_offset, visible, is_known, evicts)
        if self.positions is None or self.positions.shape[1] != num_tokens:
            return None
        self.is_read = True
        return self.document_ids

    def _find_documents(
        self, num_tokens: int, q_offset: int, visible: Tensor | None, is_known: bool, evicts: bool
    ) -> None:
        begun = not is_known or q_offset > 0
        last = getattr(self.cache, _LAST_POSITION, None) if begun else None
        positions = self.positions if self.positions is None or self.positions.shape[1] == num_tokens else None
        positions, last, largest = _copy_all_to_host(positions, last, self._take_largest_in_masks())
        if largest is not None:
            _refuse_if((largest > 1).any(), _MASK_ERROR)
        count = _count_before(q_offset, visible)
        if last is not None:
            _refuse_if(((last == _SEVERAL) & (count > 0)).any(), _CACHE_ERROR)
        if positions is None:
            return
        least = count if last is None else torch.minimum(count, last)
        least = torch.where(count > 0, least, _LOWEST)
        new = None if visible is None else visible[:, torch.arange(num_tokens, device=visible.device) + q_offset]
        begins, end = _document_starts(positions, new, least.to(positions.device))
        several = begins.any()
        if self.model is not None:
            self._require_served(several)
        if evicts or (begun and (is_known or num_tokens == 1)):
            _refuse_if(several, _CACHE_ERROR)
        elif torch.compiler.is_compiling() or bool(several):
            self.document_ids = begins.cumsum(1)
        self.last_position = torch.where(several, _SEVERAL, end)

    def _take_largest_in_masks(self) -> Tensor | None:
        """Return the largest number, as int64 of shape (1, 1), in the outermost pass's 2-D masks that are not boolean.

        None if it has no such masks, and in all calls of this method after the first within the outermost pass.
        """
        outermost = self
        while outermost.outer is not None:
            outermost = outermost.outer
        masks, outermost.masks = outermost.masks, []
        numbers = [x.amax().long().view(1, 1) for x in masks if x.dtype != torch.bool and x.numel()]
        return torch.cat(numbers).amax().view(1, 1) if numbers else None

    def _require_served(self, several: Tensor) -> None:
        name = type(self.model).__name__
        if not self.uses_positions:
            _refuse_if(several, f"{_ERROR_START} {name} does not use position_ids: {_ROWS_ADVICE}")
        if getattr(self.model, _MIXES, False):
            _refuse_if(several, f"{_ERROR_START} {name} mixes tokens outside of its attention: {_ROWS_ADVICE}")

    def end(self, output: Any) -> None:
        """Finish the pass: store the position of each sequence's last token on the cache, for the next pass.

        If any sequence has several documents, _SEVERAL is stored in place of all positions. Nothing is stored in a pass
        without position_ids, cache, or attention layers.

        output: result of the forward, which is searched for a cache if the arguments have none.

        Raises ValueError if position_ids begin several documents, and attention layers ran but none could read them.
        """
        if self.outer is not None:
            self.outer.has_layers |= self.has_layers
            self.outer.is_read |= self.is_read
        if self.positions is not None and self.has_layers and not self.is_read:
            begins, _ = _document_starts(_on_host(self.positions), None, torch.full((1, 1), _LOWEST))
            _refuse_if(
                begins.any(),
                f"{_ERROR_START} {type(self.model).__name__} does not hand them to its layers: {_ROWS_ADVICE}",
            )
        cache = self.cache
        if cache is None:
            cache = _cache_in(output.values() if isinstance(output, dict) else output)
        if self.last_position is not None and self.positions is not None and cache is not None:
            setattr(cache, _LAST_POSITION, self.last_position.to(self.positions.device))

    def refuse_checkpointing(self) -> None:
        """Outside of graphs, raise ValueError if gradient checkpointing may call a layer again after this pass."""
        if torch.compiler.is_compiling() or self.model is None or not self.model.training:
            return
        if any(getattr(each, "gradient_checkpointing", False) for each in self.model.modules()):
            raise ValueError(_CHECKPOINTING_ERROR)


class _Running:
    """Holder of the innermost running forward pass, `call`; None outside of any pass."""

    def __init__(self) -> None:
        self.call: ModelCall | None = None


class _RunningInThread(_Running, threading.local):
    pass


_RUNNING, _RUNNING_IN_THREAD = _Running(), _RunningInThread()  # graphs cannot read the second


def running_call(module: nn.Module) -> ModelCall | None:
    """Return the innermost running pass of a watched model, which is taken to call the layer `module`; None for none.

    For a pass whose graph broke, it is checked that the model contains `module`.
    """
    if torch.compiler.is_compiling():
        return _RUNNING.call
    if _RUNNING_IN_THREAD.call is not None:
        return _RUNNING_IN_THREAD.call
    call = _RUNNING.call  # of a graph that breaks within the pass
    inside = call is not None and call.model is not None and any(each is module for each in call.model.modules())
    return call if inside else None


def _set_running(call: ModelCall | None) -> None:
    _RUNNING.call = call
    if not torch.compiler.is_compiling():
        _RUNNING_IN_THREAD.call = call


def watch(model: PreTrainedModel) -> None:
    """Add hooks to the forward of a model and of the models within it, by which `running_call` knows the running pass.

    A model that has the hooks gets no further ones.
    """
    for each in model.modules():
        if not isinstance(each, PreTrainedModel):
            continue
        if not hasattr(each, _ARGUMENTS):
            arguments = signature(type(each).forward).parameters.items()
            setattr(each, _ARGUMENTS, tuple(name for name, one in arguments if one.kind in _POSITIONAL)[1:])
            setattr(each, _MIXES, _mixes_tokens(each))
            each.register_forward_pre_hook(_begin_call, with_kwargs=True)
            each.register_forward_hook(_end_call, with_kwargs=True, always_call=True)
        if each is not model:
            setattr(each, _NESTED, True)


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _mixes_tokens(model: PreTrainedModel) -> bool:
    """Return True if a model is known to mix tokens outside of attention: by states, convolutions or embeddings."""
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers if hasattr(config, "num_hidden_layers") else []
    return (
        any(isinstance(each, LinearAttentionLayer | LinearAttentionAndFullAttentionLayer) for each in layers)
        or any(isinstance(each, nn.Conv1d) and each.kernel_size != (1,) for each in _own_modules(model))
        or getattr(config, "trigram_input", False)  # MobileBERT embeds each token with its neighbors
    )


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules within a model, except inner PreTrainedModels, such as an audio tower, and their modules."""
    for each in module.children():
        if not isinstance(each, PreTrainedModel):
            yield each
            yield from _own_modules(each)


def _begin_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    running = _RUNNING.call if torch.compiler.is_compiling() else _RUNNING_IN_THREAD.call
    given = {**dict(zip(getattr(model, _ARGUMENTS), args, strict=False)), **kwargs}
    _set_running(ModelCall(model, given, running if getattr(model, _NESTED, False) else None))


def _end_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    call = _RUNNING.call if torch.compiler.is_compiling() else _RUNNING_IN_THREAD.call
    if call is not None and call.model is model:
        _set_running(call.outer)
        if output is not None:  # else the forward has raised
            call.end(output)


def _text_positions(position_ids: Tensor) -> Tensor | None:
    """Return the positions, (B, N) or (1, N), of tokens in the text; None for position_ids of other shapes.

    position_ids: (N,), (B, N), or (3 or 4, B, N), whose first entry has the positions in the text.
    """
    if position_ids.dim() == 3:  # or those of patches, (B, N, 2)
        return position_ids[0] if len(position_ids) in (3, 4) else None
    return position_ids[None] if position_ids.dim() == 1 else position_ids if position_ids.dim() == 2 else None


def _cache_in(values: Any) -> Cache | None:
    return next((each for each in values if isinstance(each, Cache)), None)


def _on_host(x: Tensor) -> Tensor:
    """Return x on the CPU; in a compiled graph return x itself."""
    return x if torch.compiler.is_compiling() else x.cpu()


def _copy_all_to_host(
    positions: Tensor | None, last: Tensor | None, largest: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (positions, last, largest), of shapes (B, N), (B, 1) and (1, 1), copied to the CPU as int64.

    Each is expanded to the largest B among them; None stays None. In a compiled graph they are not copied or expanded.

    last: if its batch size is not that of `positions`, it is replaced by its largest number, of shape (1, 1).
    """
    if last is not None and positions is not None and len(last) != len(positions):
        last = last.amax(0, keepdim=True)
    parts = [x for x in (positions, last, largest) if x is not None]
    if torch.compiler.is_compiling() or not parts:
        return positions, last, largest
    rows = max(map(len, parts))
    read = torch.cat([x.long().expand(rows, -1).to(parts[0].device) for x in parts], 1).cpu()
    found = iter(read.split([x.shape[1] for x in parts], 1))
    positions, last, largest = (None if x is None else next(found) for x in (positions, last, largest))
    return positions, last, largest


def _count_before(q_offset: int, visible: Tensor | None) -> Int64[Tensor, "B 1"]:
    """Return the number of tokens before position q_offset that are not padding, (1, 1) if visible is None."""
    if visible is None:
        return torch.full((1, 1), q_offset, dtype=torch.int64)
    before = torch.arange(visible.shape[1], device=visible.device) < q_offset
    return (visible & before).sum(1, keepdim=True)


def _document_starts(
    positions: Int64[Tensor, "B N"], visible: Bool[Tensor, "B N"] | None, least: Int64[Tensor, "B 1"]
) -> tuple[Bool[Tensor, "B N"], Int64[Tensor, "B 1"]]:
    """Return (True for tokens that begin another document, position of each sequence's last token).

    The position is `least` for a sequence of padding alone.

    visible: False for padding, which is left out of the comparison; None for no padding.
    least: the first token begins another document if its position is below this.
    """
    rows = max(len(positions), len(least), 0 if visible is None else len(visible))
    before = torch.cat([least.expand(rows, 1), positions.expand(rows, -1)], 1)
    if visible is None:
        return before[:, 1:] < before[:, :-1], before[:, -1:]
    slots = torch.arange(1, before.shape[1], device=before.device)
    place = torch.where(visible, slots, 0).cummax(1).values
    before = before.gather(1, torch.nn.functional.pad(place, (1, 0)).expand(rows, -1))
    return visible & (positions < before[:, :-1]), before[:, -1:]


def _refuse_if(refused: Tensor, reason: str) -> None:
    """Raise ValueError if `refused`, of shape (), is True; in a compiled graph, assert that it is False at run time."""
    if torch.compiler.is_compiling():
        assert_async(~refused, reason)
    elif bool(refused):
        raise ValueError(reason)
