"""Error budgets: output, lse and gradients err at most twice as much as dense SDPA does on the same tensors.

Errors are relative, in the Frobenius norm, against the float64 oracle on the same (rounded) inputs. Where numbers lie
in memory changes no result, in low precision and where rows overlap; laws in float64 draw layouts.
"""

from functools import cache, partial
from itertools import cycle, product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import MEMORY_LAYOUTS, laid_out
from tests.support import oracle
from tests.support.agreement import Attention, cotangents
from tests.support.ladders import LONGNET_4, scaled

H, N, D = 4, 509, 32


def selected(block: tuple[int, int]) -> tuple[masks.Pattern, oracle.Rule]:
    """Five drawn blocks for each row, beside the own chunk."""
    rows, columns = -(-N // block[0]), -(-N // block[1])
    drawn = torch.rand(2, rows, columns, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :5]
    rule = oracle.either(oracle.selected_blocks(drawn, block, rows), oracle.dilated(32, 1, 0))
    return masks.selected_blocks(drawn, block=block, most=5) | masks.chunked(32), rule


PATTERNS = {
    "longnet-4": (masks.longnet(*scaled(LONGNET_4, 64)), oracle.longnet(*scaled(LONGNET_4, 64))),
    "one sparse branch": (masks.longnet([100], [3]), oracle.longnet([100], [3])),
    **{f"selected blocks, {block}": selected(block) for block in ((32, 32), (1, 16))},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(dtype: torch.dtype, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, N, D).to(dtype) for heads in (H, kv_heads, kv_heads))
    return q, k, v


def outcome(attend: Attention, tensors: tuple[Tensor, ...], dtype: torch.dtype, through_lse: bool) -> list[Tensor]:
    """[out, lse, dq, dk, dv], with every number computed in `dtype`."""
    tensors = tuple(x.to(dtype).requires_grad_() for x in tensors)
    out, lse = attend(*tensors)
    grad_out, grad_lse = cotangents(out, lse, through_lse=through_lse)
    # The same cotangents for every precision: those that the narrowest can hold.
    grad_out, grad_lse = grad_out.bfloat16().to(out.dtype), grad_lse.bfloat16().to(lse.dtype)
    present = lse != -torch.inf
    total = (out * grad_out).double().sum() + (lse.masked_fill(~present, 0.0) * grad_lse).double().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, tensors)]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Relative errors; a row without keys has lse -inf in both, and counts as 0."""
    assert torch.equal(found[1] == -torch.inf, truth[1] == -torch.inf)
    pairs = ((a.double(), b.double()) for a, b in zip(found, truth, strict=True))
    pairs = ((a.masked_fill(b == -torch.inf, 0.0), b.masked_fill(b == -torch.inf, 0.0)) for a, b in pairs)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """SDPA over all pairs; its lse from the kernel beneath, without a gradient."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out, kernel_lse(q, k, v)


def kernel_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.detach() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, False, scale=q.shape[-1] ** -0.5)[1]


def every_pair(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(q, k, v, torch.ones(q.shape[1], q.shape[2], k.shape[2]))


@cache
def budget(dtype: torch.dtype, kv_heads: int) -> list[float]:
    """Twice the own errors of dense SDPA in this precision.

    For the lse over runs of 16 tokens: in low precision it errs less the more keys it sums, and ours sum few.
    """
    tensors = drawn(dtype, kv_heads)
    found, truth = (outcome(f, tensors, x, False) for f, x in ((dense, dtype), (every_pair, torch.float64)))
    runs = [x.detach()[:, :, :496].unflatten(2, (31, 16)).transpose(1, 2).flatten(0, 1) for x in tensors]
    found[1], truth[1] = kernel_lse(*runs), every_pair(*runs)[1].detach()
    return [2 * error for error in errors(found, truth)]


@pytest.mark.parametrize(("case", "kv_heads"), [*zip(product(PATTERNS, DTYPES), cycle([H, 1]))], ids=str)
def test_errors_are_within_budget(case, kv_heads):
    """The gradients both without and with a part that comes in through the lse; full with H = G, causal with G = 1."""
    (name, dtype), causal = case, kv_heads == 1
    pattern, rule = PATTERNS[name]
    if causal:
        pattern, rule = pattern & masks.causal(), oracle.both(rule, oracle.causal())
    tensors, positions = drawn(dtype, kv_heads), torch.arange(N)
    counts = oracle.counts(rule, range(H), H, positions, positions)

    def attend(q, k, v):
        return fd.attend(q, k, v, pattern, enable_gqa=True, return_lse=True)

    def expected(q, k, v):
        return oracle.attention(q, k, v, counts)

    for through_lse in (False, True):
        found = outcome(attend, tensors, dtype, through_lse)
        own = errors(found, outcome(expected, tensors, torch.float64, through_lse))
        excess = {
            part: (error, limit)
            for part, error, limit in zip(("out", "lse", "dq", "dk", "dv"), own, budget(dtype, kv_heads), strict=True)
            if not error <= limit
        }
        assert excess == {}


def test_only_what_asks_gets_a_gradient():
    q, k, v = drawn(torch.float32, H)
    pattern = masks.longnet([8, 16], [1, 2])
    assert not fd.attend(q, k, v, pattern).requires_grad
    out = fd.attend(q, k.requires_grad_(), v, pattern)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.abs().sum() > 0
    with torch.no_grad():
        assert not fd.attend(q, k, v, pattern).requires_grad
    with torch.inference_mode():
        assert torch.equal(fd.attend(q, k, v, pattern), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision_are_added_up_in_float32(dtype) -> None:
    """Over 512 queries, dk and dv are off by little more than one rounding; added up in `dtype` by twice that."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 512, 32, generator=generator).to(dtype) for _ in range(4))
    halves, wide = ([x.to(kind).requires_grad_() for x in (q, k, v)] for kind in (dtype, torch.float64))
    out = fd.attend(*halves, masks.causal(), engine="aten")
    truth = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    found, expected = torch.autograd.grad(out, halves, grad), torch.autograd.grad(truth, wide, grad.double())
    for name, part, right in zip(("dq", "dk", "dv"), found, expected, strict=True):
        error = float((part.double() - right).norm() / right.norm())
        assert error < 0.4 * torch.finfo(dtype).eps, f"{name} is off by {error:.2e}"


LAID_OUT = {
    "dense": masks.every(),
    "causal": masks.causal(),
    "mixture": masks.longnet([16, 64], [1, 4]) & masks.causal(),
    "blocks": masks.local_window(left=9, right=0) | masks.global_tokens(3),
    "documents": masks.causal() & masks.documents(torch.arange(70) // 13),
    "lengths": masks.longnet([16, 64], [1, 4]) & masks.lengths(torch.tensor([70, 41])),
}


def assert_same_anywhere(pattern: masks.Pattern | masks.Mixture, *given: Tensor, **tolerance: float) -> None:
    """Results for q, k, v and the gradient of out as they lie are those for contiguous copies."""
    attend = partial(fd.attend, pattern=pattern, enable_gqa=True, return_lse=True)
    results = []
    for *leaves, grad in (given, [x.contiguous() for x in given]):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, lse = attend(*leaves)
        results.append((out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)))
    assert_close(*results, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layouts", [MEMORY_LAYOUTS[:4], MEMORY_LAYOUTS[4:]], ids=str)
def test_every_dtype(layouts: tuple[str, ...], dtype: torch.dtype):
    """But for the last bits: a matrix product adds up otherwise where rows do not begin at whole words."""
    few, generator = 32 * torch.finfo(dtype).eps, torch.Generator().manual_seed(1)
    drawn = (torch.randn(2, heads, 70, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    given = [laid_out(x.to(dtype), layout) for x, layout in zip(drawn, layouts, strict=True)]
    for name in ("mixture", "blocks", "documents"):
        assert_same_anywhere(LAID_OUT[name], *given, rtol=few, atol=few)


@pytest.mark.parametrize(("name", "tokens"), [*((name, 70) for name in LAID_OUT), ("causal", 4)])
def test_rows_that_share_memory(name: str, tokens: int):
    """Sliding windows over one buffer: every row begins one number after the one before it."""
    buffer = torch.randn(4, 2, 4, tokens + 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_same_anywhere(LAID_OUT[name], *(x.unfold(-1, 8, 1) for x in buffer), rtol=1e-12, atol=1e-12)
