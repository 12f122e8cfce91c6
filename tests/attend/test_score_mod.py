"""score_mod: called with batch entries, global heads and positions, in every layout and engine that takes it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._call import Call
from flexdilated.engines._score_mod import in_order, in_segments, plain_values, shifted
from flexdilated.engines.flex._flex_op import static_program
from flexdilated.engines.flex._program import make_flex_program
from flexdilated.masks.planning import Allowed, Plan, plan
from tests.engines.test_flex import CPU, around_dense, attend_by, call_key, qkv
from tests.support import oracle, twins
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.compilers import without_inductor
from tests.support.padded import padded_cases, padded_plan
from tests.support.strategies import Case, block_sides, cases, tensors, whole_cases

# B batch, H query heads, N queries, M keys, D head dim


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

    def of(self, case: Case) -> Callable[[Tensor], Tensor]:
        queries = torch.arange(case.q_offset, case.q_offset + case.num_queries)
        return self.dense(case.heads, queries, torch.arange(case.k_offset, case.k_offset + case.num_keys))


@st.composite
def modified(draw: st.DrawFn, batch: int, num_heads: int, learnable: bool = False) -> Modified:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    factors = torch.rand(batch, generator=generator, dtype=torch.float64) + 0.5
    table = torch.randn(num_heads, 2 * draw(st.integers(0, 9)) + 1, generator=generator, dtype=torch.float64)
    return Modified(draw(st.sampled_from([1.0, 20.0])), factors, table.requires_grad_(learnable))


@pytest.mark.parametrize("engine", ["reference", "portable"])
@given(st.data())
def test_any_pattern_is_the_oracle(engine, data):
    case = data.draw(cases())
    drawn = data.draw(tensors(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads_global))

    def attend(q, k, v):
        options = {"enable_gqa": True, "engine": engine, "return_lse": True, **case.sizes}
        return fd.attend(q, k, v, case.twin.pattern, score_mod=rule.score_mod(), **options)

    assert_agrees(attend, drawn, case.counts(), modify=rule.of(case))


@given(st.data(), block_sides)
def test_flex_in_every_order_is_the_oracle(data, side):
    """Small problems are cheapest in one order of tokens: the others must find the positions all the same."""
    case = data.draw(cases())
    drawn = data.draw(tensors(case))
    assert_every_order(case, drawn, data.draw(modified(len(drawn[0]), case.num_heads_global)), side)


@settings(max_examples=5)
@given(st.data())
def test_flex_in_every_order_with_every_offset(data):
    """Some of the heads, and positions that begin late, where all orders are weighed."""
    twin = twins.dilated(24, 3, 1) & twins.causal()
    case = Case(twin, 2, 21, 30, q_offset=17, k_offset=8, head_offset=1, num_heads_global=4)
    layouts = {option.layout for option in plan(case.bind(), allowed=LISTS).options[0]}
    assert layouts == {"natural", "residue 3"}
    drawn = data.draw(tensors(case))
    assert_every_order(case, drawn, data.draw(modified(len(drawn[0]), case.num_heads_global)), 8)


@given(st.data(), padded_cases(), block_sides)
def test_flex_over_padded_segments_is_the_oracle(data, case, side):
    drawn = data.draw(tensors(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads_global))
    sizes = {"num_kv_heads": drawn[1].shape[1], "block_size": (side, side), "device": CPU}
    program = make_flex_program(padded_plan(case), masks.Layout(case.num_queries), **sizes)
    attend = around_dense(program, 0.5, score_mod=rule.score_mod())
    assert_agrees(attend, drawn, case.counts(), scale=0.5, modify=rule.of(case))


LISTS = Allowed(windows=False, key_weights=False, lists_only=True)


def assert_every_order(case: Case, drawn: tuple[Tensor, ...], rule: Modified, side: int) -> None:
    weighed = plan(case.bind(), allowed=LISTS)
    sizes = {"num_kv_heads": drawn[1].shape[1], "block_size": (side, side), "device": CPU}
    for choice in range(max(len(options) for options in weighed.options)):
        chosen = tuple((options[choice % len(options)],) for options in weighed.options)
        program = make_flex_program(Plan.of(weighed.bound, weighed.layout, chosen), weighed.layout, **sizes)
        attend = around_dense(program, 0.5, score_mod=rule.score_mod())
        assert_agrees(attend, drawn, case.counts(), scale=0.5, modify=rule.of(case))


@settings(max_examples=12)
@given(st.data(), st.integers(2, 7), block_sides)
@pytest.mark.parametrize("engine", ["flex", "reference", "portable"])
def test_in_a_layout(engine, data, rate, side):
    """Positions are those of the tokens, wherever they stand in the input."""
    case = data.draw(whole_cases())
    positions = masks.Layout(case.num_keys, rate).positions()
    counts = case.counts()[:, positions][:, :, positions]
    drawn = data.draw(tensors(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads))
    key = call_key(case, drawn[1].shape[1], side, rate)
    options = {"layout": key.layout, "enable_gqa": True, "engine": engine, "return_lse": True}
    attend = partial(fd.attend, pattern=case.twin.pattern, scale=0.5, score_mod=rule.score_mod(), **options)
    if engine == "flex":
        attend = attend_by(key, 0.5, score_mod=rule.score_mod())
    assert_agrees(attend, drawn, counts, scale=0.5, modify=rule.dense(case.heads, positions, positions))


@given(st.data(), block_sides)
@pytest.mark.parametrize("engine", ["flex", "reference", "portable"])
def test_what_it_captures_can_learn(engine, data, side):
    """The gradient of a table of biases; flex runs around a dense kernel here."""
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    rule = data.draw(modified(len(q), case.num_heads_global, learnable=True))
    options = {"enable_gqa": True, "engine": engine, "scale": 0.5, "return_lse": True, **case.sizes}
    attend = partial(fd.attend, pattern=case.twin.pattern, score_mod=rule.score_mod(), **options)
    if engine == "flex":
        attend = attend_by(call_key(case, k.shape[1], side), 0.5, score_mod=rule.score_mod())
    truth, _ = oracle.attention(q, k, v, case.counts(), 0.5, modify=rule.of(case))
    cotangent = torch.randn_like(truth)
    (expected,) = torch.autograd.grad(truth, rule.table, cotangent)
    out, _ = attend(q, k, v)
    (found,) = torch.autograd.grad(out, rule.table, cotangent, allow_unused=True)
    assert_close(torch.zeros_like(expected) if found is None else found, expected, **TIGHT)


@pytest.fixture
def traced_only():
    with without_inductor():
        yield


def alibi(slopes: Tensor):
    def score_mod(score, b, h, q_idx, k_idx):
        return score - slopes[h] * (q_idx - k_idx).abs()

    return score_mod


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


@pytest.mark.parametrize("engine", ["reference", "portable", "around a dense kernel"])
def test_decoding_sees_the_same_biases(engine):
    """The last rows of one pass are those of a call with offsets, on some of the heads; sinks come on top."""
    pattern = masks.longnet([16, 48], [1, 3]) & masks.causal()
    q, k, v = (x.double() for x in qkv(40))
    sinks = torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=torch.float64)
    features = {"score_mod": alibi(SLOPES.double())}
    whole = fd.attend(q, k, v, pattern, sinks=sinks, engine="reference", **features)
    part = q[:, 1:3, 33:], k[:, 1:3], v[:, 1:3]
    key = Call(pattern.text, 2, 2, 7, 40, 33, 0, 1, 4, 1, (8, 8))
    if engine != "around a dense kernel":
        sizes = {"q_offset": 33, "head_offset": 1, "num_heads_global": 4}
        found = fd.attend(*part, pattern, sinks=sinks[1:3], engine=engine, **sizes, **features)
    else:
        found, _ = attend_by(key, 16**-0.5, **features)(*part, sinks[1:3])
    assert_close(found, whole[:, 1:3, 33:], **TIGHT)


PATTERNS = {
    in_segments: masks.dilated(1024, 4),
    in_order: masks.strided(16) & masks.causal(),
    shifted: masks.local_window(left=40, right=3),
}


@pytest.mark.slow
@pytest.mark.parametrize(("indices", "compiled"), [(in_segments, False), (in_order, True), (shifted, False)])
@pytest.mark.usefixtures("traced_only")
def test_compiled_on_cpu(indices, compiled):
    """FlexAttention in every kind of layout, by itself or in a caller's graph, against the reference.

    A kernel in C++ that changes scores is built in tests/masks/patterns/test_custom.py.
    """
    q, k, v = (x.expand(2, -1, -1, -1) * torch.tensor([1.0, -1.0])[:, None, None, None] for x in qkv(300))
    key = Call(PATTERNS[indices].text, 4, 4, 300, 300, 0, 0, 0, 4, 1, (32, 32))
    rule = Modified(20.0, torch.tensor([1.0, 0.5]), torch.linspace(-1, 1, 4 * 81).view(4, 81).roll(40, 1))

    def attend(q, k, v, engine):
        options = {"engine": engine, "score_mod": rule.score_mod(), "block_size": 32}
        return fd.attend(q, k, v, PATTERNS[indices], **options)

    found = (torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend)(q, k, v, "flex")
    assert_close(found, attend(q, k, v, "reference"), rtol=1e-4, atol=1e-5)
    assert {step.indices.translate for step in static_program(key, CPU).steps} == {indices}


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_the_same_function_compiles_once():
    """Called again, made again around the same tensors, or around others: one compilation; a new constant: one more."""
    before = counters["stats"]["unique_graphs"]
    q, k, v = qkv(130)
    pattern = masks.local_window(left=9, right=0)

    def check(score_mod) -> int:
        found = fd.attend(q, k, v, pattern, engine="flex", score_mod=score_mod)
        assert_close(found, fd.attend(q, k, v, pattern, engine="reference", score_mod=score_mod))
        return counters["stats"]["unique_graphs"] - before

    first = alibi(SLOPES)
    assert [check(first), check(first), check(alibi(SLOPES)), check(alibi(SLOPES.flip(0)))] == [1] * 4

    def scaled(by: float):
        return lambda score, b, h, q_idx, k_idx: score * by

    assert [check(scaled(2.0)), check(scaled(3.0)), check(scaled(2.0))] == [2, 3, 3]


def wrong_number(score, b, h, q_idx):
    return score


class Callable4:
    def __call__(self, score, b, h, q_idx):
        return score


def branching(score, b, h, q_idx, k_idx):
    return score if q_idx > k_idx else score + 1


def squared(score):
    return score**2


def counting(score, b, h, q_idx, k_idx):
    SLOPES[h] = score
    return score


@pytest.mark.parametrize(
    ("score_mod", "error", "says"),
    [
        (1.0, TypeError, r"must be a function of \(score, b, h, q_idx, k_idx\); got float"),
        (Callable4(), TypeError, r"must take .*; got \(score, b, h, q_idx\)"),
        (partial(alibi(SLOPES), 1.0), TypeError, r"must take .*; got \(b, h, q_idx, k_idx\)"),
        (wrong_number, TypeError, r"must take \(score, b, h, q_idx, k_idx\); got \(score, b, h, q_idx\)"),
        (
            branching,
            ValueError,
            "must not branch on values of tensors .*; it called Tensor.__bool__",
        ),
        (lambda score, b, h, q, k: torch.func.grad(squared)(score), TypeError, "without TorchScript and torch.func"),
        (counting, ValueError, "must not write to tensors that it captured; it called __setitem__"),
        (lambda score, b, h, q_idx, k_idx: None, TypeError, "must return a tensor; got NoneType"),
        (
            lambda score, b, h, q_idx, k_idx: torch.zeros(3),
            ValueError,
            r"it is called with one score; got shape \(3,\)",
        ),
    ],
)
@pytest.mark.parametrize("engine", ["flex", "reference", "portable"])
def test_bad_functions(engine, score_mod, error, says):
    q, k, v = qkv(32)
    with pytest.raises(error, match=says):
        fd.attend(q, k, v, masks.causal(), engine=engine, score_mod=score_mod)


def test_who_serves_it():
    """tiles does not, and what flex on CPU cannot do is left to portable, which no call needs to name."""
    q, k, v = qkv(32)
    causal, mixture = masks.causal(), masks.longnet([8, 16], [1, 2])
    learning = SLOPES.clone().requires_grad_()
    wanting = q.clone().requires_grad_()
    for says, call in {
        "aten takes no score_mod": partial(fd.attend, q, k, v, causal, engine="aten"),
        "no lse on CPU": partial(fd.attend, q, k, v, causal, engine="flex", return_lse=True),
        "2 branches": partial(fd.attend, q, k, v, mixture, engine="flex"),
        "q, k or v requires a gradient": partial(fd.attend, wanting, k, v, causal, engine="flex"),
        "no float64": partial(fd.attend, q.double(), k.double(), v.double(), causal, engine="flex"),
    }.items():
        with pytest.raises(ValueError, match=says) as error:
            call(score_mod=alibi(SLOPES))
        assert "engine='portable'" in str(error.value)
        assert ("engine='flex'" in str(error.value)) == ("aten" in says)
    with pytest.raises(ValueError, match=r"score_mod uses a tensor that requires a gradient; engine='portable' serves"):
        fd.attend(q, k, v, causal, engine="flex", score_mod=alibi(learning))
    for pattern in (causal, mixture):
        out = fd.attend(wanting, k, v, pattern, score_mod=alibi(learning))
        exact = fd.attend(wanting, k, v, pattern, score_mod=alibi(learning), engine="reference")
        grads, exact_grads = (torch.autograd.grad(x.square().sum(), (wanting, learning)) for x in (out, exact))
        assert_close((out, *grads), (exact, *exact_grads))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_what_could_learn_serves_without_gradients():
    q, k, v = qkv(32)
    learning = SLOPES.clone().requires_grad_()
    with torch.no_grad():
        found = fd.attend(q, k, v, masks.causal(), engine="flex", score_mod=alibi(learning))
    assert_close(found, fd.attend(q, k, v, masks.causal(), engine="reference", score_mod=alibi(SLOPES)))


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("N", [512, 500])
def test_training_on_a_device(N):
    """A mixture with sinks and a learnable bias, against the reference on the host."""
    pattern = masks.longnet([64, 256], [1, 2]) & masks.causal()
    inputs = *qkv(N), SLOPES, torch.zeros(4)
    grads = []
    for device, engine in (("cuda", "flex"), ("cpu", "reference")):
        q, k, v, slopes, sinks = (x.to(device).requires_grad_() for x in inputs)
        out = fd.attend(q, k, v, pattern, score_mod=alibi(slopes), sinks=sinks, engine=engine)
        grads.append([x.cpu() for x in torch.autograd.grad(out.square().sum(), (q, k, v, slopes, sinks))])
    for found, truth in zip(*grads, strict=True):
        assert (found - truth).norm() <= 1e-2 * truth.norm()


def capturing(value: object) -> Callable[[Tensor], object]:
    return lambda score: value


VALUES = [[1, 2], [(1,), (2,)], [{"a": 1}, {"a": 2}, {"b": 1}], [{1}, {1, 2}], [{"a": [1]}, {"a": [2]}]]


@pytest.mark.parametrize("values", VALUES)
def test_what_functions_captured_tells_them_apart(values):
    """Those that are told apart are compiled each for itself; torch gives up after eight of the others."""
    assert len({plain_values(capturing(value)) for value in values}) == len(values)
    assert len({plain_values(capturing(deepcopy(value))) for value in (values[0], values[0])}) == 1


def test_a_function_whose_capture_is_not_there_yet():
    def early() -> int:
        return late

    before = plain_values(early)
    late = 3
    assert before != plain_values(early) == plain_values(early)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_scripted_code_is_refused():
    """It computes where nothing sees it; its result would be taken for a table."""
    code = "def add(score, bias):\n    # type: (Tensor, Tensor) -> Tensor\n    return score + bias\n"
    add = torch.jit.CompilationUnit(code).add
    q, k, v = qkv(32)
    for rule in (
        lambda score, b, h, q, k: add(score, SLOPES[h]),
        lambda score, b, h, q, k: score + 2 * add(SLOPES[h], SLOPES[h]),
    ):
        with pytest.raises(TypeError, match=r"without TorchScript and torch\.func"):
            fd.attend(q, k, v, masks.causal(), score_mod=rule)
