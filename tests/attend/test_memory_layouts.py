"""Where numbers lie in memory changes no result: eight layouts of every operand, through every public entry.

`attend`, `attention_received`, sinks, flex around its kernel, ring, exchange and heads draw them in their own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Features
from flexdilated.engines._call import Call
from flexdilated.engines.flex import _flex_op
from flexdilated.engines.flex._flex import run_flex
from flexdilated.engines.flex._program import FlexProgram
from flexdilated.testing import MEMORY_LAYOUTS, laid_out
from tests.engines.test_flex import dense_flex

# B batch, H heads, N tokens, D head dim, E embedding dim

# Each of the eight, of one operand or another.
TWICE_FOUR = pytest.mark.parametrize("layouts", [MEMORY_LAYOUTS[:4], MEMORY_LAYOUTS[4:]], ids=str)
LAYOUTS = st.tuples(*[st.sampled_from(MEMORY_LAYOUTS)] * 4)  # of q, k, v and the gradient of out
MIXTURE = masks.longnet([16, 64], [1, 4]) & masks.causal()
PATTERNS = {
    "dense": masks.every(),
    "causal": masks.causal(),
    "mixture": MIXTURE,
    "blocks": masks.local_window(left=9, right=0) | masks.global_tokens(3),
    "documents": masks.causal() & masks.documents(torch.arange(70) // 13),
    "lengths": masks.longnet([16, 64], [1, 4]) & masks.lengths(torch.tensor([70, 41])),
}


def drawn(seed: int, *layouts: str, dtype: torch.dtype = torch.float64, H: int = 4) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, 70, 8) for heads in (H, 2, 2, H)]
    given = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [laid_out(x, layout) for x, layout in zip(given, layouts, strict=True)]


def outcome(attend: Callable[..., Tensor | tuple], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Results and gradients, of leaves that lie as these do."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    found = attend(*leaves)
    results = [found] if isinstance(found, Tensor) else list(found)
    return [*(x.detach() for x in results), *torch.autograd.grad(results[0], leaves, grad)]


def assert_same_anywhere(attend: Callable[..., Tensor | tuple], *given: Tensor, **tolerance: float) -> None:
    """As laid out, as of contiguous copies; the last tensor is the gradient of the output."""
    expected = outcome(attend, *_split([x.contiguous() for x in given]))
    for found, truth in zip(outcome(attend, *_split(given)), expected, strict=True):
        assert_close(found, truth, **(tolerance or {"rtol": 1e-12, "atol": 1e-12}))


def _split(given) -> tuple[list[Tensor], Tensor]:
    *leaves, grad = given
    return leaves, grad


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=8)
@given(engine=st.sampled_from(["aten", "portable", "reference"]), layouts=LAYOUTS, seed=st.integers(0, 99))
def test_attend(name: str, engine: str, layouts: tuple[str, ...], seed: int):
    options = {"enable_gqa": True, "return_lse": True, "engine": engine}
    assert_same_anywhere(lambda q, k, v: fd.attend(q, k, v, PATTERNS[name], **options), *drawn(seed, *layouts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@TWICE_FOUR
def test_every_dtype(layouts: tuple[str, ...], dtype: torch.dtype):
    """But for the last bits: a matrix product adds up otherwise where rows do not begin at whole words."""
    few = 32 * torch.finfo(dtype).eps
    for pattern in (MIXTURE, PATTERNS["blocks"], PATTERNS["documents"]):
        given = drawn(1, *layouts, dtype=dtype)
        assert_same_anywhere(lambda *x, p=pattern: fd.attend(*x, p, enable_gqa=True), *given, rtol=few, atol=few)


@TWICE_FOUR
def test_traced(layouts: tuple[str, ...]):
    """As torch.compile hands operands to the op, which promises strides of its results."""
    attend = partial(fd.attend, pattern=MIXTURE, enable_gqa=True)
    given = drawn(2, *layouts)
    found = outcome(torch.compile(attend, backend="aot_eager"), *_split(given))
    for one, truth in zip(found, outcome(attend, *_split([x.contiguous() for x in given])), strict=True):
        assert_close(one, truth, rtol=1e-12, atol=1e-12)


@given(LAYOUTS)
def test_around_the_kernel_of_flex(layouts: tuple[str, ...]):
    """What reaches the engine's kernel, which is dense here: rows side by side, and the same numbers."""
    q, k, v, _ = drawn(4, *layouts)
    key = Call(MIXTURE.text, 4, 2, 70, 70, 0, 0, 0, 4, 1, ())
    given = []

    def run(program: FlexProgram, q: Tensor, k: Tensor, v: Tensor, features: Features):
        given.extend((q, k, v))
        return run_flex(program, q, k, v, features, dense_flex)

    with mock.patch.object(_flex_op, "run_flex", run):
        out, _ = _flex_op.flex(q, k, v, [], key, Features(0.5))
    assert all(x.stride(-1) == 1 for x in given)
    expected = fd.attend(q.contiguous(), k.contiguous(), v.contiguous(), MIXTURE, enable_gqa=True, scale=0.5)
    assert_close(out, expected, rtol=1e-9, atol=1e-11)


@settings(max_examples=8)
@given(LAYOUTS, st.integers(0, 99), st.integers(1, 69))
def test_a_cache(layouts: tuple[str, ...], seed: int, prompt: int):
    """A prompt and then steps, of tensors that lie anywhere."""
    q, k, v, _ = drawn(seed, *layouts)
    cache, outs = fd.KVCache(MIXTURE, num_heads=4), []
    for some in (slice(0, prompt), slice(prompt, prompt + 1), slice(prompt + 1, 70)):
        if len(range(70)[some]):
            outs.append(cache.attend(q[:, :, some], k[:, :, some], v[:, :, some]))
    expected = fd.attend(q.contiguous(), k.contiguous(), v.contiguous(), MIXTURE, enable_gqa=True)
    assert_close(torch.cat(outs, 2), expected, rtol=1e-9, atol=1e-11)


@TWICE_FOUR
def test_modules(layouts: tuple[str, ...]):
    q, k, v, grad = drawn(3, *layouts, H=2)
    torch.manual_seed(0)
    dilated = fd.DilatedAttention([16, 64], [1, 4], causal=True)
    sparse = fd.BlockSparseAttention(PATTERNS["blocks"])
    heads = fd.MultiheadDilatedAttention(8, 2, [16, 64], [1, 4], dtype=torch.float64)
    for module in (dilated, sparse):
        assert_same_anywhere(module, q, k, v, grad)
    # (B, N, E): head 0 of tensors that lie so.
    assert_same_anywhere(lambda *x: heads(*x)[0], *(x[:, 0] for x in (q, k, v, grad)))


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r"'channels first'.*got 'channels last'"):
        laid_out(torch.zeros(1, 1, 1, 1), "channels last")


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [4, 70])
def test_rows_that_share_memory(name: str, tokens: int):
    """Sliding windows over one buffer: every row begins one number after the one before it."""
    buffer = torch.randn(4, 2, 4, tokens + 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v, grad = (x.unfold(-1, 8, 1) for x in buffer)
    pattern = PATTERNS[name] if tokens == 70 else masks.causal()
    assert_same_anywhere(lambda *x: fd.attend(*x, pattern, return_lse=True), q, k, v, grad)
