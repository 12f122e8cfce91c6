"""LongNet's choices: positions, dropout, scales, what a configuration refuses; by their own laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.nn._longnet_block import Block, residual_scales, rotary_table, rotate
from tests.nn.test_longnet import CONFIGS, EMBEDDED, V, input_of, model_of
from tests.support.longnet_oracle import TINY


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


@torch.no_grad()
def test_learned_positions_end():
    model = model_of(CONFIGS["learned"])
    caches = model.new_caches()
    model(input_of(TINY, 30), caches=caches)
    with pytest.raises(
        ValueError, match=r"has 37 learned positions: make it with more max_positions, .*; got 38 tokens"
    ):
        model(input_of(TINY, 8), caches=caches)


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
    model = model_of(replace(EMBEDDED, depth=1, drop_path=0.5)).train()
    block = model.blocks[0]
    block.drop_path = 0.5
    x = torch.randn(1, 2, 24, dtype=torch.float64).expand(4000, 2, 24)
    torch.manual_seed(0)
    added = block._add(x, block.ffn_norm, lambda y: y) - x
    block.eval()
    assert_close(added.mean(0), (block._add(x, block.ffn_norm, lambda y: y) - x)[0], rtol=0.1, atol=0.02)


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
