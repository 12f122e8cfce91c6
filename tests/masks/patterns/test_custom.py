"""Custom patterns: any mask_mod, exactly; refused where it is no rule (tests/project/errors.md has more)."""

from __future__ import annotations

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.blocks._blocks import build_blocks
from flexdilated.masks.planning.lowering._layouts import shared_terms
from flexdilated.testing._drawn_patterns import classify_window, same_kind, window_by_head
from tests.support.custom_rules import TABLE, by_global, diagonal, window


def test_classify_prunes():
    calls = []
    function, inner = window_by_head(torch.tensor([64])), classify_window(torch.tensor([64]))

    def asked(pattern: masks.Pattern) -> int:
        calls.clear()
        sizes = {"num_heads": 1, "num_queries": 8192, "num_keys": 8192}
        (term,) = shared_terms(pattern, 1, pattern.bind(**sizes), 1)
        rule = term.table_rule()
        evaluated = type(rule).allowed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(rule), "allowed", lambda self, t, q, k: calls.append(len(q)) or evaluated(self, t, q, k))
            build_blocks(rule, q_block=64, k_block=64)
        return sum(calls)

    assert asked(masks.custom(function)) == 128**2
    assert asked(masks.custom(function, classify=inner)) < 3 * 128
    assert asked(masks.custom(function) & masks.local_window(left=64, right=0)) < 3 * 128


def capturing() -> list[masks.Pattern]:
    """Functions that capture ints, tensors by position and by head, globals and inner functions."""
    inner = window(9)
    composite = lambda b, h, q, k: (TABLE[q % 6] == TABLE[k % 6]) & inner(b, h, q, k)  # noqa: E731
    functions = [window(3), window(8), by_global, window_by_head(torch.tensor([5, 60, 7, 30, 9])), composite]
    return [masks.custom(function) for function in functions]


@pytest.mark.slow
def test_captures_compile_to_one_kernel():
    """The C++ of FlexAttention, one function a head: heads 1 and 2 of 3 on one key/value head, 70 queries over 190.

    Its scores are changed as well, by a table that is captured, for each head and distance.
    """
    slopes = torch.tensor([9.0, 0.5, 0.1])

    def score_mod(score, b, h, q_idx, k_idx):
        return torch.tanh(score) - slopes[h] * (q_idx - k_idx).abs() + torch.sin(0.3 * k_idx)

    q, (k, v) = torch.randn(1, 2, 70, 16), torch.randn(2, 1, 1, 190, 16)
    *_, by_head, composite = capturing()
    pattern = masks.per_head([masks.every(), by_head, composite])
    options = {"q_offset": 130, "k_offset": 10, "head_offset": 1, "num_heads_global": 3, "enable_gqa": True}
    options["score_mod"] = score_mod
    found, exact = (fd.attend(q, k, v, pattern, engine=engine, **options) for engine in ("flex", "reference"))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_what_it_captured_follows_the_device():
    pattern = masks.custom(same_kind(TABLE)) | masks.custom(lambda b, h, q, k: TABLE[q % 6] > 1)
    pattern |= masks.custom(lambda b, h, q, k: (q - k).to(h.device) > torch.full((), 3, device=q.device))
    meta = torch.empty(3, dtype=torch.int64, device="meta")
    mod = pattern.mask_mod(num_heads=1, device=torch.device("meta"))
    assert mod(meta[0], meta[0], meta[:, None], meta).device.type == "meta"


def shifted(b, h, q, k):
    shift = torch.zeros_like(h)
    shift += h
    return q - k == shift


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda b, h, q, k: (h < 6) | (q == k), True),  # though not on the heads that the checks look at
        (shifted, True),
        (lambda b, h, q, k: q.new_tensor(h) + 0 * q >= k, True),
        (lambda b, h, q, k: h.new_tensor(3) + 0 * q >= k, False),
        (lambda b, h, q, k: (torch.zeros_like(h) + q == k) & (h.dtype == torch.int64), False),
        (diagonal, False),
    ],
)
def test_heads_have_rules_of_their_own_where_the_head_is_read(function, reads: bool) -> None:
    pattern = masks.custom(function)
    assert (pattern.for_head(7, 8) != pattern.for_head(6, 8)) == reads
    assert (pattern.for_head(3, 8) is pattern) == (not reads)


LIST = [1, 2]


class Unlike:
    def __call__(self, b, h, q):
        return q < 3


class Twice(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def captures(value):
    return lambda b, h, q, k: q < k + value


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (Unlike(), TypeError, r"must take \(b, h, q, k\); got 'Unlike' with \(b, h, q\)"),
        (lambda b, h, q, k, *, w: q < 3, TypeError, r"with \(b, h, q, k, \*, w\)"),
        (lambda b, h, q, k: True, TypeError, "must return a tensor; got bool"),
        (lambda b, h, q, k: torch.ones(5, dtype=torch.bool), ValueError, r"broadcast shape .*; got \(5,\)"),
        (lambda b, h, q, k: (q >= k).cumsum(-1) < 3, ValueError, "each pair independently"),
        (lambda b, h, q, k: q * 2654435761 % 7 < k, ValueError, "for int32 positions"),
        (lambda b, h, q, k: q < k if h == 0 else q > k, ValueError, "write torch.where.*called Tensor.__bool__"),
        (lambda b, h, q, k: torch.tensor(q.tolist()) < k, ValueError, "called Tensor.tolist"),
        (lambda b, h, q, k: q < LIST[k], ValueError, "called Tensor.__index__"),
        (lambda b, h, q, k: TABLE.add_(1)[q % 6] < k, ValueError, "must not write to tensors that .* called add_"),
        (lambda b, h, q, k: torch.add(q, 1, out=TABLE) < k, ValueError, "must not write to tensors that it captured"),
        (lambda b, h, q, k: torch.rand_like(q.float()) < 0.5, ValueError, "must draw no random numbers"),
        (lambda b, h, q, k: Twice.apply(q) < k, TypeError, "by functions of torch, which"),
        (captures(object()), ValueError, "failed: TypeError"),
        (captures(torch.empty(3, device="meta")), TypeError, "plain dense tensors"),
    ],
)
def test_what_is_no_rule_is_refused(function, error, says):
    before = torch.get_rng_state(), TABLE.clone()
    with pytest.raises(error, match=says) as caught:
        masks.custom(function)
    assert isinstance(caught.value.__cause__, Exception) == ("Error" in says)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(TABLE, before[1])


@pytest.mark.parametrize(
    ("classify", "error", "says"),
    [
        (lambda h, a, b, c, d: torch.tensor([masks.PARTIAL]), ValueError, r"got shape \(1,\) for 16 boxes"),
        (lambda h, a, b, c, d: a * 0 + 3, ValueError, r"masks.EMPTY \(0\), .*; got \[3\]"),
        (lambda h, a, b, c, d: a * 0 - 1, ValueError, r"got \[-1\]"),
        (lambda h, a, b, c, d: 1 + (a == a.max()).long(), ValueError, "each box independently"),
        (lambda h, a, b, c, d: a * 0 if a > b else a * 0 + 1, ValueError, "classify .* must not branch on values"),
    ],
)
def test_classify_of_the_wrong_form(classify, error, says):
    with pytest.raises(error, match=says):
        masks.custom(by_global, classify=classify)


def test_tables_that_end_too_early_say_where():
    edges = torch.arange(50)
    late = lambda h, a, b, c, d: torch.where(edges[b] < edges[c], masks.EMPTY, masks.PARTIAL)  # noqa: E731
    pattern = masks.custom(lambda b, h, q, k: q >= k, classify=late)
    with pytest.raises(ValueError, match=r"classify of the custom function .* queries 0 to 99, keys 0 to 99.*IndexErr"):
        masks.block_mask(pattern, 100, num_heads=1)
