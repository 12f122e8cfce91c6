"""ATen's attention kernels on CUDA, dense or causal: flash, cuDNN and memory-efficient, under one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import _torch_private

# B batch, H query heads, G key/value heads, Q queries, K keys, D head dim

_PROBLEMS_AT_ONCE = 1 << 15  # batch and heads are dims of the launch grid, which are at most 65535
_DIM_STEP, _ALIGNED_BYTES = 8, 16  # the kernels load 16 bytes at once
_LSE_STEP = 32  # the memory-efficient kernels pad rows of the lse
_HOPPER, _LAST_UNSOUND_CUDNN = (9, 0), 91500

ProblemGradients = tuple[Tensor, Tensor, Tensor]  # (dq, dk, dv)
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CudaKernel:
    """One of ATen's CUDA attention kernels, with the inputs that it supports.

    forward: (q, k, v, scale, is_causal) -> (out, natural lse).
    backward: (grad_out, q, k, v, out, lse, scale, is_causal) -> (dq, dk, dv). out and lse may be of a softmax over more
        keys, as weights are recomputed as exp(score - lse), and delta as the row sums of grad_out * out.
    least_keys: minimum number of keys.
    most_dim: function from the compute capability to the largest head dim, 0 for none.
    switch: returns True if torch lets `scaled_dot_product_attention` use the kernel.

    For both functions q, k and v have equal numbers of heads and a head dim that is a multiple of 8, and a causal
    problem has as many queries as keys.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    least_keys: int
    most_dim: Callable[[tuple[int, int]], int]
    switch: Callable[[], bool]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., ProblemGradients]

    def serves(self, dtype: torch.dtype, head_dim: int, num_keys: int, capability: tuple[int, int]) -> bool:
        known = dtype in self.dtypes and (dtype != torch.bfloat16 or capability >= (8, 0))
        padded = head_dim + -head_dim % _DIM_STEP
        return known and num_keys >= self.least_keys and padded <= self.most_dim(capability) and self.switch()


def choose(dtype: torch.dtype, head_dim: int, num_keys: int, device: torch.device) -> CudaKernel:
    """Return the first kernel, in order of preference, that supports this dtype, head dim and number of keys.

    Kernels that are switched off in torch (see torch.nn.attention.sdpa_kernel) are passed over. Raises ValueError if
    none is left.
    """
    capability = torch.cuda.get_device_capability(device)
    for kernel in _kernels_by_preference(capability):
        if kernel.serves(dtype, head_dim, num_keys, capability):
            return kernel
    raise ValueError(
        f"aten needs one of ATen's {', '.join(kernel.name for kernel in KERNELS)} kernels on {device}, and none that "
        f"is switched on (torch.nn.attention.sdpa_kernel) serves {dtype} at head dim {head_dim} with {num_keys} keys; "
        "engine='flex' may"
    )


def _kernels_by_preference(capability: tuple[int, int]) -> tuple[CudaKernel, ...]:
    """Return the three kernels in order of preference.

    From compute capability 9.0 (Hopper) on, if cuDNN is above 9.15.0: cuDNN, flash, memory-efficient. Otherwise: flash,
    cuDNN, memory-efficient.
    """
    # torch differs: it prefers cuDNN only on some capabilities 9.x and 10.x, and elsewhere tries it after the
    # memory-efficient kernel.
    flash, cudnn, efficient = KERNELS
    # As in torch: kernels of cuDNN up to 9.15.0 fail on lengths that are not multiples of 128, see pytorch#169849.
    is_sound = (torch.backends.cudnn.version() or 0) > _LAST_UNSOUND_CUDNN
    return (cudnn, flash, efficient) if capability >= _HOPPER and is_sound else KERNELS


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return (out, natural lse in float32) of q (B, H, Q, D) over k and v (B, G, K, D) on CUDA; G divides H.

    Raises ValueError if no kernel supports the problem.

    scale: above 0.
    is_causal: query i sees keys 0 to i.
    """
    kernel, dim = _kernel_of(q, k, is_causal), q.shape[-1]
    q, k, v = (_make_loadable(x) for x in (q, _per_query_head(k, q), _per_query_head(v, q)))

    def attend(rows: slice, keys: slice, causal: bool) -> tuple[Tensor, ...]:
        return _call_in_batches(
            lambda *x: kernel.forward(*x, scale, causal), q[:, :, rows], k[:, :, keys], v[:, :, keys]
        )

    parts = [attend(*part) for part in _problem_parts(q.shape[2], k.shape[2], is_causal)]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return out[..., :dim], lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, is_causal: bool
) -> ProblemGradients:
    """Return (dq, dk, dv) of `forward`, shaped as q, k and v; out and lse may be of a softmax over more keys."""
    kernel, dim, groups = _kernel_of(q, k, is_causal), q.shape[-1], q.shape[1] // k.shape[1]
    k, v = _per_query_head(k, q), _per_query_head(v, q)
    grad_out, q, k, v, out = (_make_loadable(x) for x in (grad_out, q, k, v, out))

    def gradients(rows: slice, keys: slice, causal: bool) -> tuple[Tensor, ...]:
        grad, queries, result, sums = (x[:, :, rows] for x in (grad_out, q, out, lse))
        sides = (grad, queries, k[:, :, keys], v[:, :, keys], result, sums)
        return _call_in_batches(lambda *x: kernel.backward(*x, scale, causal), *sides)

    parts = list(_problem_parts(q.shape[2], k.shape[2], is_causal))
    if len(parts) == 1 and parts[0][1].stop == k.shape[2]:
        dq, dk, dv = gradients(*parts[0])
    else:
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys, causal in parts:
            dq[:, :, rows], *others = gradients(rows, keys, causal)
            for total, grad in zip((dk, dv), others, strict=True):
                total[:, :, keys] += grad
    dk, dv = (_per_key_head(x, groups)[..., :dim] for x in (dk, dv))
    return dq[..., :dim], dk, dv


def _kernel_of(q: Tensor, k: Tensor, is_causal: bool) -> CudaKernel:
    """Return a kernel for attention of q (B, H, Q, D) over k (B, G, K, D).

    It supports every part from `_problem_parts`, as it supports the part with the fewest keys.
    """
    least = min(keys.stop for _, keys, _ in _problem_parts(q.shape[2], k.shape[2], is_causal))
    return choose(q.dtype, q.shape[-1], least, q.device)


def _problem_parts(queries: int, keys: int, is_causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Yield (slice of queries, slice of keys, is_causal) of each part of a problem of `queries` by `keys` tokens.

    A causal problem is split into a square causal part and, if there are queries after the last key, a dense part with
    these queries. Any other problem is one dense part.
    """
    # Kernels disagree on causal problems with unequal numbers of queries and keys.
    square = min(queries, keys) if is_causal else 0
    if square:
        yield slice(0, square), slice(0, square), True
    if square < queries:
        yield slice(square, queries), slice(0, keys), False


def _call_in_batches(call: Callable[..., tuple[Tensor, ...]], *operands: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `call`, computed for chunks of the batch (dim 0) that fit CUDA's launch grid."""
    at_once = max(1, _PROBLEMS_AT_ONCE // operands[0].shape[1])
    if len(operands[0]) <= at_once:
        return call(*operands)
    portions = zip(*(x.split(at_once) for x in operands), strict=True)
    return tuple(torch.cat(each) for each in zip(*(call(*portion) for portion in portions), strict=True))


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _per_key_head(x: Tensor, groups: int) -> Tensor:
    """Return the sums of x (B, H, K, D) over each `groups` consecutive heads: (B, H / groups, K, D), in x's dtype.

    The sums are computed in float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2, dtype=wide).to(x.dtype)


def _make_loadable(x: Tensor) -> Tensor:
    """Return x with its head dim padded with zeros to a multiple of 8.

    If no padding is needed, x is copied if its vectors are strided or not 16-byte aligned, else returned unchanged.
    """
    missing = -x.shape[-1] % _DIM_STEP
    if missing:
        return pad(x, (0, missing))
    begins = (*x.stride()[:-1], x.storage_offset())
    aligned = x.stride(-1) == 1 and all(begin * x.element_size() % _ALIGNED_BYTES == 0 for begin in begins)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _torch_private.flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse


def _flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> ProblemGradients:
    seed, offset = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)  # read for dropout only
    return _torch_private.flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, offset,
        scale=scale,
    )  # fmt: skip


# Some versions of cuDNN return the lse with the strides of the operands; with one head the layout is unambiguous.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    one_head = (x.flatten(0, 1).unsqueeze(1) for x in (q, k, v))
    out, lse, *_ = _torch_private.cudnn_attention(*one_head, None, True, 0.0, is_causal, False, scale=scale)
    return out.view(q.shape), lse.view(q.shape[:3])


def _cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> ProblemGradients:
    one_head = (x.flatten(0, 1).unsqueeze(1) for x in (grad_out, q, k, v, out))
    stats = lse.flatten(0, 1)[:, None, :, None].contiguous()
    seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))  # read for dropout only
    dq, dk, dv = _torch_private.cudnn_attention_backward(
        *one_head, stats, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, is_causal, scale=scale
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _torch_private.efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> ProblemGradients:
    padded = pad(lse, (0, -lse.shape[2] % _LSE_STEP), value=torch.inf).contiguous()
    seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))  # read for dropout only
    dq, dk, dv, _ = _torch_private.efficient_attention_backward(
        grad_out, q, k, v, None, out, padded, seed, offset, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    return dq, dk, dv


def _flash_most_dim(capability: tuple[int, int]) -> int:
    # For larger head dims the backward needs the shared memory of data-centre devices.
    return 0 if capability < (8, 0) else 256 if capability == (8, 0) or capability[0] in (9, 10) else 192


def _cudnn_most_dim(capability: tuple[int, int]) -> int:
    return 128 if capability >= (8, 0) else 0


def _efficient_most_dim(capability: tuple[int, int]) -> int:
    return 1 << 16


def _cudnn_switch() -> bool:
    """True if cuDNN attention is enabled and torch does not require determinism, which its backward lacks."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.backends.cuda.cudnn_sdp_enabled() and not strict


_flash_switch, _efficient_switch = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled
_ANY = (*_HALVES, torch.float32)

KERNELS = (  # with the limits of torch's sdp_utils.cpp
    CudaKernel("flash", _HALVES, 1, _flash_most_dim, _flash_switch, _flash_forward, _flash_backward),
    CudaKernel("cuDNN", _HALVES, 2, _cudnn_most_dim, _cudnn_switch, _cudnn_forward, _cudnn_backward),
    CudaKernel(
        "memory-efficient", _ANY, 1, _efficient_most_dim, _efficient_switch, _efficient_forward, _efficient_backward
    ),
)
