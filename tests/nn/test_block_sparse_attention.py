"""BlockSparseAttention and DilatedAttention: attend with a pattern inside, and their life as modules."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.longnet_oracle import multiplicity
from tests.support.strategies import cases, tensors

PATTERN = masks.longnet([8, 16], [2, 4]) & masks.causal()
RULE = oracle.both(oracle.longnet([8, 16], [2, 4]), oracle.causal())


def qkv(H: int = 4, G: int = 4, N: int = 37, M: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, *sizes, 8, dtype=torch.float64) for sizes in ((H, N), (G, M), (G, M)))
    return q, k, v


@settings(max_examples=12)  # the call is attend's; these are its options, handed on
@given(st.data(), st.booleans(), st.booleans(), st.booleans())
def test_is_the_oracle(data, sinks, capped, padded):
    """Any queries over any keys, grouped key/value heads, sinks, a score_mod, padding, and all the gradients."""
    case = data.draw(cases().filter(lambda case: case.num_heads == case.num_heads_global))
    inputs = data.draw(tensors(case))
    options = {"sinks": True, "num_heads": case.num_heads} if sinks else {}
    module = fd.BlockSparseAttention(case.twin.pattern, enable_gqa=True, scale=0.7, block_size=8, **options).double()
    parameters, call, counts = tuple(module.parameters()), {}, case.counts()
    for sink in parameters:
        torch.nn.init.normal_(sink)
    if padded:
        hidden = torch.rand(len(inputs[0]), case.num_keys, generator=torch.Generator().manual_seed(0)) < 0.4
        call["key_padding_mask"], counts = hidden, counts * ~hidden[:, None, None]
    if capped:
        call["score_mod"] = lambda score, b, h, q_idx, k_idx: torch.tanh(score)
    out = module(*inputs, q_offset=case.q_offset, k_offset=case.k_offset, **call)
    truth, _ = oracle.attention(*inputs, counts, 0.7, *parameters, **({"modify": torch.tanh} if capped else {}))
    assert_close(out, truth, **TIGHT)
    if not out.requires_grad:
        return
    cotangent = torch.randn_like(truth)
    found = torch.autograd.grad(out, (*inputs, *parameters), cotangent)
    assert_close(found, torch.autograd.grad(truth, (*inputs, *parameters), cotangent), **TIGHT)


def test_sinks_are_a_parameter():
    """0 at first, in the state, trained, moved and cast; without them there is no parameter at all."""
    plain = fd.BlockSparseAttention(PATTERN)
    assert not list(plain.parameters())
    assert not plain.state_dict()
    module = fd.BlockSparseAttention(PATTERN, sinks=True, num_heads=4)
    assert torch.equal(module.state_dict()["sinks"], torch.zeros(4))
    module.double()(*qkv()).square().sum().backward()
    assert module.sinks.grad.abs().min() > 0
    other = fd.BlockSparseAttention(PATTERN, sinks=True, num_heads=4).double()
    other.load_state_dict({"sinks": torch.arange(4.0)})
    assert_close(other(*qkv()), fd.attend(*qkv(), PATTERN, sinks=torch.arange(4.0)), rtol=0, atol=0)
    assert other.bfloat16().sinks.dtype == torch.bfloat16
    assert other.to("meta").sinks.is_meta


branches = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 9)), min_size=1, max_size=3).filter(
    lambda pairs: any(rate <= segment for segment, rate in pairs)
)
engines = st.sampled_from([None, "aten", "portable", "reference"])


@example([(8, 2)], False, None, 1, 16, 16)  # half of the rows have no keys
@settings(max_examples=12)
@given(branches, st.booleans(), engines, st.integers(1, 5), st.integers(1, 37), st.integers(1, 37))
def test_dilated_attention_is_its_definition(pairs, causal, engine, H, N, M):
    """Values and gradients of any branches over any sizes; a module holds nothing of a call."""
    segments, rates = zip(*pairs, strict=True)
    module = fd.DilatedAttention(segments, rates, causal, engine=engine)
    assert isinstance(module, fd.BlockSparseAttention)
    inputs, before = tuple(x.requires_grad_() for x in qkv(H, H, N, M)), dict(vars(module))
    counts = multiplicity(segments, rates, num_heads=H, num_queries=N, num_keys=M, causal=causal)
    out, (truth, _) = module(*inputs, q_offset=0), oracle.attention(*inputs, counts)
    assert_close(out, truth, **TIGHT)
    cotangent = torch.randn_like(truth)
    found, expected = (torch.autograd.grad(each, inputs, cotangent) for each in (out, truth))
    assert_close(found, expected, **TIGHT)
    assert vars(module) == before
    assert not list(module.parameters())
    assert not module.state_dict()


def test_the_options_of_dilated_attention():
    """Its pattern is that of the constructors; the rest goes where BlockSparseAttention has it."""
    for rules in ({}, {"offsets": "contiguous"}, {"heads": "grouped"}):
        pattern = masks.longnet([8, 16], [2, 4], **rules)
        assert fd.DilatedAttention([8, 16], [2, 4], **rules).pattern == pattern
        assert fd.DilatedAttention([8, 16], [2, 4], causal=True, **rules).pattern == pattern & masks.causal()
        assert fd.MultiheadDilatedAttention(12, 2, [8, 16], [2, 4], **rules).pattern == pattern
    options = {"scale": 0.7, "enable_gqa": True, "engine": "reference"}
    module, other = fd.DilatedAttention([8, 16], [2, 4], True, **options), fd.BlockSparseAttention(PATTERN, **options)
    assert repr(module) == repr(other).replace("BlockSparse", "Dilated")
    assert_close(module(*qkv(G=2)), other(*qkv(G=2)), rtol=0, atol=0)
