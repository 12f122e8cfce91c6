"""ATen's attention kernels on one batch of dense, causal or (on CPU) masked problems, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ... import _torch_private
from ...masks.core import device_kind
from .._operands import additive_mask, readable
from . import _kernel_cuda

# B batch, H query heads, G key/value heads, F folds, Q queries, K keys, D head dim

_LEAST_SCALE = torch.finfo(torch.float32).tiny  # the kernels keep the scale in float32; for a smaller one, scores are 0
_ROWS_OF_LARGE_BLOCKS = 768  # rows from which the backward on CPU has blocks of 256 rows; below, of 64 or 32
_FLOAT32_BYTES = 8 << 20  # float32 copies that exist at one time: they stay in a CPU cache
_META_CHUNKS = 2  # chunks that are run on the meta device: memory does not change after the second
_KERNEL_MODULES = {"cuda": _kernel_cuda}  # kernel family -> module with `forward` and `backward`, which take no masks


@dataclass(frozen=True)
class KernelTensors:
    """Queries, keys and values of attention problems, one for each batch entry, query head and fold.

    G divides H.

    visible: True for keys that may be attended to, on CPU only; None: all keys. k and v must be 0 at the other keys:
        kernels read them too, and would spread a NaN.
    """

    q: Float[Tensor, "B H F Q D"]
    k: Float[Tensor, "B G F K D"]
    v: Float[Tensor, "B G F K D"]
    visible: Bool[Tensor, "B G F K"] | None = None


def forward(
    x: KernelTensors, *, scale: float, is_causal: bool, bias: Float[Tensor, "#H #Q K"] | None = None
) -> tuple[Float[Tensor, "B H F Q D"], Float[Tensor, "B H F Q"]]:
    """Return (out, natural lse) of each problem, dense or causal; out in the dtype of q, lse in float32 or wider.

    is_causal: query i sees keys 0 to i.
    bias: added to the scores, on CPU only; None: nothing. There is no bias together with x.visible.

    A query whose keys are all hidden has output 0; its lse is -inf if x.visible hides them, 0 if a bias of -inf does.
    """
    fold = _Folding.of(x)
    blind, mask = _blind_queries(x, is_causal=is_causal), fold.mask(x, bias)
    parts = (fold.enter(part) for part in (fill_blind(x.q, blind), x.k, x.v))
    out, lse = flash_forward(*parts, scale=scale, is_causal=is_causal, mask=mask)
    return fold.leave(out), fill_blind(fold.leave(lse), blind, -torch.inf)


def backward(
    x: KernelTensors,
    grad_out: Float[Tensor, "B H F Q D"],
    out: Float[Tensor, "B H F Q D"],
    lse: Float[Tensor, "B H F Q"],
    *,
    scale: float,
    is_causal: bool,
    bias: Float[Tensor, "#H #Q K"] | None = None,
) -> _kernel_cuda.ProblemGradients:
    """Return (dq, dk, dv) of `forward`, in the dtype of q or float32, from its out and lse.

    If out and lse are of a softmax over more keys, the results are the gradients through the keys in x.

    lse: +inf, not -inf, for a query without keys; not read for one whose keys in x are all hidden by x.visible.
    """
    fold = _Folding.of(x)
    blind, mask = _blind_queries(x, is_causal=is_causal), fold.mask(x, bias)
    grad_out, q, out = (fill_blind(part, blind) for part in (grad_out, x.q, out))
    parts = (fold.enter(part) for part in (grad_out, q, x.k, x.v, out, fill_blind(lse, blind, torch.inf)))
    grads = flash_backward(*parts, scale=scale, is_causal=is_causal, mask=mask)
    return fold.leave(grads[0]), fold.leave(grads[1]), fold.leave(grads[2])


@dataclass(frozen=True)
class _Folding:
    """Reshapes of (B, H, F, ...) to the two leading dims of a kernel and back, without a copy where strides allow it.

    keep_heads: True for (B * F, H), False for (B * H * F, 1). True if tokens precede heads in memory (a transposed
        (B, N, H, D)), if there are fewer key/value heads than query heads, or if B is 1 and the folds leave some tokens
        out.
    """

    batch: int
    folds: int
    keep_heads: bool

    @classmethod
    def of(cls, x: KernelTensors) -> _Folding:
        grouped = x.k.shape[1] != x.q.shape[1]
        batch, heads, folds = x.q.shape[:3]
        tokens_outermost = heads > 1 and x.q.stride(1) < x.q.stride(3)
        # Folds that leave some tokens out are flattened with the heads by a copy, but with a batch of 1 by a view.
        leave_some = batch == 1 and heads > 1 and folds > 1 and x.q.stride(1) != folds * x.q.stride(2)
        return cls(batch, folds, grouped or tokens_outermost or leave_some)

    def enter(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1) if self.keep_heads else x.flatten(0, 2).unsqueeze(1)

    def leave(self, x: Tensor) -> Tensor:
        if self.keep_heads:
            return x.unflatten(0, (self.batch, self.folds)).transpose(1, 2)
        return x.squeeze(1).unflatten(0, (self.batch, -1, self.folds))

    def mask(self, x: KernelTensors, bias: Float[Tensor, "#H #Q K"] | None) -> Tensor | None:
        """Return the kernel's additive mask: `bias`, for all batch entries and folds, or -inf at keys not in x.visible.

        It broadcasts against the kernel's scores (batch, heads, Q, K). None if there is neither; `bias` and x.visible
        exclude each other.
        """
        if x.visible is not None:
            assert bias is None, "where keys are hidden, nothing else is added"
            rows = self.enter(additive_mask(x.visible, x.q.dtype))
            return rows.repeat_interleave(x.q.shape[1] // x.k.shape[1], dim=1).unsqueeze(2)
        if bias is None or self.keep_heads or len(bias) == 1:
            return None if bias is None else bias[None]
        return bias[None, :, None].expand(self.batch, -1, self.folds, -1, -1).flatten(0, 2).unsqueeze(1)


def _blind_queries(x: KernelTensors, *, is_causal: bool) -> Bool[Tensor, "B H F #Q"] | None:
    """Return a mask, True for queries whose keys are all hidden by x.visible; None if there is no such query."""
    if x.visible is None:
        return None
    if is_causal:
        last = torch.arange(x.q.shape[3]).clamp(max=x.k.shape[3] - 1)
        blind = x.visible.cumsum(-1)[..., last] == 0
    else:
        blind = ~x.visible.any(-1, keepdim=True)
    return blind.repeat_interleave(x.q.shape[1] // x.k.shape[1], dim=1) if bool(blind.any()) else None


def fill_blind(x: Shaped[Tensor, "*rows"], blind: Bool[Tensor, "..."] | None, value: float = 0.0) -> Tensor:
    """Return x with `value` at queries that are True in `blind`; x itself if blind is None.

    x has a number or a vector for each query.
    """
    if blind is None:
        return x
    return x.masked_fill(blind if blind.dim() == x.dim() else blind.unsqueeze(-1), value)


def flash_forward(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    *,
    scale: float,
    is_causal: bool = False,
    mask: Float[Tensor, "#B #H #Q K"] | None = None,
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B H Q"]]:
    """Return (out, natural lse) of attention by the ATen kernel for the device of q; lse in float32 or wider.

    G may be a divisor of H.

    is_causal: query i sees keys 0 to i.
    mask: added to the scores, in the dtype of q or in float32, on CPU only; a query with a row of -inf has lse 0, not
        -inf.
    """
    other = _device_kernels(q)
    factor, scale = _positive_scale(scale, is_causal or other is not None)
    q = q if factor == 1.0 else q * factor
    q, k, v = readable(q), readable(k), readable(v)
    if other is not None:
        assert mask is None
        return other.forward(q, k, v, scale=scale, is_causal=is_causal)
    return _torch_private.flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def flash_backward(
    grad_out: Float[Tensor, "B H Q D"],
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    out: Float[Tensor, "B H Q D"],
    lse: Float[Tensor, "B H Q"],
    *,
    scale: float,
    is_causal: bool = False,
    mask: Float[Tensor, "#B #H #Q K"] | None = None,
) -> _kernel_cuda.ProblemGradients:
    """Return (dq, dk, dv) of `flash_forward`, in q's dtype or float32; out and lse may be of a softmax over more keys.

    Weights are exp(score - lse), so a query with lse +inf has gradient 0 and adds nothing to dk and dv.
    """
    other = _device_kernels(q)
    factor, scale = _positive_scale(scale, is_causal or other is not None)
    q = q if factor == 1.0 else q * factor
    grad_out, q, k, v, out = (readable(x) for x in (grad_out, q, k, v, out))
    lse = lse.contiguous()
    if other is None:
        run = _backward_in_float32 if _is_better_in_float32(q) else _backward_on_cpu
        dq, dk, dv = run(grad_out, q, k, v, out, lse, mask, is_causal=is_causal, scale=scale)
    else:
        assert mask is None
        dq, dk, dv = other.backward(grad_out, q, k, v, out, lse, scale=scale, is_causal=is_causal)
    return dq if factor == 1.0 else dq * factor, dk, dv


def _is_better_in_float32(q: Float[Tensor, "B H Q D"]) -> bool:
    """True if the backward on CPU is faster or more accurate in float32 than in the dtype of q."""
    # PyTorch's kernel for float16 is slow. Its kernels sum dk and dv over query blocks in q's dtype; with few
    # queries the blocks are smaller, so bfloat16 is rounded more often, while its kernel is no faster than float32.
    return q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and q.shape[2] < _ROWS_OF_LARGE_BLOCKS)


def _backward_in_float32(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> _kernel_cuda.ProblemGradients:
    """Return (dq, dk, dv) of `flash_forward` on CPU, computed and returned in float32.

    Chunks of the batch bound the memory of float32 copies.
    """
    grads = tuple(torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
    numbers = 3 * q[:1].numel() + 2 * k[:1].numel()
    at_once = max(1, _FLOAT32_BYTES // (4 * numbers))
    begins = range(0, len(q), at_once)
    if q.is_meta:  # only memory matters, and it does not change after the second chunk
        begins = begins[:_META_CHUNKS]
    for begin in begins:
        some = slice(begin, begin + at_once)
        few_grads, *few = (x[some].float() for x in (grad_out, q, k, v, out))
        hidden = None if mask is None else (mask[some] if len(mask) > 1 else mask).float()
        found = _backward_on_cpu(
            few_grads, few[0], few[1], few[2], few[3], lse[some], hidden, is_causal=is_causal, scale=scale
        )
        for grad, part in zip(grads, found, strict=True):
            grad[some] = part
    return grads[0], grads[1], grads[2]


def _backward_on_cpu(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> _kernel_cuda.ProblemGradients:
    return _torch_private.flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def _device_kernels(x: Tensor) -> ModuleType | None:
    """Return the module with `forward` and `backward` of the device's kernels; None for devices "cpu" and "meta"."""
    return _KERNEL_MODULES.get(device_kind(x.device).kernels)


def _positive_scale(scale: float, needed: bool) -> tuple[float, float]:
    """Return (factor on q, scale of the kernel), which together give the scores of `scale`; (1, scale) if not `needed`.

    Where needed, a scale too near to 0 for float32 counts as 0.

    needed: True if the kernel's scale must be above 0.
    """
    # A kernel that hides keys by -inf before it scales: a negative scale would give +inf, and 0 NaN.
    if not needed or scale >= _LEAST_SCALE:
        return 1.0, scale
    return (-1.0, -scale) if scale <= -_LEAST_SCALE else (0.0, 1.0)
