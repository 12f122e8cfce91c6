"""LongNet: the whole model against its dense definition, in every choice and order; its training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from tests.support import longnet_oracle
from tests.support.longnet_oracle import TINY

N, V = 37, TINY.vocab_size
EMBEDDED = replace(TINY, vocab_size=None)
# float64 against float64: only the order of sums differs.
TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}
CONFIGS = {
    "plain": TINY,
    "embedded": EMBEDDED,
    "not causal": replace(TINY, causal=False),
    "grouped heads": replace(TINY, num_kv_heads=2, rotary_base=500.0),
    "tied": replace(TINY, num_kv_heads=1, tie_embeddings=True, ffn_dim=10, depth=1),
    "rows without keys": replace(TINY, segment_lengths=(8,), dilation_rates=(3,)),
    "contiguous": replace(TINY, offsets="contiguous", causal=False),
    "groups of heads": replace(TINY, heads="grouped"),
    "rms, bias": replace(TINY, norm="rms", bias=True, subln=True),
    "xpos": replace(TINY, position="xpos", xpos_scale=5),
    "learned": replace(TINY, position="learned", max_positions=N),
    "no positions": replace(TINY, position=None, num_heads=8),  # of an odd head dim
    "subln": replace(TINY, subln=True, num_kv_heads=2),
    "deepnorm": replace(TINY, deepnorm=True, bias=True),
    "deepnorm, rms": replace(TINY, deepnorm=True, norm="rms", depth=1),
    "encoder": replace(TINY, vocab_size=None, causal=False, subln=True, bias=True, position=None),
    "checkpoint": replace(TINY, deepnorm=True, checkpoint=True),
}


def model_of(config, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = fd.LongNet(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases begin at 1 and 0, which hides what they do
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens_of(B=2, N=N):
    return torch.randint(V, (B, N), generator=torch.Generator().manual_seed(5))


def input_of(config, N=N):
    if config.vocab_size is not None:
        return tokens_of(N=N)
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, N, config.embed_dim, dtype=torch.float64, generator=generator)


def assert_is_defined(config, x):
    """Outputs and the gradients of every parameter, of the model and of the oracle."""
    model = model_of(config)
    weights = dict(model.named_parameters())
    out, expected = model(x), longnet_oracle.longnet(config, weights, x, deep=(2 * config.depth) ** 0.25)
    assert_close(out, expected, **TOLERANCE)
    cotangent = torch.randn_like(expected)
    got, want = (torch.autograd.grad(y, list(weights.values()), cotangent) for y in (out, expected))
    for name, ours, theirs in zip(weights, got, want, strict=True):
        assert_close(ours, theirs, rtol=1e-7, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
    return out


def bits_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_definition(name):
    """With tokens in residue order; in the natural one, and in that of the planner, the outputs are the same."""
    config = replace(CONFIGS[name], layout="residue")
    x = input_of(config)
    out = assert_is_defined(config, x)
    with torch.no_grad():
        assert_close(model_of(replace(config, layout="auto" if name == "plain" else "natural"))(x), out, **TOLERANCE)


def test_bfloat16_autocast_trains_close_to_float32():
    model = model_of(replace(TINY, layout="residue"), dtype=torch.float32)
    exact = bits_of(model, tokens_of())
    with torch.autocast("cpu", torch.bfloat16):
        loss = bits_of(model, tokens_of())
        assert model(tokens_of()).dtype == torch.bfloat16
    assert_close(loss, exact, rtol=0.01, atol=0)
    expected = torch.autograd.grad(exact, list(model.parameters()))
    for ours, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert (ours - wanted).norm() <= 0.1 * wanted.norm()


def test_begins_near_uniform_and_learns():
    torch.manual_seed(0)
    model = fd.LongNet(TINY)
    tokens = torch.arange(40).remainder(7)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = bits_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(V).log().item(), abs=0.1)
    assert losses[-1] < 0.2


@pytest.mark.slow
def test_compiled_training_step_equals_eager():
    """Outputs, loss and gradients by AOT; that Inductor takes the op as it is belongs to tests of attend."""
    torch.compiler.reset()
    config = replace(TINY, depth=1, layout="residue", segment_lengths=(4, 16), dilation_rates=(1, 2))
    model = model_of(config, dtype=torch.float32)
    compiled, parameters = torch.compile(model, fullgraph=True, backend="aot_eager"), list(model.parameters())
    for num_tokens in (N, 24):
        tokens = tokens_of(N=num_tokens)
        # One graph for both lengths. With dynamic=True torch would trace it twice, for the floats of the modules.
        torch._dynamo.mark_dynamic(tokens, 1)
        outs = compiled(tokens), model(tokens)
        assert_close(*outs, rtol=1e-5, atol=1e-5)
        losses = [F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for out in outs]
        assert_close(*losses, rtol=1e-5, atol=0)
        for ours, wanted in zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True):
            assert (ours - wanted).norm() <= 1e-4 * wanted.norm()
