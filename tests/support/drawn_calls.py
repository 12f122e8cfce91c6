"""Calls of `attend` drawn with every feature, for every engine, beside what the dense oracle needs to answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Dropout, _operands, _rows, multiplicity
from flexdilated.engines.aten import _single_keys, _tile_blocks, _tile_calls
from flexdilated.engines.flex import _program
from flexdilated.engines.kernels import _key_lists, _portable
from flexdilated.masks.attended import _row
from flexdilated.masks.blocks import _block_search, _blocks
from flexdilated.masks.patterns import _table_split
from flexdilated.masks.planning import _candidates
from flexdilated.masks.planning.lowering import _key_lists as _planned_lists
from tests.support.agreement import Attention, assert_agrees
from tests.support.dense_flex import flex_on_cpu
from tests.support.padded import everything_padded, padded_cases
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, block_sides, cases, sinks, tensors
from tests.support.ties import NoTies, tied

# B batch, H query heads, N queries, M keys

ENGINES = ("aten", "portable", "reference", "flex")  # flex around a dense kernel
OF_SAMPLES = ["mask", "same_document", "per_sample", "queries_from"]  # seldom drawn otherwise
SEED = 7
BAD = st.sampled_from([float("nan"), float("inf"), -float("inf")])  # in slots that are hidden


@dataclass(frozen=True)
class Modified:
    """One rule twice: as a score_mod, and dense, from the positions of rows and columns.

    A soft cap, a factor for each batch entry, a bias for each head and distance, and a wave over absolute positions.
    """

    cap: float
    factors: Tensor  # (B,)
    table: Tensor  # (H, 2 reach + 1)

    def score_mod(self) -> Callable[..., Tensor]:
        cap, factors, table = self.cap, self.factors, self.table
        reach = table.shape[1] // 2

        def score_mod(score, b, h, q_idx, k_idx):
            distance = (q_idx - k_idx).clamp(-reach, reach)
            capped = cap * torch.tanh(score * factors[b] / cap)
            wave = torch.sin(0.5 * q_idx.to(score.dtype) + 0.3 * k_idx.to(score.dtype))
            return capped + table[h, distance + reach] + wave

        return score_mod

    def dense(self, heads: range, queries: Tensor, keys: Tensor) -> Callable[[Tensor], Tensor]:
        reach = self.table.shape[1] // 2
        distance = (queries[:, None] - keys[None, :]).clamp(-reach, reach)
        wave = torch.sin(0.5 * queries.double()[:, None] + 0.3 * keys.double()[None, :])
        bias = torch.stack([self.table[head][distance + reach] for head in heads]) + wave
        return lambda scores: self.cap * (scores * self.factors[:, None, None, None] / self.cap).tanh() + bias


@st.composite
def modified(draw: st.DrawFn, batch: int, num_heads: int) -> Modified:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    factors = torch.rand(batch, generator=generator, dtype=torch.float64) + 0.5
    table = torch.randn(num_heads, 2 * draw(st.integers(0, 9)) + 1, generator=generator, dtype=torch.float64)
    return Modified(draw(st.sampled_from([1.0, 20.0])), factors, table.requires_grad_())


@dataclass(frozen=True)
class DrawnCall:
    """A call with its options, and counts, scale, score_mod and dropout as the oracle takes them.

    inputs: q, k, v, and sinks if there are any. learned: what else has a gradient. is_tied: the inputs are full of
    ties, through which no gradient may pass. surroundings: what changes how the call is computed, and nothing else.
    """

    pattern: masks.Pattern | masks.Mixture
    inputs: tuple[Tensor, ...]
    counts: Tensor
    options: dict[str, Any]
    features: dict[str, Any]
    learned: tuple[Tensor, ...]
    is_tied: bool
    surroundings: Surroundings

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return fd.attend(q, k, v, self.pattern, sinks=sinks, enable_gqa=True, return_lse=True, **self.options)

    def seeded(self, *tensors: Tensor, run: Attention | None = None) -> tuple[Tensor, Tensor]:
        """The call, with the dropout that `features` are of."""
        torch.manual_seed(SEED)
        with NoTies() if self.is_tied else nullcontext():
            return (run or self.run)(*tensors)

    def assert_is_the_oracle(self, run: Attention | None = None) -> None:
        """run: the call in another form."""
        with self.surroundings.entered():
            attend = partial(self.seeded, run=run)
            assert_agrees(attend, self.inputs, self.counts, learned=self.learned, **self.features)

    def __repr__(self) -> str:
        shapes = [tuple(x.shape) for x in self.inputs]
        return f"{self.pattern.text} of {shapes} by {self.options}, {self.surroundings}"


@dataclass(frozen=True)
class Surroundings:
    """Other limits and costs than usual: of memory, of work at once, of each way to compute a pattern.

    costs: the seed of random costs, by which any way may be the cheapest; None for real ones. flex: around a dense
    kernel, with the plans of an accelerator or of the CPU; None for another engine. pads: dilated segments are computed
    over their active tokens, however few these are.
    """

    limits: dict[tuple[Any, str], int] = field(default_factory=dict)
    costs: int | None = None
    flex: bool | None = None
    pads: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
            for (module, name), limit in self.limits.items():
                patch.setattr(module, name, limit)
            if self.costs is not None:
                random = Random(self.costs)
                patch.setattr(_candidates, "cost_of", lambda *_: _candidates.Cost(*(random.random() for _ in range(4))))
            if self.flex is not None:
                stack.enter_context(flex_on_cpu(trains=self.flex))
            if self.pads:
                stack.enter_context(everything_padded())
            masks.cache().clear()
            yield
        masks.cache().clear()

    def __repr__(self) -> str:
        limits = {name: limit for (_, name), limit in self.limits.items()}
        return f"limits {limits}, costs {self.costs}, flex {self.flex}, pads {self.pads}"


LIMITS: dict[str, dict[tuple[Any, str], list[int]]] = {
    "aten": {
        (_tile_calls, "_LEAST_PAIRS"): [1, 40, 500, 1 << 20],  # the last keeps small problems together
        (_tile_calls, "_MAX_JOINED_SLOTS"): [1, 12],
        (_tile_blocks, "_PAIRS_AT_ONCE"): [1, 100],  # heads one by one, some
        (_tile_blocks, "GATHERED_BYTES"): [1, 2000],
        (_operands, "_MASK_BYTES"): [0, 300],
        (_planned_lists, "_GATHERED_KEY_COST"): [-(10**9), 10**9],  # single keys are gathered, or all pairs masked
        (_single_keys, "_MASK_BYTES"): [1, 3000],
        (_blocks, "_PAIRS_AT_ONCE"): [100],
        (_blocks, "_SLOTS_AT_ONCE"): [1],
        (_block_search, "_FRONTIER"): [5],
        (_rows, "_MOST_VIEWS"): [1],
        (_row, "_MOST_COMPARISONS"): [1],
        (_row, "_FEW_PAIRS"): [1],
    },
    "portable": {
        (_portable, "_SCORES_AT_ONCE"): [1, 100, 2000],
        (_portable, "_SCORES_AT_ONCE_IN_GRAPHS"): [300],
        (_key_lists, "GATHERED_BYTES"): [1, 300, 5000],
        (_table_split, "_FEW_KEYS"): [-1, 99],  # tables as block lists, tables of any blocks as single keys
    },
    "flex": {
        (_program, "_MOST_NUMBERS"): [16, 100, 400],
        (_program, "TILE"): [1, 2, 4],
        (_operands, "_SLOTS_AT_ONCE"): [20],
        (_operands, "_BOUNDS_COST"): [0],
        (_operands, "_BLOCKS_AT_ONCE"): [3],
    },
    "reference": {},
}


@st.composite
def surroundings(draw: st.DrawFn, engine: str, *, pads: bool) -> Surroundings:
    limits = {name: draw(st.sampled_from(some)) for name, some in LIMITS[engine].items() if draw(st.booleans())}
    costs = draw(st.none() | st.integers(0, 99)) if engine != "reference" else None
    flex = draw(st.booleans()) if engine == "flex" else None
    return Surroundings(limits, costs, flex, pads and engine in ("portable", "flex"))


@st.composite
def drawn_calls(draw: st.DrawFn, engine: str, *, plain: bool = False) -> DrawnCall:
    """Calls of an engine. plain: without score_mod and dropout, with keys for each batch entry."""
    own = {"aten": "few", "flex": "padded", "portable": "padded"}.get(engine, "any")
    kind = draw(st.sampled_from(["any", "any", "whole", "run-time", "of samples", "padded", own, own]))
    of_samples = st.sampled_from(OF_SAMPLES).flatmap(lambda name: packed_cases(kinds=[name]))
    some = {"whole": cases(whole=True), "run-time": packed_cases(), "of samples": of_samples, "padded": padded_cases()}
    some["few"] = draw(st.sampled_from([cases(), packed_cases(), of_samples]))
    case: Case | Packed = draw(some.get(kind, cases()))
    case = _of_few_queries(case) if kind == "few" else case
    if kind == "padded" and draw(st.booleans()):  # some queries stand before every segment that has keys
        case = replace(case, k_offset=case.k_offset + draw(st.integers(1, 40)))
    inputs, is_tied = draw(_inputs(case, plain=plain))
    options: dict[str, Any] = {"engine": engine, "scale": draw(st.none() | st.floats(-2, 2) | scales(case.num_heads))}
    sides = st.tuples(block_sides, block_sides)
    options["block_size"] = None if kind == "few" else draw(st.none() | sides)
    options |= case.offsets if isinstance(case, Packed) else case.sizes
    counts = case.counts if isinstance(case, Packed) else case.counts()
    learned: tuple[Tensor, ...] = ()
    features: dict[str, Any] = {"scale": options["scale"]}
    if isinstance(options["scale"], Tensor):
        learned, features["scale"] = (options["scale"],), options["scale"].reshape(-1, 1, 1)
    queries, keys = (
        torch.arange(first, first + number)
        for first, number in ((case.q_offset, case.num_queries), (case.k_offset, case.num_keys))
    )
    rows, columns = slice(None), slice(None)  # of counts, in the order of the tokens in the tensors
    if torch.equal(queries, keys) and not case.q_offset and draw(st.booleans()):
        options["layout"] = masks.Layout(case.num_queries, draw(st.integers(1, min(7, case.num_queries))))
        rows = columns = options["layout"].positions()
    if not plain and engine != "aten" and draw(st.booleans()):
        heads = case.heads if isinstance(case, Case) else range(case.num_heads)
        rule = draw(modified(len(inputs[0]), heads.stop if isinstance(case, Packed) else case.num_heads_global))
        features["modify"] = rule.dense(heads, queries[rows], keys[columns])
        options["score_mod"], learned = rule.score_mod(), (*learned, rule.table)
    if not plain and engine != "aten" and draw(st.booleans()):
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 0.9]))
        kept = shares(case, len(inputs[0]), drawn_dropout(options["dropout_p"]))[..., rows, :][..., columns]
        features["dropped"] = lambda weights: weights * kept
    around = draw(surroundings(engine, pads=kind == "padded"))
    counts = counts[..., rows, :][..., columns]
    pattern = case.pattern if isinstance(case, Packed) else case.twin.pattern
    return DrawnCall(pattern, inputs, counts, options, features, learned, is_tied, around)


def scales(num_heads: int) -> st.SearchStrategy[float | Tensor]:
    """Odd numbers, and trained tensors: one for all heads, or one for each."""
    each = torch.linspace(-1, 2, num_heads, dtype=torch.float64)
    odd = st.sampled_from([0.0, -0.7, 1e-300, -1e-300])
    return odd | st.sampled_from([each[0], each]).map(lambda scale: scale.clone().requires_grad_())


def _of_few_queries(case: Case | Packed) -> Case | Packed:
    """The last ones, which go without a plan."""
    few = min(case.num_queries, _rows.MOST_ROWS)
    others = case.num_queries - few
    case = replace(case, num_queries=few, q_offset=case.q_offset + others)
    return replace(case, counts=case.counts[:, :, others:]) if isinstance(case, Packed) else case


@st.composite
def _inputs(draw: st.DrawFn, case: Case | Packed, *, plain: bool) -> tuple[tuple[Tensor, ...], bool]:
    """(q, k, v and half of the time sinks, True if they are full of ties); of k and v some have batch 1."""
    q, k, v = draw(tensors(case, batch=case.batch if isinstance(case, Packed) else None))
    is_tied = not plain and draw(st.integers(0, 3)) == 3
    if is_tied:
        q, k, v = (tied(*x.shape, seed=place) for place, x in enumerate((q, k, v)))
    if not plain and draw(st.integers(0, 3)) == 3:
        k, v = (x.detach()[:1].requires_grad_() for x in (k, v))
    return ((q, k, v, draw(sinks(case.num_heads))) if draw(st.booleans()) else (q, k, v)), is_tied


def drawn_dropout(p: float) -> Dropout:
    """The dropout of the next call after `torch.manual_seed(SEED)`."""
    torch.manual_seed(SEED)
    return Dropout.drawn(p, torch.device("cpu"))


def shares(case: Case | Packed, batch: int, dropout: Dropout) -> Tensor:
    """(B, H, N, M): of the branches that allow a pair, the share that keeps it, over 1 - p; by a loop over branches."""
    bound = replace(case.bind(), batch=batch)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(bound.num_heads)[:, None, None] + bound.head_offset
    q, k = (torch.arange(bound.num_queries)[:, None] + bound.q_offset), torch.arange(bound.num_keys) + bound.k_offset
    total, number = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for place, branch in enumerate(bound.pattern.branches()):
        allowed = multiplicity(replace(bound, pattern=branch), torch.device("cpu"))
        total, number = total + allowed * dropout.kept(place, b, h, q, k), number + allowed
    return total / number.clamp(min=1) / (1 - dropout.p)
