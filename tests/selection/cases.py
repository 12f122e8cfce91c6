"""What the tests of selection draw: a selector, its inputs, and what the oracle is asked for it."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support import selection_oracle as oracle

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


@dataclass(frozen=True)
class Case:
    """A call of a selector, with the run-time tensors that its patterns name."""

    options: dict[str, Any]
    q: Tensor
    k: Tensor
    q_offset: int
    bindings: dict[str, Tensor]

    @cached_property
    def selector(self) -> fd.BlockSelector:
        return fd.BlockSelector(**self.options)

    def run(self, q: Tensor | None = None, k: Tensor | None = None, **options: Any) -> fd.Selection:
        q, k = self.q if q is None else q, self.k if k is None else k
        return self.selector(q, k, q_offset=self.q_offset, bindings=self.bindings, **options)

    def asked(self, selector: fd.BlockSelector | None = None) -> oracle.Asked:
        selector = self.selector if selector is None else selector
        choose = selector.choose
        assert isinstance(selector.scorer, str)
        whole = selector.query_block > 1 and selector.query_summary == "mean"
        tables = {"head": self.q.shape[1], "group": self.k.shape[1], "all": 1}[selector.share]
        always = masks.every() & ~masks.every() if selector.always is None else selector.always
        return oracle.Asked(
            *(self.table(pattern) for pattern in (selector.within, always)),
            *(selector.block, selector.query_block, selector.scorer),
            (choose.kind, choose.amount),
            *(choose.most, tables, whole, self.q_offset),
            self.q.shape[-1] ** -0.5,
            selector.stride,
        )

    def table(self, pattern: masks.Pattern) -> Tensor:
        """(B, H, N, M) booleans, by the rule elementwise."""
        B, H, N, _ = self.q.shape
        M = self.k.shape[2]
        tensors = {name: x for name, x in self.bindings.items() if name in pattern.text}
        bound = pattern.resolve(tensors, masks.core.Extent(self.q_offset + N, M)).bind(
            num_heads=H, num_queries=N, num_keys=M, q_offset=self.q_offset, batch=B
        )
        index = (torch.arange(size) for size in (B, H, N, M))
        b, h, q, k = (x.view([-1 if axis == place else 1 for axis in range(4)]) for place, x in enumerate(index))
        return bound.mask_mod()(b, h, q, k).expand(B, H, N, M).contiguous()

    def __repr__(self) -> str:
        return f"{self.options} of q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, {self.q_offset=}, {self.bindings}"


LEAVES = ["causal", "full", "window", "late_window", "strided", "per_head"]
WITH_TENSORS = ["documents", "lengths", "visible"]
SCORERS = ("mean", "minmax", "mass", "antidiagonal")


@st.composite
def withins(
    draw: st.DrawFn, H: int, B: int, N: int, M: int, q_offset: int, leaves: list[str]
) -> tuple[Any, dict[str, Tensor]]:
    """One rule or two, with tensors of this call."""
    end = max(q_offset + N, M)
    tensors: dict[str, Tensor] = {}

    def rows(values: st.SearchStrategy, size: int, number: int = B) -> Tensor:
        shared = draw(st.booleans())
        drawn = [draw(st.lists(values, min_size=size, max_size=size)) for _ in range(1 if shared else number)]
        return torch.tensor(drawn[0] if shared else drawn)

    def leaf(name: str) -> Any:
        if name == "documents":
            tensors["docs"] = rows(st.sampled_from([0, 0, 0, 1]), end).cumsum(-1)
            return masks.documents("docs")
        if name == "lengths":
            tensors["real"] = torch.tensor([draw(st.integers(0, end)) for _ in range(B)])
            return masks.lengths("real")
        if name == "visible":
            tensors["shown"] = rows(st.sampled_from([True, True, False]), M)
            return masks.visible_keys("shown")
        if name == "per_head":
            others = [draw(st.sampled_from([masks.causal(), masks.local_window(left=5, right=0)])) for _ in range(H)]
            return masks.per_head(others)
        left = draw(st.integers(0, 12))
        return {
            "causal": masks.causal(),
            "full": masks.every(),
            "window": masks.local_window(left=left, right=0),
            "late_window": masks.local_window(left=left, right=left),
            "strided": masks.strided(3),
        }[name]

    first, *second = draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=2, unique=True))
    pattern = leaf(first)
    for name in second:
        pattern = pattern & leaf(name)
    return pattern, tensors


@st.composite
def cases(draw: st.DrawFn, scorers: tuple[str, ...] = SCORERS, batch: int | None = None, tensors: bool = True) -> Case:
    """Self-attention and others, ragged ends, rows that are cut, every scorer, choice and share.

    batch: instead of 1 or 2. tensors: rules with run-time tensors, too.
    """
    B, G, per = batch or draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    H, N, M = G * per, draw(st.integers(1, 22)), draw(st.integers(1, 22))
    q_offset = draw(st.sampled_from([0, 0, 3, 7]))
    if draw(st.booleans()):
        M = q_offset + N
    within, bindings = draw(withins(H, B, N, M, q_offset, LEAVES + WITH_TENSORS if tensors else LEAVES))
    scorer = draw(st.sampled_from(scorers))
    # A row is one query, or several that look with the first of them or with all.
    looks = "all" if scorer == "antidiagonal" else draw(st.sampled_from(["each", "first", "first", "all"]))
    block, query_block = draw(st.integers(1, 6)), 1 if looks == "each" else draw(st.integers(2, 4))
    options: dict[str, Any] = {"scorer": scorer, "query_summary": "first" if looks == "first" else "mean"}
    if scorer == "antidiagonal":
        stride = draw(st.sampled_from([1, 2]))
        block, query_block = stride * draw(st.integers(1, 3)), stride * draw(st.integers(2, 3))
        options["stride"] = stride
    options["future_in_choice"] = looks == "all"
    always = draw(
        st.sampled_from([None, masks.chunked(block), masks.first_tokens(3), masks.local_window(left=4, right=0)])
    )
    most = draw(st.sampled_from([1, 2, 3, 30]))
    amount = draw(st.sampled_from([0.05, 0.3, 0.7, 1.0]))
    chooses = [fd.TopK(most), fd.TopP(amount, most=most), fd.Threshold(amount, most=most)]
    chooses += [fd.TopP(amount, most=most, of="row")] if scorer in ("mass", "antidiagonal") else []
    choose = draw(st.sampled_from(chooses))
    options |= {"block": block, "query_block": query_block, "choose": choose, "within": within, "always": always}
    options |= {"share": draw(st.sampled_from(["head", "group", "all"]))}
    D = draw(st.integers(1, 4))
    torch.manual_seed(draw(st.integers(0, 99)))
    q, k = torch.randn(B, H, N, D, dtype=torch.float64), torch.randn(B, G, M, D, dtype=torch.float64)
    return Case(options, q, k, q_offset, bindings)


def with_coarse(case: Case, *, ratio: int, rows: int, most: int) -> Case:
    """The same, restricted by a coarse choice."""
    own, query_block = case.options, case.options["query_block"] * rows
    shares = {"head": "group", "group": "all", "all": "all"}
    options = {name: own[name] for name in ("within", "always", "query_summary")}
    options["future_in_choice"] = query_block > 1 and own["query_summary"] == "mean"
    options |= {"block": own["block"] * ratio, "query_block": query_block, "share": shares[own["share"]]}
    choose = own["choose"]
    choose = fd.TopP(choose.p, most=choose.most) if isinstance(choose, fd.TopP) else choose  # not of the whole row
    coarse = fd.BlockSelector(**options, choose=fd.TopK(most))
    return replace(case, options={**own, "choose": choose, "coarse": coarse})


def assert_selects(found: fd.Selection, answer: oracle.Answer, most: int) -> None:
    """The same blocks in the same order, their scores, density and cut."""

    def padded(rows: list, value: float) -> list:
        return [[[[*row, *[value] * (most - len(row))] for row in table] for table in entry] for entry in rows]

    assert found.blocks.dtype == torch.int64
    assert found.blocks.tolist() == padded(answer.blocks, -1)
    expected = torch.tensor(padded(answer.scores, -inf), dtype=torch.float64)
    assert_close(found.scores.double(), expected, rtol=1e-9, atol=1e-9)
    assert_close(found.density.item(), answer.density, rtol=1e-6, atol=1e-6)
    assert_close(found.cut.item(), answer.cut, rtol=1e-6, atol=1e-6)
