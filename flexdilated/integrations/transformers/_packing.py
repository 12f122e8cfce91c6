"""Errors for packed position_ids if a cache has keys, or if a model does not pass them to its layers."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

_UNREAD = "_flexdilated_reads_no_positions"
_WATCHED = "_flexdilated_refuses_lost_packing"


def note_positions(layer: nn.Module, position_ids: object) -> None:
    """Record whether a layer receives position_ids."""
    if not torch.compiler.is_compiling():
        setattr(layer, _UNREAD, position_ids is None)


def watch_packing(model: PreTrainedModel) -> None:
    """Add a hook: a pass raises ValueError if neither transformers nor attention has seen its packed position_ids."""
    if not getattr(model, _WATCHED, False):
        model.register_forward_hook(_refuse_lost_packing, with_kwargs=True)
        setattr(model, _WATCHED, True)


def _refuse_lost_packing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    given = signature(model.forward).bind_partial(*args, **kwargs).arguments if args else kwargs
    given = {**given, **given.get("kwargs", {})}
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or given.get("attention_mask") is not None:
        return
    cached = any(isinstance(each, Cache) for each in (output.values() if isinstance(output, dict) else output))
    unread = any(getattr(layer, _UNREAD, False) for layer in model.modules())
    if cached and unread and find_packed_sequence_indices(positions) is not None:
        raise _lost(f"{type(model).__name__} does not hand them to its layers where it makes a cache")


def refuse_packed(position_ids: Tensor, seen: int) -> None:
    """Raise ValueError for positions (B, N) with several documents in a row, or a first position below `seen`."""
    first = position_ids[:, 0]
    before = bool(((first >= 0) & (first < seen)).any())
    if before or find_packed_sequence_indices(position_ids) is not None:
        raise _lost("keys of a cache do not say to which one they belong")


def _lost(reason: str) -> ValueError:
    return ValueError(
        f"position_ids begin several documents in a row, and {reason}: call the model on whole rows with "
        "use_cache=False; or, to attend to all keys whatever the positions, with an attention_mask of ones"
    )
