"""A check for models that do not hand position_ids to their layers, and make a cache, with which packing is lost."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

_UNREAD = "_flexdilated_reads_no_positions"


def note_positions(layer: nn.Module, position_ids: object) -> None:
    """Remember whether a layer is given position_ids."""
    if not torch.compiler.is_compiling():
        setattr(layer, _UNREAD, position_ids is None)


def watch_packing(model: PreTrainedModel) -> None:
    """Let a pass raise ValueError whose packed position_ids neither transformers nor attention has seen."""
    if _refuse_lost_packing not in model._forward_hooks.values():
        model.register_forward_hook(_refuse_lost_packing, with_kwargs=True)


def _refuse_lost_packing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    given = signature(model.forward).bind_partial(*args, **kwargs).arguments if args else kwargs
    given = {**given, **given.get("kwargs", {})}
    positions = given.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or given.get("attention_mask") is not None:
        return
    cached = any(isinstance(each, Cache) for each in (output.values() if isinstance(output, dict) else output))
    unread = any(getattr(layer, _UNREAD, False) for layer in model.modules())
    if cached and unread and find_packed_sequence_indices(positions) is not None:
        raise ValueError(
            f"position_ids begin several documents in a row, which {type(model).__name__} does not hand on to its "
            "layers where it makes a cache: call it with use_cache=False; or, to attend to all keys whatever the "
            "positions, with an attention_mask of ones"
        )
