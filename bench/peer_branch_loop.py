"""Peer: a loop over LongNet's branches in eager PyTorch, as torchscale computes them, on the same kernels.

For each branch: cut into segments, take every rate-th token from the head's offset on, run flash attention,
scatter output and lse back to full length; then weight the branches by the softmax of their lses. As in
torchscale the weights are constants to autograd, so dq and dk are not those of the forward.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ._longnets import LongNet
from ._problem import Attention

# B batch, H heads, N tokens, D head dim; F segments of L active tokens each

Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def cpu_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, natural lse) of ATen's flash attention on CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, natural lse) of ATen's flash attention on CUDA, whichever implementation is active."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def branch_loop(spec: LongNet, kernel: Kernel = cpu_flash) -> Attention:
    """(q, k, v) -> out, each (B, H, N, D); `kernel` attends within the branches."""
    return lambda q, k, v: _branch_loop(q, k, v, spec, kernel)


def _branch_loop(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H N D"],
    v: Float[Tensor, "B H N D"],
    spec: LongNet,
    kernel: Kernel,
) -> Float[Tensor, "B H N D"]:
    """Raises ValueError unless every rate divides its segment length and every segment length the tokens."""
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
    """The phase at which each head is active: interleaved offsets, head h at h mod rate."""
    return (torch.arange(shape[1], device=device) % rate).view(1, -1, 1, 1, 1, 1).expand(*shape)
