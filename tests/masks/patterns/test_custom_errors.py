"""What custom patterns refuse: functions that are no rule, or whose identity would not last, each with its reason."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from tests.support.custom_rules import TABLE, by_global

LIST = [1, 2]


def composed(inner):
    return lambda b, h, q, k: inner(b, h, q, k) & (q >= k)


def with_default(b, h, q, k, width=3):
    return q - k < width


class Callable:
    def __call__(self, b, h, q, k):
        return q < k

    def method(self, b, h, q, k):
        return q < k


HOLDER = Callable()


def counting():
    calls = 0

    def function(b, h, q, k):
        nonlocal calls
        calls += 1
        return q < k + calls

    return function


def appending():
    calls = []

    def function(b, h, q, k):
        calls.append(1)
        return q < k + (len(calls) > 1000)

    return function


def imports(b, h, q, k):
    from tests.support.custom_rules import WIDTH

    return q - k < WIDTH


def captures(value):
    return lambda b, h, q, k: q < k + value


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (Callable(), TypeError, "plain function .*; got Callable"),
        (Callable().method, TypeError, "plain function .*; got method"),
        (functools.partial(with_default, width=2), TypeError, "plain function .*; got partial"),
        (operator.lt, TypeError, "plain function .*; got builtin"),
        (with_default, TypeError, "no default arguments, .*: write `def make.*; got 'with_default'"),
        (lambda *a: a[0] < 3, TypeError, r"exactly \(b, h, q, k\); got .* with \(\.\.\.\)"),
        (lambda b, h, q, k, *, w: q < 3, TypeError, r"with \(b, h, q, k, w\)"),
        (lambda b, h, q, k: True, TypeError, "must return a bool tensor; got bool"),
        (lambda b, h, q, k: torch.ones(5, dtype=torch.bool), ValueError, r"broadcast shape .*; got \(5,\)"),
        (lambda b, h, q, k: q - k < q.shape[-1], ValueError, "each pair independently"),
        (lambda b, h, q, k: (q >= k).cumsum(-1) < 3, ValueError, "each pair independently"),
        (lambda b, h, q, k: (q < k).flip(0) if q.dim() else q < k, ValueError, "each pair independently"),
        (lambda b, h, q, k: q * 2654435761 % 7 < k, ValueError, "for int32 positions"),
        (lambda b, h, q, k: q < k if h == 0 else q > k, ValueError, "write torch.where.*called Tensor.__bool__"),
        (lambda b, h, q, k: (q < k) and (q > 2), ValueError, "write torch.where"),
        (lambda b, h, q, k: torch.tensor(q.tolist()) < k, ValueError, "called Tensor.tolist"),
        (lambda b, h, q, k: q < int(TABLE[0]), ValueError, "called Tensor"),
        (lambda b, h, q, k: q < LIST[k], ValueError, "called Tensor.__index__"),
        (lambda b, h, q, k: q.add_(1) < k, ValueError, "must not change its arguments"),
        (lambda b, h, q, k: TABLE.add_(1)[q % 6] < k, ValueError, "or what it captured"),
        (counting(), TypeError, "keep no state; it assigns 'calls'"),
        (appending(), ValueError, "or what it captured"),
        (
            imports,
            TypeError,
            "import and look up before the function, .*; 'imports' imports 'tests.support",
        ),
        (composed(imports), TypeError, "<lambda>' must read values from its variables: .*; 'imports' imports"),
        (lambda b, h, q, k: q < getattr(LIST, "x"), TypeError, "look up before the function.* uses 'getattr'"),  # noqa: B009
        (lambda b, h, q, k: q < q.__class__.x, TypeError, "look up before the function.* attribute '__class__'"),
        (lambda b, h, q, k: HOLDER.width > q, TypeError, "the global 'HOLDER' is of type Callable"),
        (lambda b, h, q, k: (q + b * 0) < k, ValueError, "must not depend on the batch entry b"),
        (lambda b, h, q, k: q < 1 // 0, ValueError, "failed on 3 x 17 x 16 .*ZeroDivisionError"),
        (lambda b, h, q, k: torch.no_such(q) < k, ValueError, "AttributeError.*no_such"),
        (captures(object()), TypeError, "the captured 'value' is of type object"),
        (captures([1, object()]), TypeError, "an entry of the captured 'value' is of type object"),
        (captures([].append), TypeError, "type builtin"),
        (captures(torch.empty(3, device="meta")), TypeError, "plain dense tensors"),
        (captures(pytest), TypeError, "the captured 'value' is of type module: read its values before the function"),
        (composed(captures(functools.partial(max, 1))), TypeError, "the captured 'value' is of type partial"),
    ],
)
def test_what_is_no_rule_is_refused(function, error, says):
    before = torch.get_rng_state(), TABLE.clone()
    with pytest.raises(error, match=says):
        masks.custom(function)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(TABLE, before[1])


def test_a_container_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(TypeError, match="it reads a container that holds itself or nests too deep"):
        masks.custom(lambda b, h, q, k: q - k < len(loop))


def test_errors_keep_their_cause():
    with pytest.raises(ValueError, match="failed on") as caught:
        masks.custom(lambda b, h, q, k: q < 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def no_boxes(head, q_first, q_last, k_first, k_last):
    return torch.tensor([masks.PARTIAL])


@pytest.mark.parametrize(
    ("classify", "error", "says"),
    [
        (3, TypeError, "classify must be a plain function of .*; got int"),
        (lambda h, a, b, c, d: "FULL", TypeError, "must return an integer tensor .*; got str"),
        (lambda h, a, b, c, d: a / 2, TypeError, "got torch.float"),
        (no_boxes, ValueError, r"got shape \(1,\) for 16 boxes"),
        (lambda h, a, b, c, d: a * 0 + 3, ValueError, r"masks.EMPTY \(0\), .*; got \[3\]"),
        (lambda h, a, b, c, d: a * 0 - 1, ValueError, r"got \[-1\]"),
        (lambda h, a, b, c, d: 1 + (a == a.max()).long(), ValueError, "each box independently"),
        (
            lambda h, a, b, c, d: a * 0 if a > b else a * 0 + 1,
            ValueError,
            "classify of .* failed on 16 boxes, queries 0",
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
    for engine in ("tiles", "flex"):
        with (
            torch.no_grad(),
            pytest.raises(
                ValueError, match=r"custom\(<lambda>\) must be defined for heads 0 to 0, queries .* to 299, keys 0"
            ),
        ):
            fd.attend(*torch.randn(3, 1, 1, 300, 16), pattern, engine=engine)
