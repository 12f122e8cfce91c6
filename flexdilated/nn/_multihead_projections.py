"""The projections of `nn.MultiheadAttention` on either side of attention, for modules that hold its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from .._attend import autocast_dtype
from .._validate import require_dense
from ..masks.core import require_bool

# B batch, H heads, N queries, M keys, E embed dim, D head dim


class MultiheadProjections(nn.Module):
    """Inputs to heads and back, by the parameters and sizes of an `nn.MultiheadAttention`, checked."""

    embed_dim: int
    num_heads: int
    head_dim: int
    kdim: int
    vdim: int
    batch_first: bool
    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    out_proj: nn.Linear

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, whatever an instance says.

        In eval without gradients `nn.TransformerEncoderLayer` runs its own dense kernel on the weights of `self_attn`
        and never calls it. This makes it, and `nn.TransformerEncoder`, take the ordinary path instead.
        """
        return False

    def heads_of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Float[Tensor, "B H N D"], ...]:
        """q, k and v, projected; a batch of one for inputs without. Raises for inputs that do not fit."""
        self._check_inputs(query, key, value)
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        return q, k, v

    def key_shape(self, key: Tensor) -> tuple[int, ...]:
        """(B, M), or (M,) without a batch: the shape of a padding mask."""
        return tuple(key.shape[:-1] if self.batch_first or key.dim() == 2 else key.shape[1::-1])

    def joined(self, out: Float[Tensor, "B H N D"], dims: int) -> Tensor:
        """The output projection of all heads, in the form of the query, which has this many dims."""
        if dims == 2:
            return self.out_proj(out.squeeze(0).transpose(0, 1).flatten(-2))
        return self.out_proj((out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)).flatten(-2))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, dim=-1)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = [w for w in separate if w is not None] if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        inputs = (query, key, value)
        return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]

    def _split_heads(self, x: Tensor) -> Float[Tensor, "B H N D"]:
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        tensors = {"query": query, "key": key, "value": value}
        for (name, x), width in zip(tensors.items(), (self.embed_dim, self.kdim, self.vdim), strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
            require_dense(name, x)
            if x.dim() not in (2, 3) or x.shape[-1] != width:
                raise ValueError(
                    f"{name} must have shape (tokens, {width}), or that with a batch dim; got {tuple(x.shape)}"
                )
            self._check_kind(name, x)
        _check_fit(query, key, value, batch_dim=0 if self.batch_first else 1)

    def _check_kind(self, name: str, x: Tensor) -> None:
        """Device as the parameters'; dtype too, unless autocast is there to convert it."""
        weight = self.out_proj.weight
        if x.device != weight.device:
            raise ValueError(f"{name} must be on the module's device {weight.device}; got {x.device}")
        if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
            raise ValueError(f"{name} must have the module's dtype {weight.dtype}; got {x.dtype}")


def refuse_weights(need_weights: bool) -> None:
    """Raise ValueError where a call asks for attention weights."""
    if require_bool("need_weights", need_weights):
        raise ValueError(
            "need_weights must be False, as attention weights are never formed: for a small input, read the "
            "allowed pairs from pattern.bind(...).mask_mod(); got need_weights=True"
        )


def _check_fit(query: Tensor, key: Tensor, value: Tensor, *, batch_dim: int) -> None:
    shapes = f"got query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim():
        raise ValueError(f"query, key and value must all be batched, or none of them; {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must agree in tokens and batch; {shapes}")
    if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
        raise ValueError(f"query and key must have one batch size, in dim {batch_dim}; {shapes}")
