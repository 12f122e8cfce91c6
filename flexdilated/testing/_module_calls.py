"""How a module is called, and which of its abilities there are to check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ..masks.core._check import require_choice

# B batch, H query heads, G key/value heads, N tokens, D head dim

Result = Any  # out, or a tuple of which the first is out


def plainly(module: Callable[..., Result], q: Tensor, k: Tensor, v: Tensor) -> Result:
    """The call where nothing else is said."""
    return module(q, k, v)


@dataclass(frozen=True)
class Calls:
    """How a module is called: functions that take the module, and q, k and v in `layout`.

    Each returns the output in that layout, or a tuple of which it is the first. In "BHND" and "BNHD" a second tensor
    of shape (B, H, N) is taken for the natural-log lse, and checked too, save at N = H, where it may be weights. In
    "BNE" heads lie side by side, E = H D, as in `nn.MultiheadAttention(batch_first=True)`: its projections must be the
    identity (`identity_projections`).

    plain: (module, q, k, v). Calls the module with these three.
    padded: (module, q, k, v, hidden), hidden (B, N) True for keys to leave out.
    packed: (module, q, k, v, ids), ids (B, N) the document of each position, ascending. `documents` says what is meant:
        "restart", each document attends as it would apart (`pattern.per_document(ids)`), or "cut", pairs across
        documents are forbidden (`pattern & masks.documents(ids)`).
    decoded: (module, q, k, v): what decoding gives, token by token, for all tokens.
    over_ranks: (mesh) -> the module for a rank of a one-dimensional DeviceMesh, which is then called by `plain` with
        this rank's tokens, in order; a function of a module's own, as it is pickled.
    """

    layout: Literal["BHND", "BNHD", "BNE"] = "BHND"
    plain: Callable[..., Result] = plainly
    padded: Callable[..., Result] | None = None
    packed: Callable[..., Result] | None = None
    documents: Literal["restart", "cut"] = "restart"
    decoded: Callable[..., Result] | None = None
    over_ranks: Callable[[Any], Callable[..., Result]] | None = None

    def __post_init__(self) -> None:
        require_choice("layout", self.layout, ("BHND", "BNHD", "BNE"))
        require_choice("documents", self.documents, ("restart", "cut"))
        for name in ("plain", "padded", "packed", "decoded", "over_ranks"):
            value = getattr(self, name)
            if not (callable(value) or (value is None and name != "plain")):
                raise TypeError(f"{name} must be a function; got {value!r:.80}")

    def into_layout(self, x: Tensor) -> Tensor:
        """(B, H, N, D) as the module takes it."""
        if self.layout == "BHND":
            return x
        x = x.transpose(1, 2)
        return x.flatten(2) if self.layout == "BNE" else x

    def out_of_layout(self, x: Tensor, num_heads: int) -> Tensor:
        """(B, H, N, D) of what the module gives."""
        if self.layout == "BHND":
            return x
        return (x.unflatten(2, (num_heads, -1)) if self.layout == "BNE" else x).transpose(1, 2)


def identity_projections(module: nn.Module) -> nn.Module:
    """Set the projections of a module shaped like `nn.MultiheadAttention` to the identity, in place; returns it.

    The module then maps the query, key and value that it is given to its attention's output. Parameters:
    in_proj_weight, or q_proj_weight, k_proj_weight and v_proj_weight; in_proj_bias, if any; out_proj, an nn.Linear.
    Raises TypeError for another module, and ValueError where key or value have another width than the query.
    """
    named = dict(module.named_parameters())
    packed, separate = named.get("in_proj_weight"), [named.get(f"{name}_proj_weight") for name in "qkv"]
    weights = [weight for weight in (packed, *separate) if weight is not None]
    if not weights or "out_proj.weight" not in named:
        raise TypeError(
            "identity_projections needs the parameters of nn.MultiheadAttention, in_proj_weight, or q_proj_weight and "
            f"so on, and out_proj.weight; got {type(module).__name__} with {sorted(named)}"
        )
    for weight in (*(weights[0].chunk(3) if packed is not None else weights), named["out_proj.weight"]):
        if weight.shape[0] != weight.shape[1]:
            raise ValueError(f"projections must be square to be the identity; got {tuple(weight.shape)}")
        nn.init.eye_(weight.data)
    for name in ("in_proj_bias", "out_proj.bias"):
        if name in named:
            nn.init.zeros_(named[name])
    return module
