"""Patterns written with masks.extend: outputs and gradients, eager and compiled."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.extend import Bounds, Box, OnePart, RunTime, Table, constructor, of_tensor, pattern_kind
from flexdilated.masks.patterns._band import Band
from flexdilated.testing import check_pattern
from tests.support.agreement import assert_agrees
from tests.support.strategies import sets


@pattern_kind("transposed")
class Transposed(OnePart):
    """Pattern that allows a pair iff `part` allows it with query and key exchanged."""

    recounts = False

    def mask_mod(self, *, num_heads, device):
        rule = self.part.mask_mod(num_heads=num_heads, device=device)
        return lambda b, h, q, k: rule(b, h, k, q)

    def count(self, box, *, num_heads):
        return self.part.count(Box(box.head, box.k, box.q), num_heads=num_heads)

    def period(self):
        return self.part.period()

    def check_tokens(self, queries, keys):
        self.part.check_tokens(keys, queries)


@pattern_kind("sketch_of_a_band")
class AnyBand(Band):
    """Pattern of one line: its limits, of which each may be missing."""

    least: int | None = None  # type: ignore[assignment]
    most: int | None = None  # type: ignore[assignment]
    step: int = 1  # type: ignore[assignment]

    def limits(self) -> tuple[int | None, int | None, int]:
        return self.least, self.most, self.step


@settings(max_examples=6)
@given(st.none() | st.integers(-9, 9), st.none() | st.integers(0, 9), st.sampled_from([1, 2, 3]))
def test_a_band_is_its_limits(least, length, step):
    """In every face of the rule: mask, counts, rows and reasons."""
    most = length if least is None or length is None else least + length
    check_pattern(AnyBand(least, most, step), max_tokens=40, examples=5)
    far = torch.arange(30) - torch.arange(30)[:, None]
    allowed = (far % step == 0) & (far >= (-99 if least is None else least)) & (far <= (99 if most is None else most))
    assert masks.describe(AnyBand(least, most, step), 30).useful_pairs == allowed.sum()


@pattern_kind("same_label")
class SameLabel(RunTime):
    """Pattern that allows a pair iff both positions have one label; a run-time tensor has the labels, integers."""

    def table(self, tensor, extent):
        if tensor.shape[-1] != extent.tokens:
            raise ValueError(f"labels must be one for each of {extent.tokens} tokens; got {tuple(tensor.shape)}")
        return Labels.of(torch.atleast_2d(tensor).to("cpu", torch.int64, copy=True))

    def widest(self, shape, extent):
        return torch.zeros(shape, dtype=torch.int64)


class Labels(Table):
    kind = "table of labels"

    def described(self):
        return f"{len(self.rows.unique())} labels"

    def mask_mod(self, *, num_heads, device):
        held, step = self.on(device), self.batch_step(device)
        return lambda b, h, q, k: held.rows[b * step, q] == held.rows[b * step, k]

    def count(self, box, *, num_heads):
        shared = len(self.only_row.unique()) == 1
        return Bounds(box.area if shared else torch.zeros_like(box.area), box.area)


@constructor
def same_label(labels, *, name="labels"):
    """Pattern in which each token sees the tokens with its label."""
    return of_tensor(SameLabel, labels, name)


@settings(max_examples=4)
@given(sets(2))
def test_a_pattern_with_a_part(twin):
    pattern = Transposed(twin.pattern)
    mod = pattern.bind(num_heads=2, num_queries=9, num_keys=9).mask_mod()
    inner = twin.pattern.bind(num_heads=2, num_queries=9, num_keys=9).mask_mod()
    h, q, k = torch.arange(2)[:, None, None], torch.arange(9)[:, None], torch.arange(9)
    assert torch.equal(mod(0, h, q, k).expand(2, 9, 9), inner(0, h, q, k).expand(2, 9, 9).mT)
    check_pattern(pattern, num_heads=2, max_tokens=16, examples=4)


labels_of = st.lists(st.integers(-2, 2), min_size=13, max_size=13)


@settings(max_examples=5)
@given(st.lists(labels_of, min_size=1, max_size=2), st.booleans())
def test_a_run_time_pattern_is_its_rule(rows, causal):
    labels = torch.tensor(rows)
    counts = (labels[:, None, :, None] == labels[:, None, None, :]).long().expand(2, 2, 13, 13)
    pattern = same_label(labels) | masks.first_tokens(1) if not causal else same_label(labels) & masks.causal()
    first = torch.arange(13) == 0
    counts = counts.tril() if causal else (counts | first).long()
    q, k, v = torch.randn(3, 2, 2, 13, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tensors = tuple(x.requires_grad_() for x in (q.clone(), k.clone(), v.clone()))
    assert_agrees(lambda *qkv: fd.attend(*qkv, pattern, engine="aten", return_lse=True), tensors, counts)
    assert repr(pattern).startswith("same_label('labels')")
    assert masks.parse(repr(pattern)) == masks.from_json(masks.to_json(pattern))
    table = Labels.of(labels[:1])
    check_pattern(table, max_tokens=13, examples=4)
    for built in (table, table & masks.causal()):  # of no run-time tensor's name
        assert masks.explain(built, query=5, key=3, num_tokens=13).multiplicity == (labels[0, 5] == labels[0, 3])
    mask = masks.block_mask(pattern, 13, num_heads=2, block_size=2)
    assert mask.mask_mod is not None
    blocks = torch.nn.functional.max_pool2d(counts[: len(labels), 0].float(), 2, ceil_mode=True)
    assert torch.equal(mask.to_dense()[:, 0].float().expand_as(blocks), blocks)
