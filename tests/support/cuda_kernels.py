"""Stand-ins for ATen's CUDA attention kernels: their arguments checked by the real operators' schemas, float64 math."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flexdilated._torch_private import NAMES

# B batch, H heads, Q queries, K keys, D head dim

MOST_PROBLEMS = 65535  # of a launch grid


class StandIns:
    """What `_torch_private` is to the CUDA kernels. `calls` counts those of each operator."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        """The result by definition; the real operator says on meta tensors what shapes it has."""
        self.calls[name] = self.calls.get(name, 0) + 1
        operator = NAMES[name].find()
        promised = operator(*tree_map_only(Tensor, _to_meta, args), **options)
        named = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)}
        found = (_backward if "grad_out" in named or "grad_out_" in named else _forward)(named | options)
        results = tuple(_like(each, shape) for each, shape in zip(found, promised, strict=False))
        return (*results, *promised[len(results) :])


def _to_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _like(found: Tensor, promised: Tensor) -> Tensor:
    """In the shape that is promised: an lse has a last dim of 1 in one kernel, and rows padded by inf in another."""
    if found.dim() < promised.dim():
        found = found.unsqueeze(-1)
    if found.shape != promised.shape:
        found = torch.nn.functional.pad(found, (0, promised.shape[-1] - found.shape[-1]), value=torch.inf)
    assert found.shape == promised.shape
    return found


def _scores(named: dict[str, Any]) -> Tensor:
    """(B, H, Q, K), after what the kernels demand, or get wrong without a word."""
    q, k, v, scale = named["query"], named["key"], named["value"], named["scale"]
    assert q.shape[:2] == k.shape[:2] == v.shape[:2], "equal batch and heads"
    assert q.shape[3] % 8 == 0
    assert q.shape[0] <= MOST_PROBLEMS
    assert q.shape[1] <= MOST_PROBLEMS
    for x in (q, k, v):
        assert x.stride(3) == 1
        assert all(begin * x.element_size() % 16 == 0 for begin in (*x.stride()[:3], x.storage_offset()))
    assert scale > 0
    assert named["dropout_p"] == 0.0
    scores = q.double() @ k.double().mT * scale
    if named["is_causal"]:
        assert q.shape[2] == k.shape[2], "kernels differ on which corner is the diagonal's"
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _forward(named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    scores = _scores(named)
    wide = torch.promote_types(named["query"].dtype, torch.float32)
    out = scores.softmax(-1) @ named["value"].double()
    return out.to(named["query"].dtype), scores.logsumexp(-1).to(wide)


def _backward(named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out = (named[name].double() for name in ("query", "key", "value", "out"))
    grad_out = named.get("grad_out", named.get("grad_out_")).double()
    lse = named["logsumexp"]
    assert lse.is_contiguous()
    lse = (lse.squeeze(-1) if lse.dim() == 4 else lse)[..., : q.shape[2]]
    weights = (_scores(named) - lse[..., None]).exp()
    delta = (grad_out * out).sum(-1, keepdim=True)
    slopes = weights * (grad_out @ v.mT - delta) * named["scale"]
    dtype = named["query"].dtype
    return (slopes @ k).to(dtype), (slopes.mT @ q).to(dtype), (weights.mT @ grad_out).to(dtype)
