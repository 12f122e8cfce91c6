"""Windows of run-time tensors: exact in any way that a rule has inside each; their cost grows with kinds of windows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from math import isqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.core import Extent
from flexdilated.masks.planning import _candidates
from flexdilated.masks.planning._planner import Plan, plan
from flexdilated.masks.planning.lowering import _windows
from tests.masks.planning.test_planner import weight_of_all
from tests.support.run_time_strategies import packed_cases

pytestmark = pytest.mark.usefixtures("without_masks")

LOCAL, CAUSAL = masks.local_window(left=3, right=2), masks.causal()
SPARSE = masks.dilated_window(left=2, right=1, rate=4)
FIXED = masks.fixed(4) | masks.dilated(8, 2)
LONGNET = masks.longnet([4, 8], [1, 2]) & CAUSAL
# Rules within documents or lengths t, over keys that are seen.
FORMS: dict[str, Callable[[masks.Pattern, Tensor], masks.Pattern | masks.Mixture]] = {
    "causal": lambda t, seen: CAUSAL & t,
    "full": lambda t, seen: t,
    "window": lambda t, seen: masks.local_window(left=2, right=1) & t,
    "past": lambda t, seen: masks.local_window(left=4, right=0) & t,
    "longnet": lambda t, seen: LONGNET & t,
    "strided": lambda t, seen: masks.strided(3) & CAUSAL & t,
    "some keys": lambda t, seen: CAUSAL & t & masks.visible_keys(seen),
    "without": lambda t, seen: CAUSAL & ~t,
    "chunked": lambda t, seen: masks.chunked(7) & t,
    "distributed": lambda t, seen: (LOCAL & t) | (SPARSE & t),
    "of unions": lambda t, seen: (LOCAL | SPARSE) & (CAUSAL | masks.strided(2)) & t,
    "with a period": lambda t, seen: (LOCAL | FIXED) & t,
    "one part": lambda t, seen: (LOCAL & t) | SPARSE,
    "by head": lambda t, seen: masks.per_head([(LOCAL | SPARSE) & t, FIXED & t]),
    "twice": lambda t, seen: (LOCAL | SPARSE) & t & masks.visible_keys(seen),
    "of keys": lambda t, seen: (LOCAL | FIXED) & masks.visible_keys(seen),
}
ANEW: dict[str, Callable[[masks.Pattern, Tensor], masks.Pattern | masks.Mixture]] = {
    "longnet anew": lambda t, seen: LONGNET.per_document(t),
    "anew and causal": lambda t, seen: masks.dilated(6, 3).per_document(t) & CAUSAL,
    "anew": lambda t, seen: (LOCAL | FIXED).per_document(t),
    "each anew": lambda t, seen: LOCAL.per_document(t) | (FIXED.per_document(t) & CAUSAL),
    "anew and cut": lambda t, seen: (LOCAL & t) | FIXED.per_document(t),
    "anew and not": lambda t, seen: (FIXED & t) | FIXED.per_document(t),
    "a grid a document": lambda t, seen: masks.neighborhood((4, 4), 1).per_document(t),
}


def lists_of_lengths(num_tokens: int) -> st.SearchStrategy[list[int]]:
    """Equal, all of one token, growing by one, or any, which fill so many tokens."""
    equal = st.integers(1, num_tokens).map(lambda length: [length] * (-(-num_tokens // length)))
    growing = st.permutations(range(1, isqrt(2 * num_tokens) + 2))
    drawn = st.lists(st.integers(1, 9), min_size=num_tokens, max_size=num_tokens)
    return st.one_of(equal, growing, drawn)


@st.composite
def packings(draw: st.DrawFn, num_tokens: int, batch: int) -> Tensor:
    """Ids of shape (tokens,) or (batch, tokens), some with padding."""
    rows = draw(st.sampled_from([1, batch]))
    ids = []
    for _ in range(rows):
        lengths = draw(lists_of_lengths(num_tokens))
        each = chain.from_iterable([index] * length for index, length in enumerate(lengths))
        row = torch.tensor(list(islice(each, num_tokens)) or [0])
        row = torch.cat([row, torch.full((num_tokens - len(row),), -1)])
        ids.append(row.masked_fill(row == draw(st.integers(-1, 3)), -1))
    return torch.stack(ids) if rows > 1 else ids[0]


@contextmanager
def ways_in_turn(turn: int, **limits: int) -> Iterator[None]:
    """Windows of any size are weighed, and of the ways the one at this place in turn counts as the cheapest."""

    def rotated(options: list[_candidates.Option]) -> tuple[_candidates.Option, ...]:
        first = turn % len(options)
        return (*options[first:], *options[:first])

    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(_windows, name, limit)
        patch.setattr(_candidates, "_in_best_blocks", rotated)
        masks.cache().clear()
        yield
    masks.cache().clear()


@given(packed_cases(), st.integers(0, 4))
def test_terms_add_up_to_the_rule_in_any_way(case, turn):
    with ways_in_turn(turn, _WORTH_WEIGHING=0):
        for index in range(case.batch):
            found, counts = plan(case.bind().entry(index)), case.counts[index]
            assert torch.equal(weight_of_all(found.terms, counts.shape), counts)


@settings(max_examples=36)
@given(st.data(), st.sampled_from(sorted(FORMS | ANEW)), st.integers(0, 4))
def test_out_lse_and_gradients_are_the_dense_rule(data, form, turn):
    """Of any packing: windows apart, as folds or, where they are of too many kinds, in one list of blocks."""
    batch, heads, kv_heads = data.draw(st.sampled_from([(1, 2, 2), (2, 4, 2), (3, 2, 1)]), label="sizes")
    num_tokens = data.draw(st.integers(1, 40), label="tokens")
    if form == "a grid a document":
        ids = torch.arange(num_tokens) // 16
    else:
        ids = data.draw(packings(num_tokens, batch), label="ids")
    length = torch.tensor(data.draw(st.integers(0, num_tokens), label="length"))
    table = masks.documents(ids) if form in ANEW or data.draw(st.booleans()) else masks.lengths(length)
    seen = torch.arange(num_tokens) % data.draw(st.sampled_from([2, 3, 11, 64]), label="hidden") != 1
    pattern = (FORMS | ANEW)[form](table, seen)
    order = data.draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3)]), label="dims in memory")
    x = [randn(batch, count, num_tokens, 8, order=order) for count in (heads, kv_heads, kv_heads)]
    limits = {"_MOST_LISTS": [0, 3, 32], "_ENOUGH_SLOTS": [1, 4096], "_WORTH_WEIGHING": [0, 1024]}
    with ways_in_turn(turn, **{name: data.draw(st.sampled_from(some)) for name, some in limits.items()}):
        found = results(x, pattern, None)
    assert_close(found, results(x, pattern, "reference"), rtol=1e-9, atol=1e-9)


def randn(*shape: int, order: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn([shape[dim] for dim in order], generator=generator, dtype=torch.float64)
    return x.permute([order.index(dim) for dim in range(len(shape))])


def results(x: list[Tensor], pattern: masks.Pattern | masks.Mixture, engine: str | None) -> list[Tensor]:
    q, k, v = (each.detach().requires_grad_() for each in x)
    out, lse = fd.attend(q, k, v, pattern, enable_gqa=True, return_lse=True, engine=engine)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    gradients = torch.autograd.grad((out * weights).sum() + seen.square().sum(), (q, k, v))
    return [out.detach(), lse.detach(), *gradients]


@settings(max_examples=12)
@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_entries_are_one_sequence_only_where_the_rule_repeats(data, tokens, times, rate):
    """Of segments that are longer than an entry, or shorter: a multiple of one is the same place in every entry."""
    segment = tokens * times if data.draw(st.booleans(), label="longer") else max(1, tokens // times)
    batch = data.draw(st.integers(2, 4), label="batch")
    rows = st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens).map(torch.tensor)
    ids = torch.stack([data.draw(rows, label="ids").cumsum(0) for _ in range(batch)])
    pattern = masks.dilated(segment, rate, "interleaved") & masks.documents(ids)
    x = [randn(batch, 2, tokens, 8, order=(0, 1, 2, 3)) for _ in range(3)]
    assert_close(results(x, pattern, None), results(x, pattern, "reference"), rtol=1e-9, atol=1e-9)


def planned(pattern: masks.Pattern, num_tokens: int) -> Plan:
    rule = pattern.resolve(pattern.given_tensors(), Extent(num_tokens, num_tokens))
    return plan(rule.bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens))


@pytest.mark.parametrize("length", [1, 17, 128])
def test_equal_documents_are_as_many_terms_as_chunks(length):
    num_tokens = 8_192
    ids = torch.arange(num_tokens) // length
    chunks = planned(CAUSAL & masks.chunked(length), num_tokens).terms
    for pattern in (CAUSAL & masks.documents(ids), CAUSAL.per_document(ids)):
        assert len(planned(pattern, num_tokens).terms) <= 2 * len(chunks)


@pytest.mark.parametrize("form", ["window", "longnet anew", "strided", "some keys", "chunked"])
def test_terms_grow_with_lengths_that_differ(form):
    """Sixteen times as many documents of the same lengths, in another order: as many terms."""
    lengths, terms = torch.tensor([1, 2, 5, 6] * 6), []
    for times in (1, 16):
        order = torch.randperm(times * len(lengths), generator=torch.Generator().manual_seed(times))
        ids = torch.arange(len(order)).repeat_interleave(lengths.repeat(times)[order])
        pattern = (FORMS | ANEW)[form](masks.documents(ids), torch.arange(len(ids)) % 2 > 0)
        terms.append(len(planned(pattern, len(ids)).terms))
    assert terms[1] <= 2 * terms[0]


N = 1 << 12
WIDE = masks.local_window(left=64, right=64) | masks.dilated_window(left=32, right=32, rate=32)
RULES = {
    "of unions": WIDE & (CAUSAL | masks.global_tokens(8)),
    "with a period": masks.local_window(left=127, right=0) & CAUSAL | masks.fixed(128) & CAUSAL,
    "by head": masks.per_head([WIDE, masks.dilated_window(left=64, right=0, rate=16)]),
    "dilated": masks.dilated(4096, 8) | masks.local_window(left=64, right=64),
}
HALVES, REAL = torch.arange(N) // (N // 2), torch.tensor(N - 350)
FACTORS: dict[str, Callable[[masks.Pattern], masks.Pattern]] = {
    "lengths": lambda rule: rule & masks.lengths(REAL),
    "keys": lambda rule: rule & masks.visible_keys(torch.arange(N) < REAL),
    "some keys": lambda rule: rule & masks.visible_keys(torch.arange(N) % 50 > 0),
    "documents": lambda rule: rule & masks.documents(HALVES),
    "anew": lambda rule: rule.per_document(HALVES),
}


@pytest.mark.parametrize("name", RULES)
def test_a_run_time_factor_leaves_every_way_open(name):
    """As few pairs are computed as without it, but for the edges of windows."""
    rule = RULES[name]
    most = 1.3 * planned(rule, N).cost.computed_pairs
    for factor in FACTORS:
        assert planned(FACTORS[factor](rule), N).cost.computed_pairs <= most, factor
