"""`flexdilated.flex_attention`: its lists are those of torch, its masks are read as they are, and its errors."""

from __future__ import annotations

import gc
import pickle
import weakref
from copy import deepcopy
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_own
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from flexdilated import flex_attention as own
from flexdilated import masks
from flexdilated.flex_attention import AuxRequest, create_block_mask, flex_attention

B, H, N, M = 2, 4, 150, 170
DOCUMENTS, SHIFTS = torch.arange(M) // 23, torch.tensor([0, 40])
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
LISTS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")

# (rule, batch entries and heads with lists of their own): what the blog, attention-gym and torch's tests write.
RULES: dict[str, tuple[Any, int | None, int | None]] = {
    "causal": (lambda b, h, q, k: q >= k, None, None),
    "window": (lambda b, h, q, k: (q >= k) & (q - k <= 30), None, None),
    "prefix": (lambda b, h, q, k: (k < 25) | (q >= k), 1, 1),
    "documents": (lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k), B, None),
    "dilated window": (lambda b, h, q, k: ((q - k).abs() <= 40) & ((q - k) % 4 == 0), None, None),
    "by head": (lambda b, h, q, k: (q + h) % 3 != k % 3, None, H),
    "by batch entry": (lambda b, h, q, k: q + SHIFTS[b] >= k, B, None),
    "by batch entry, lists of the first": (lambda b, h, q, k: (q - SHIFTS[b] >= k) & ((q + k) % 5 > 0), None, None),
    "by both": (lambda b, h, q, k: (q >= k) & ((h + b) % 2 == 0), B, H),
    "nothing": (lambda b, h, q, k: q < 0, None, None),
    "all": (torch_own.noop_mask, None, None),
    "union": (torch_own.or_masks(lambda b, h, q, k: q == k, lambda b, h, q, k: k < 9), None, None),
    "intersection": (torch_own.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k % 2 == 0), B, H),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("block", "separate"), [(128, True), ((32, 64), True), (64, False)])
def test_lists_are_those_of_torch(rule: str, block: Any, separate: bool) -> None:
    given = *RULES[rule], N, M
    how = {"device": "cpu", "BLOCK_SIZE": block, "separate_full_blocks": separate}
    mine, torchs = create_block_mask(*given, **how), torch_own.create_block_mask(*given, **how)
    assert (mine.shape, mine.BLOCK_SIZE, mine.seq_lengths) == (torchs.shape, torchs.BLOCK_SIZE, torchs.seq_lengths)
    for name in LISTS:
        if getattr(torchs, name) is None:
            assert getattr(mine, name) is None
        else:
            assert_close(getattr(mine, name), getattr(torchs, name), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("pattern", "rule", "entries"),
    [
        (masks.local_window(left=30, right=0), RULES["window"][0], None),
        (masks.documents(DOCUMENTS) & masks.causal(), RULES["documents"][0], None),
        (
            masks.documents(torch.stack([DOCUMENTS, DOCUMENTS * 0])),
            lambda b, h, q, k: (b > 0) | (q // 23 == k // 23),
            B,
        ),
    ],
    ids=["window", "documents", "documents of each entry"],
)
def test_a_pattern_is_a_rule(pattern: masks.Pattern, rule: Any, entries: int | None) -> None:
    """In copies of the mask, too."""
    mine, torchs = (create_block_mask(each, entries, None, M, M, "cpu", 64) for each in (pattern, rule))
    assert all(torch.equal(getattr(mine, name), getattr(torchs, name)) for name in LISTS)
    x = torch.randn(B, H, M, 8, dtype=torch.float64)
    for mask in (mine, deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert_close(flex_attention(x, x, x, block_mask=mask), flex_attention(x, x, x, block_mask=torchs))


@pytest.mark.parametrize(
    ("mode", "score_mod"),
    [
        (lambda: torch.device("meta"), None),
        (FakeTensorMode, None),
        (lambda: torch.device("meta"), lambda s, b, h, q, k: s + (q - k)),
    ],
)
def test_calls_without_values_have_the_right_shapes(mode: Any, score_mod: Any) -> None:
    """With a mask made before, and with one made in the mode."""
    ids = torch.arange(M) // 20

    def mask() -> Any:
        return create_block_mask(lambda b, h, q, k: ids[q] == ids[k] - 2, None, None, N, M, "cpu", 64)

    before = mask()
    with mode():
        q, k, v = torch.empty(B, H, N, 16, requires_grad=True), torch.empty(B, H, M, 16), torch.empty(B, H, M, 24)
        for block_mask in (before, mask(), None):
            how = {"score_mod": score_mod, "block_mask": block_mask}
            out, aux = flex_attention(q, k, v, **how, return_aux=AuxRequest(lse=True, max_scores=True))
            assert (out.shape, out.device, type(out)) == ((B, H, N, 24), q.device, type(k))
            assert [each.shape for each in aux] == [(B, H, N)] * 2
            (grad,) = torch.autograd.grad(out.sum(), q)
            assert grad.shape == q.shape


def test_what_a_mask_holds_is_read_in_each_call() -> None:
    """A rule's tensor, lists, block sizes, and a score function's closure: changes reach the next call, no backward."""
    ids, x = torch.arange(N) // 30, torch.randn(1, 1, N, 8)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, N, N, "cpu", 32)
    q, factor = x.clone().requires_grad_(), 1.0

    def call() -> Any:
        return flex_attention(q, x, x, lambda s, b, h, i, j: s * factor, mask)

    first = call()
    (grad,) = torch.autograd.grad(first.square().sum(), q, retain_graph=True)
    ids.zero_()
    mask.full_kv_num_blocks.zero_()
    factor = 3.0
    assert_close(*(torch.autograd.grad(first.square().sum(), q)[0], grad), rtol=0, atol=0)
    second = call()
    true = dense_of_lists(q, x, mask, factor)
    assert_close(second, true)
    assert not torch.allclose(first, second)
    mask.BLOCK_SIZE = (30, 25)
    third = call()
    assert_close(third, dense_of_lists(q, x, mask, factor))
    assert not torch.allclose(second, third)


@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), torch.inference_mode, torch.no_grad, FlopCounterMode])
@pytest.mark.parametrize("made_by", [create_block_mask, torch_own.create_block_mask])
def test_a_mask_is_read_in_any_mode_of_torch(mode: Any, made_by: Any) -> None:
    """The first call of a mask, in lists of which no block is full."""
    x, documents = torch.randn(1, 1, N, 8, dtype=torch.float64), torch.arange(N) // 23
    mask = made_by(lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), None, None, N, N, "cpu", BLOCK_SIZE=64)
    with mode():
        found = flex_attention(x, x, x, block_mask=mask)
    place = torch.arange(N)
    allowed = (place[:, None] >= place) & (documents[:, None] == documents)
    scores = (x @ x.mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
    assert_close(found.clone(), scores.softmax(-1) @ x)


def dense_of_lists(q: Tensor, x: Tensor, mask: Any, factor: float) -> Tensor:
    """Over the partial blocks alone, in which each pair is allowed."""
    allowed = torch.zeros(5, 6, dtype=torch.bool)
    for row in range(5):
        allowed[row, mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]]] = True
    rows, columns = mask.BLOCK_SIZE
    whole = allowed.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:N, :N]
    scores = (q @ x.mT * 8**-0.5 * factor).masked_fill(~whole, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ x


@pytest.mark.parametrize("batch", [1, 3])
def test_paged_attention_of_torch(batch: int) -> None:
    """Its masks and score functions look logical keys up for each batch entry, in pages that all entries share."""
    page, pages, tokens, lengths = 16, 16, 60, torch.tensor([60, 23, 41])[:batch]
    paged = PagedAttention(pages, page, batch, device="cpu")
    caches = torch.full((2, 1, H, pages * page, 8), 7.0, dtype=torch.float64)
    q, k, v = torch.randn(3, batch, H, tokens, 8, dtype=torch.float64)
    for entry in reversed(range(batch)):
        paged.reserve(torch.tensor(entry), lengths[entry])
        given = (x[entry, None, :, : lengths[entry]] for x in (k, v))
        paged.assign(torch.tensor([entry]), torch.arange(lengths[entry])[None], *given, *caches)

    rule = lambda b, h, i, j: (i >= j) & (j < lengths[b])  # noqa: E731
    logical = create_block_mask(rule, batch, None, tokens, tokens, "cpu", page)
    converted = paged.convert_logical_block_mask(logical, kv_len=lengths)
    score_mod = paged.get_score_mod(lambda s, b, h, i, j: s + (j - i) * 0.1, kv_len=lengths)
    found = flex_attention(q, *caches, score_mod, converted, return_aux=AuxRequest(lse=True))
    at = torch.arange(tokens)
    allowed = (at[:, None] >= at) & (at < lengths[:, None, None, None])
    scores = (q @ k.mT * 8**-0.5 + (at - at[:, None]) * 0.1).masked_fill(~allowed, -torch.inf)
    assert_close((found[0], found[1].lse), (scores.softmax(-1) @ v, scores.logsumexp(-1)))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"tokens": 100}, r"block_mask must be for 100 queries and 100 keys; got one for 150 and 150: create another"),
        ({"batch": 3, "lists": (2, None)}, "for the 3 batch entries and 2 heads of query, .* share; got 2 and 1"),
        ({"heads": 4, "enable_gqa": True, "lists": (None, 2)}, "got 1 and 2: .* B=1 or None, H=4 or None"),
        ({"return_aux": AuxRequest(lse=True), "return_lse": True}, "ask for the same"),
        ({"heads": 4}, "enable_gqa"),
        ({"dims": 3}, r"4 dims \(batch, heads, tokens, head dim\); got \(2, 150, 8\)"),
        ({"lists_on": "meta"}, "must have values in kv_num_blocks; got tensors on the meta device"),
    ],
    ids=["lengths", "entries", "heads of lists", "lse twice", "heads", "dims", "values of lists"],
)
def test_errors(how: dict[str, Any], message: str) -> None:
    q = torch.randn(how.pop("batch", 1), how.pop("heads", 2), how.pop("tokens", N), 8)
    mask = create_block_mask(lambda b, h, q, k: q >= k - b - h, *how.pop("lists", (None, None)), N, N, "cpu")
    mask, first = mask.to(how.pop("lists_on", "cpu")), how.pop("dims", 4) == 3
    q, k = (x[0] if first else x for x in (q, q[:, :2]))
    with pytest.raises(ValueError, match=message):
        flex_attention(q, k, k, block_mask=mask, **how)


def own_attention(x: Tensor) -> Any:
    return flex_attention(x, x, x, lambda s, b, h, q, k: s + q)


def second_derivative(x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(flex_attention(x, x, x).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)[0]


def with_fake_tensors(x: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return own_attention(mode.from_tensor(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (second_derivative, RuntimeError, r"attend\(..., engine='portable'\) has one"),
        (lambda x: torch.func.vmap(own_attention)(x[None]), ValueError, r"attend\(..., engine='reference'\) has them"),
        (with_fake_tensors, ValueError, "a FakeTensorMode lacks: give tensors on the meta device"),
        (lambda x: flex_attention(x, x, x, engine="portable"), TypeError, r"write fd.attend\(.*masks.custom"),
        (lambda x: create_block_mask(None, 1, 1, 9, 9, compute_dq_write_order=True), TypeError, "FLASH kernels"),
    ],
)
def test_calls_that_are_not_served_name_a_way(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(1, 1, N, 8, requires_grad=True))


def test_rules_that_have_no_lists() -> None:
    with pytest.raises(ValueError, match="call attend with the mixture"):
        create_block_mask(masks.causal() + masks.causal(), None, None, N, M, "cpu")


@pytest.mark.slow
def test_compiled_functions_train_on_cpu() -> None:
    """The graph breaks at the call, and where a mask is made. Without gradients the call is in one graph."""
    torch.compiler.reset()
    ids, counter = torch.arange(N) // 40, CompileCounter()

    def step(q: Tensor) -> Tensor:
        tokens = q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, tokens, tokens, "cpu")
        return flex_attention(q * 2, q, q, block_mask=mask) + 1

    compiled, frames = torch.compile(step, backend=counter), []
    for tokens in range(N - 20, N, 5):
        q = torch.randn(1, 2, tokens, 32, requires_grad=True)
        assert_close(*(torch.autograd.grad(run(q).square().sum(), q)[0] for run in (compiled, step)))
        frames.append(counter.frame_count)
    assert frames[1:] == frames[1:2] * 3, "lengths are dynamic from the second one on"
    x, mask = torch.randn(1, 2, N, 32), create_block_mask(RULES["causal"][0], None, None, N, N, "cpu")
    with torch.no_grad():
        whole = torch.compile(flex_attention, backend="eager", fullgraph=True)
        assert_close(whole(x, x, x, block_mask=mask), flex_attention(x, x, x, block_mask=mask))
    # torch.compile may run a function uncompiled, such as one with too many recompilations, and trace what it calls.
    skipped: Any = torch.compiler.disable(flex_attention.__wrapped__, recursive=False)  # type: ignore[attr-defined]
    mask = create_block_mask(RULES["window"][0], None, None, N, N, "cpu")
    found = torch.compile(lambda x: skipped(x, x, x, None, mask), backend="eager")(x)
    assert_close(found, flex_attention(x, x, x, block_mask=mask))


def test_a_module_that_holds_its_mask_and_its_rule_is_freed() -> None:
    class Windowed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = torch.tensor(9)
            self.mask = create_block_mask(self.rule, None, None, N, N, "cpu")

        def rule(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i - j).abs() < self.width

    module, x = Windowed(), torch.randn(1, 1, N, 8)
    flex_attention(x, x, x, block_mask=module.mask)
    held = weakref.ref(module)
    del module
    masks.cache().clear()
    gc.collect()
    assert held() is None


def test_names_and_signatures_are_those_of_torch() -> None:
    for name in own.__all__:
        mine, torchs = getattr(own, name), getattr(torch_own, name)
        if mine is torchs:
            continue
        wanted, taken = signature(torchs).parameters, signature(mine).parameters
        assert list(taken) == list(wanted)[: len(taken)]
        assert {n: each.default for n, each in taken.items()} == {n: wanted[n].default for n in taken}
        assert {n: each.kind for n, each in taken.items()} == {n: wanted[n].kind for n in taken}
