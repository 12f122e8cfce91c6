"""DilatedAttention: values and gradients against the dense definition, and its life as a module."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from tests.support import oracle
from tests.support.longnet_oracle import multiplicity

# float64 against float64: only the order of sums differs.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}


def drawn(B=2, H=4, G=4, N=37, M=37, D=8, seed=0):
    torch.manual_seed(seed)
    sizes = ((B, H, N, D), (B, G, M, D), (B, G, M, D))
    return tuple(torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)


def assert_same_function(module, tensors, counts, scale=None):
    out, (expected, _) = module(*tensors), oracle.attention(*tensors, counts, scale)
    assert_close(out, expected, **TOLERANCE)
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, tensors, cotangent)
    for got, want in zip(gradients, torch.autograd.grad(expected, tensors, cotangent), strict=True):
        assert_close(got, want, **TOLERANCE)


branches = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 9)), min_size=1, max_size=3)


@given(branches, st.booleans(), st.integers(1, 5), st.integers(1, 30), st.integers(1, 30))
def test_equals_the_definition(pairs, causal, H, N, M):
    segments, rates = zip(*pairs, strict=True)
    counts = multiplicity(segments, rates, num_heads=H, num_queries=N, num_keys=M, causal=causal)
    module = fd.DilatedAttention(segments, rates, causal)
    assert_same_function(module, drawn(B=1, H=H, G=H, N=N, M=M, D=4), counts)


@pytest.mark.parametrize("engine", [None, "tiles", "reference"])
@pytest.mark.parametrize(("segments", "rates"), [((8, 16), (1, 3)), ((8,), (3,))])
def test_every_engine(engine, segments, rates):
    # The second pair of branches leaves rows without keys.
    counts = multiplicity(segments, rates, num_heads=4, num_queries=37, num_keys=37, causal=True)
    module = fd.DilatedAttention(segments, rates, True, engine=engine)
    assert_same_function(module, drawn(), counts)


def test_shared_key_value_heads_and_scale():
    counts = multiplicity((8, 16), (1, 3), num_heads=4, num_queries=37, num_keys=37, causal=False)
    module = fd.DilatedAttention((8, 16), (1, 3), enable_gqa=True, scale=0.7)
    assert_same_function(module, drawn(G=2), counts, scale=0.7)


@pytest.mark.parametrize("rules", [{"offsets": "contiguous"}, {"heads": "grouped"}])
def test_offset_and_head_rules_reach_the_pattern(rules):
    segments, rates = (8, 16), (2, 3)
    sizes = {"num_heads": 4, "num_queries": 37, "num_keys": 37, "causal": True}
    counts = multiplicity(segments, rates, **sizes, **rules)
    assert not torch.equal(counts, multiplicity(segments, rates, **sizes))
    assert_same_function(fd.DilatedAttention(segments, rates, True, **rules), drawn(), counts)


def test_rows_without_keys_give_zero():
    q, k, v = drawn(H=1, G=1)
    out = fd.DilatedAttention([8], [2])(q, k, v)
    assert not out[:, :, 1::2].any()  # segments of 8 start at even tokens, and head 0 is active on even ones
    assert out[:, :, ::2].all()


def test_one_module_serves_any_size_and_holds_nothing():
    module = fd.DilatedAttention((8, 16), (1, 2))
    before = dict(vars(module))
    for N, H in ((1, 1), (5, 3), (64, 2)):
        counts = multiplicity((8, 16), (1, 2), num_heads=H, num_queries=N, num_keys=N, causal=False)
        assert_same_function(module, drawn(H=H, G=H, N=N, M=N), counts)
    assert vars(module) == before
    assert not list(module.parameters())
    assert not module.state_dict()


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles(remake):
    module = fd.DilatedAttention((8, 16), (1, 2), True, scale=0.5)
    module(*drawn())
    again = remake(module)
    assert again.pattern == module.pattern
    assert_close(again(*drawn()), module(*drawn()), rtol=0, atol=0)


def test_repr_names_the_pattern_and_the_engine():
    text = repr(fd.DilatedAttention((8, 16), (1, 2), True, engine="reference"))
    assert all(part in text for part in ("longnet((8, 16), (1, 2)) & causal()", "engine='reference'"))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (((8, 16), (1,)), {}, ValueError, "one entry each a branch"),
        (((), ()), {}, ValueError, "one entry each a branch"),
        (((0,), (1,)), {}, ValueError, "at least 1"),
        (((8,), (0,)), {}, ValueError, "at least 1"),
        (((8,), (1.5,)), {}, TypeError, "must be an integer"),
        (((8,), (1,), None), {}, TypeError, "causal must be True or False; got causal=None"),
        (
            ((8,), (1,)),
            {"offsets": "random"},
            ValueError,
            "'interleaved', 'contiguous'; got offsets='random'",
        ),
        (((8,), (1,)), {"heads": "some"}, ValueError, "'all', 'grouped'; got heads='some'"),
        (((8,), (1,)), {"engine": "dense"}, ValueError, "got engine='dense'"),
        (((8,), (1,)), {"scale": float("nan")}, ValueError, "scale must be finite"),
        (((8,), (1,)), {"scale": "1"}, TypeError, "scale must be a real number"),
        (((8,), (1,)), {"enable_gqa": 1}, TypeError, "enable_gqa must be True or False"),
    ],
)
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        fd.DilatedAttention(*arguments, **options)


def test_bad_inputs():
    q, k, v = drawn()
    module = fd.DilatedAttention((8,), (1,))
    with pytest.raises(ValueError, match="4 dims"):
        module(q[0], k, v)
    with pytest.raises(ValueError, match="need enable_gqa=True"):
        module(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="one dtype"):
        module(q.float(), k, v)
