"""What custom patterns refuse: functions that are no rule, or whose identity would not last, each with its reason."""

from __future__ import annotations

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from tests.support.custom_rules import TABLE, by_global

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


HOLDER = Unlike()


def captures(value):
    return lambda b, h, q, k: q < k + value


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (Unlike(), TypeError, r"must take \(b, h, q, k\); got 'Unlike' with \(b, h, q\)"),
        (lambda b, h, q, k, *, w: q < 3, TypeError, r"with \(b, h, q, k, \*, w\)"),
        (lambda b, h, q, k: True, TypeError, "must return a tensor; got bool"),
        (lambda b, h, q, k: torch.ones(5, dtype=torch.bool), ValueError, r"broadcast shape .*; got \(5,\)"),
        (lambda b, h, q, k: q - k < q.shape[-1], ValueError, "failed: IndexError"),
        (lambda b, h, q, k: (q >= k).cumsum(-1) < 3, ValueError, "each pair independently"),
        (lambda b, h, q, k: q < q.max() - k, ValueError, "each pair independently"),
        (lambda b, h, q, k: q * 2654435761 % 7 < k, ValueError, "for int32 positions"),
        (lambda b, h, q, k: q < k if h == 0 else q > k, ValueError, "write torch.where.*called Tensor.__bool__"),
        (lambda b, h, q, k: (q < k) and (q > 2), ValueError, "write torch.where"),
        (lambda b, h, q, k: torch.tensor(q.tolist()) < k, ValueError, "called Tensor.tolist"),
        (lambda b, h, q, k: q < LIST[k], ValueError, "called Tensor.__index__"),
        (
            lambda b, h, q, k: TABLE.add_(1)[q % 6] < k,
            ValueError,
            "must not write to tensors that it captured; it called add_",
        ),
        (lambda b, h, q, k: torch.add(q, 1, out=TABLE) < k, ValueError, "must not write to tensors that it captured"),
        (lambda b, h, q, k: torch.rand(3)[q % 3] < 0.5, ValueError, "must draw no random numbers"),
        (lambda b, h, q, k: torch.rand_like(q.float()) < 0.5, ValueError, "must draw no random numbers"),
        (lambda b, h, q, k: Twice.apply(q) < k, TypeError, "by functions of torch, which"),
        (lambda b, h, q, k: HOLDER.width > q, ValueError, "AttributeError.*width"),
        (lambda b, h, q, k: (q + b * 0) < k, ValueError, "must not depend on the batch entry b"),
        (lambda b, h, q, k: q < 1 // 0, ValueError, "failed: ZeroDivisionError"),
        (lambda b, h, q, k: torch.no_such(q) < k, ValueError, "AttributeError.*no_such"),
        (captures(object()), ValueError, "failed: TypeError"),
        (captures(torch.empty(3, device="meta")), TypeError, "plain dense tensors"),
    ],
)
def test_what_is_no_rule_is_refused(function, error, says):
    before = torch.get_rng_state(), TABLE.clone()
    with pytest.raises(error, match=says):
        masks.custom(function)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(TABLE, before[1])


def test_errors_keep_their_cause():
    with pytest.raises(ValueError, match="failed: ZeroDiv") as caught:
        masks.custom(lambda b, h, q, k: q < 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def no_boxes(head, q_first, q_last, k_first, k_last):
    return torch.tensor([masks.PARTIAL])


@pytest.mark.parametrize(
    ("classify", "error", "says"),
    [
        (3, TypeError, "classify must be a function of .*; got int"),
        (lambda h, a, b, c, d: "FULL", TypeError, "must return a tensor; got str"),
        (lambda h, a, b, c, d: a / 2, TypeError, "got torch.float"),
        (no_boxes, ValueError, r"got shape \(1,\) for 16 boxes"),
        (lambda h, a, b, c, d: a * 0 + 3, ValueError, r"masks.EMPTY \(0\), .*; got \[3\]"),
        (lambda h, a, b, c, d: a * 0 - 1, ValueError, r"got \[-1\]"),
        (lambda h, a, b, c, d: 1 + (a == a.max()).long(), ValueError, "each box independently"),
        (
            lambda h, a, b, c, d: a * 0 if a > b else a * 0 + 1,
            ValueError,
            "classify of .* must not branch on values",
        ),
    ],
)
def test_classify_of_the_wrong_form(classify, error, says):
    with pytest.raises(error, match=says):
        masks.custom(by_global, classify=classify)


def test_classify_that_fails_later_says_where():
    edges = torch.arange(50)
    late = lambda h, a, b, c, d: torch.where(edges[b] < edges[c], masks.EMPTY, masks.PARTIAL)  # noqa: E731
    pattern = masks.custom(lambda b, h, q, k: q >= k, classify=late)
    with pytest.raises(ValueError, match=r"classify of the custom function .* queries 0 to 99, keys 0 to 99.*IndexErr"):
        masks.block_mask(pattern, 100, num_heads=1)


def test_tables_that_end_too_early_say_where():
    table = torch.arange(200)
    pattern = masks.custom(lambda b, h, q, k: table[q] >= k)
    assert masks.block_mask(pattern, 200, num_heads=1).shape == (1, 1, 200, 200)
    for engine in ("aten", "flex"):
        with (
            torch.no_grad(),
            pytest.raises(
                ValueError, match=r"custom\(<lambda>\) must be defined for heads 0 to 0, queries .* to 299, keys 0"
            ),
        ):
            fd.attend(*torch.randn(3, 1, 1, 300, 16), pattern, engine=engine)
