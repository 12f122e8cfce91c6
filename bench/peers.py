"""The compared implementations: dense attention, compiled FlexAttention, a loop over branches, rows of blocks."""

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from operator import add, or_

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flexdilated.engines import flash_sides
from flexdilated.masks import Pattern, block_mask

from ._jobs import Attention
from ._rules import LongNet, same_branch

# B batch, H heads, N tokens, D head dim

Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def dense_attention(*, causal: bool) -> Attention:
    """(q, k, v) -> out, each (B, H, N, D)."""
    return partial(scaled_dot_product_attention, is_causal=causal)


def natural_block_mask(spec: LongNet, *, num_heads: int, num_tokens: int) -> BlockMask:
    """The union of the branches as PyTorch builds it, from N x N cells a head, blocks of 128."""

    def any_branch(b, h, q, k):
        allowed = reduce(or_, (same_branch(h, q, k, length=length, rate=rate) for length, rate in spec.branches))
        return allowed & (k <= q) if spec.causal else allowed

    return create_block_mask(any_branch, None, num_heads, num_tokens, num_tokens, device="cpu")


def natural_attention(spec: LongNet, block_mask: BlockMask, *, mixture: bool, backend: str = "inductor") -> Attention:
    """(q, k, v) -> out; with `mixture` a pair counts once for every branch, by the log of their number, else once."""
    branches = spec.branches

    def with_multiplicity(score, b, h, q, k):
        count = torch.zeros_like(score)
        for length, rate in branches:
            count = count + same_branch(h, q, k, length=length, rate=rate)
        return score + count.log()

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend=backend)
    return partial(compiled, score_mod=with_multiplicity if mixture else None, block_mask=block_mask)


def on_kernel(kernel: SDPBackend, *, causal: bool) -> Attention:
    """PyTorch's dense attention on one of its kernels alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def flex_in_order(pattern: Pattern | None, *, flash: bool = False) -> Attention:
    """Compiled FlexAttention in the order of the tokens, with a pattern's block mask or without any.

    flash: on FlashAttention's kernels, in blocks that these take.
    """
    options = {"BACKEND": "FLASH"} if flash else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if pattern is not None:
            side = flash_sides(q.device, q.shape[3]) if flash else 128
            sizes = {"num_heads": q.shape[1], "device": q.device, "block_size": side}
            mask = block_mask(pattern, q.shape[2], k.shape[2], **sizes)
        return _compiled_flex()(q, k, v, block_mask=mask, kernel_options=options)

    return attend


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def cpu_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, natural lse) of ATen's flash attention on CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, natural lse) of ATen's flash attention on CUDA, whichever implementation is active."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


# A loop over LongNet's branches in eager PyTorch, as torchscale computes them, on the same kernels.
# F segments of L active tokens each


def branch_loop(spec: LongNet, kernel: Kernel = cpu_flash) -> Attention:
    """(q, k, v) -> out, each (B, H, N, D); `kernel` attends within the branches.

    For each branch: cut into segments, take every rate-th token from the head's offset on, run flash attention,
    scatter output and lse back to full length; then weight the branches by the softmax of their lses. As in
    torchscale the weights are constants to autograd, so dq and dk are not those of the forward. The attention raises
    ValueError unless every rate divides its segment length and every segment length the tokens.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs, lses = [], []
        for length, rate in spec.branches:
            length = min(length, q.shape[2])
            if q.shape[2] % length or length % rate:
                raise ValueError(f"the loop needs rate | segment | tokens; got {rate=}, {length=}, {q.shape[2]} tokens")
            active_q, active_k, active_v = (_active(x, length, rate) for x in (q, k, v))
            out, lse = kernel(active_q, active_k, active_v, spec.causal)
            outs.append(_to_full_length(out, q.shape, length, rate, fill=0.0))
            lses.append(_to_full_length(lse[..., None], (*q.shape[:3], 1), length, rate, fill=-torch.inf))
        weights = torch.stack(lses).detach().softmax(0)
        return reduce(add, (out * weight for out, weight in zip(outs, weights, strict=True)))

    return attend


def _active(x: Float[Tensor, "B H N D"], length: int, rate: int) -> Float[Tensor, "B HF L D"]:
    """The active tokens of each head, segments side by side with the heads."""
    phases = x.unflatten(2, (-1, length // rate, rate))
    shape = (*phases.shape[:4], 1, x.shape[3])
    return phases.gather(4, _offsets(shape, rate, x.device)).squeeze(4).flatten(1, 2)


def _to_full_length(
    x: Float[Tensor, "B HF L D"], shape: tuple[int, ...], length: int, rate: int, *, fill: float
) -> Float[Tensor, "B H N D"]:
    """The inverse of `_active`, with `fill` for the tokens that are not active."""
    full = x.new_full(shape, fill).unflatten(2, (-1, length // rate, rate))
    segments = x.unflatten(1, (shape[1], -1)).unsqueeze(4)
    return full.scatter(4, _offsets(segments.shape, rate, x.device), segments).flatten(2, 4)


def _offsets(shape: Sequence[int], rate: int, device: torch.device) -> Int64[Tensor, "B H F L 1 D"]:
    """The offset at which each head is active, h mod rate."""
    return (torch.arange(shape[1], device=device) % rate).view(1, -1, 1, 1, 1, 1).expand(*shape)


# Block-sparse attention in eager PyTorch, a few rows of blocks at a time.
# R rows of L blocks each, b tokens a block; c rows at once


def block_rows(
    columns: Int64[Tensor, "R L"], *, block: int, allowed: Bool[Tensor, "R b Lb"] | None = None, rows_at_once: int = 16
) -> Attention:
    """(q, k, v) -> out, each (B, H, N, D) with N = R * block.

    Row i attends to the key blocks columns[i], of them to the pairs in `allowed` (None: all); `rows_at_once` rows in
    one call.
    """
    added = None if allowed is None else torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, block)) for x in (q, k, v))
        parts = []
        for rows in torch.arange(len(columns)).split(rows_at_once):
            keys, values = (_pick(x, columns[rows]) for x in (k, v))
            mask = None if added is None else added[rows].repeat(q.shape[1], 1, 1)
            out = scaled_dot_product_attention(q[:, :, rows].flatten(1, 2), keys, values, attn_mask=mask)
            parts.append(out.unflatten(1, (-1, len(rows))))
        return torch.cat(parts, dim=2).flatten(2, 3)

    return attention


def _pick(x: Float[Tensor, "B H R b D"], columns: Int64[Tensor, "c L"]) -> Float[Tensor, "B Hc Lb D"]:
    picked = x.index_select(2, columns.flatten()).unflatten(2, columns.shape)
    return picked.flatten(3, 4).flatten(1, 2)
