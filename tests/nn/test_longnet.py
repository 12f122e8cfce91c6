"""LongNet against its dense definition, in every choice and order; its training, positions, dropout and scales."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.nn._longnet_block import Block, residual_scales, rotary_table, rotate
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


def test_xpos_goes_as_far_as_it_says():
    config = replace(TINY, position="xpos", xpos_scale=1, segment_lengths=(64,), dilation_rates=(1,))
    model = model_of(config).float()
    tokens = torch.randint(V, (1, 126))
    exact = model_of(config)
    exact.load_state_dict(model.double().state_dict())
    assert_close(model.float()(tokens).double(), exact(tokens), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"xPos reaches 126 tokens with xpos_scale=1: raise it, .*; got 127 tokens"):
        model(torch.randint(V, (1, 127)))
    with pytest.raises(ValueError, match="range of float32 or bfloat16; got float16"):
        model.half()(tokens)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "drop_path"])
def test_dropout_is_of_training(kind, checkpoint):
    config = replace(EMBEDDED, checkpoint=checkpoint)
    plain, model = model_of(config), model_of(replace(config, **{kind: 0.5}))
    x = input_of(config, 5).repeat(4, 1, 1)
    assert_close(model.eval()(x), plain(x), rtol=0, atol=0)
    model.train()
    torch.manual_seed(1)
    drawn = [model(x) for _ in range(3)]
    assert all((one - other).abs().max() > 1e-3 for one, other in pairwise(drawn))
    torch.manual_seed(1)
    again = model(x)
    assert_close(again, drawn[0], rtol=0, atol=0)
    # What a checkpointed block draws again in the backward is what it drew: the gradient is that of the output.
    torch.manual_seed(1)
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    ends = []
    for sign in (1, -1):
        torch.manual_seed(1)
        ends.append(model((x + sign * 1e-6 * direction).detach()).square().sum().item())
    assert (slope * direction).sum().item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4)


def test_a_mean_over_dropped_paths_is_the_path():
    """In the last block the given rate, from 0 in the first."""
    model = model_of(replace(EMBEDDED, depth=3, drop_path=0.5)).train()
    assert [block.drop_path for block in model.blocks] == [0.0, 0.25, 0.5]
    block = model.blocks[2]
    x = torch.randn(1, 2, 24, dtype=torch.float64).expand(4000, 2, 24)
    torch.manual_seed(0)
    added = block._add_sublayer(x, block.ffn_norm, lambda y: y) - x
    block.eval()
    assert_close(added.mean(0), (block._add_sublayer(x, block.ffn_norm, lambda y: y) - x)[0], rtol=0.1, atol=0.02)


def test_scales_are_those_of_the_papers():
    deep, sub = replace(TINY, deepnorm=True, depth=6), replace(TINY, subln=True, depth=6)
    assert residual_scales(TINY) == (1.0, 0.5)
    assert residual_scales(replace(TINY, depth=16)) == pytest.approx((1.0, 32**-0.5))
    assert residual_scales(deep) == pytest.approx((12**0.25, 48**-0.25))
    assert residual_scales(deep, encoder_depth=18) == pytest.approx((18**0.25, 72**-0.25))
    size = (6**4 * 18) ** (1 / 16)
    assert residual_scales(deep, decoder_depth=18) == pytest.approx((0.81 * size, 0.87 / size))
    log = torch.log(torch.tensor([12.0, 18.0, 54.0], dtype=torch.float64)).tolist()
    assert residual_scales(sub) == pytest.approx((1.0, log[0] ** 0.5))
    assert residual_scales(sub, encoder_depth=18) == pytest.approx((1.0, log[1] ** 0.5))
    assert residual_scales(sub, decoder_depth=18) == pytest.approx((1.0, (log[2] * log[0] / 3) ** 0.5))


@pytest.mark.parametrize(("kind", "residual"), [({"deepnorm": True}, 48**-0.25), ({"subln": True}, None), ({}, 0.5)])
def test_weights_begin_with_the_gain_of_their_scales(kind, residual):
    torch.manual_seed(0)
    config = replace(TINY, embed_dim=512, depth=2 if not kind else 6, bias=True, **kind)
    (block, *_) = fd.LongNet(config).blocks
    assert isinstance(block, Block)
    gain = torch.tensor(12.0).log().item() ** 0.5 if residual is None else residual
    inner = gain if kind else 1.0
    q, k, v = block.qkv.weight.chunk(3)
    for weight, expected in (
        *((q, 1), (k, 1), (v, inner), (block.ffn_in.weight, inner)),
        *((block.attention_out.weight, gain), (block.ffn_out.weight, gain)),
    ):
        assert weight.std().item() * weight.shape[1] ** 0.5 == pytest.approx(expected, rel=0.02)
    assert not any(layer.bias.any() for layer in (block.qkv, block.attention_out, block.ffn_in, block.ffn_out))


def test_rotary_angles_are_exact_a_million_tokens_in():
    positions = torch.tensor([0, 1, 999_999])
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    angles = positions[:, None] * 100.0 ** -(torch.arange(4).double() / 4)
    units = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(x[..., :4], x[..., 4:]) * units[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    for dtype, table_dtype, error in (
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 1e-2),
    ):
        table = rotary_table(positions, head_dim=8, base=100.0, dtype=dtype)
        got = rotate(x.to(dtype), table)
        assert (got.dtype, table[0].dtype) == (dtype, table_dtype)
        assert (got - expected).norm() <= error * expected.norm()
