"""Models around one body: padding, checkpoints; classifiers, encoder and decoder; layers that choose their keys."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.nn._longnet_block import Block, residual_scales
from tests.support import longnet_oracle
from tests.support.longnet_oracle import TINY

V = TINY.vocab_size
ENCODER = replace(TINY, causal=False, vocab_size=23, depth=3, embed_dim=16, num_kv_heads=2)
TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}


def tokens_of(length: int, vocab: int = V, batch: int = 2) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(5))


def pair_of(**options) -> fd.LongNetEncoderDecoder:
    torch.manual_seed(0)
    kinds = {"dtype": torch.float64}
    return fd.LongNetEncoderDecoder(replace(ENCODER, **options), replace(TINY, num_kv_heads=2, **options), **kinds)


def classifier(pooling: str, **options) -> fd.LongNetClassifier:
    return fd.LongNetClassifier(replace(TINY, layout="residue", **options), 3, pooling=pooling, dtype=torch.float64)


def model_of(**options) -> fd.LongNet:
    return fd.LongNet(replace(TINY, **options), dtype=torch.float64)


SELECTION = fd.SelectedLayers(block=8, most=2)
PADDED = {
    "LongNet": lambda: model_of(causal=False, layout="natural"),
    "in residue order, with checkpoints": lambda: model_of(causal=False, layout="residue", checkpoint=True),
    "in the planner's order": lambda: model_of(causal=False, layout="auto"),
    "that selects keys": lambda: model_of(selection=SELECTION),
    "mean": lambda: classifier("mean", causal=False),
    "causal mean": lambda: classifier("mean", causal=True),
    "first": lambda: classifier("first", causal=False),
    "last": lambda: classifier("last", causal=True),
}


@pytest.mark.parametrize("make", PADDED.values(), ids=PADDED)
def test_a_padded_sequence_gets_what_it_gets_alone(make) -> None:
    """Whatever tokens the padding holds, with the gradients of all parameters; for a mask of floats, too."""
    torch.manual_seed(0)
    model, tokens, lengths = make(), tokens_of(37, batch=3), (37, 20, 1)
    padding = torch.arange(37) >= torch.tensor(lengths)[:, None]
    out = model(tokens, key_padding_mask=padding)
    floats = torch.where(padding, -torch.inf, 0.0)
    assert_close(model(tokens, key_padding_mask=floats), out, rtol=0, atol=0)
    alone = torch.cat([model(tokens[row, None, :length])[0] for row, length in enumerate(lengths)])
    found = out[~padding] if out.dim() == 3 else out.flatten()
    assert_close(found, alone, **TOLERANCE)
    grads = [
        torch.autograd.grad(each.sin().sum(), tuple(model.parameters()), allow_unused=True) for each in (found, alone)
    ]
    assert_close(*grads, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_a_classifier_pools_the_features_of_its_body(causal: bool) -> None:
    torch.manual_seed(0)
    tokens = tokens_of(37)
    for pooling, pool in {"mean": lambda x: x.mean(1), "first": lambda x: x[:, 0], "last": lambda x: x[:, -1]}.items():
        model = classifier(pooling, causal=causal)
        expected = F.linear(pool(model.backbone(tokens)), model.head.weight, model.head.bias)
        assert_close(model(tokens), expected, **TOLERANCE)


CHECKPOINTED = {
    "LongNet": lambda **options: model_of(layout="residue", **options),
    "that selects keys": lambda **options: model_of(selection=SELECTION, **options),
    "that learns what to select": lambda **options: model_of(selection=replace(SELECTION, gradient="bias"), **options),
    "encoder and decoder": lambda **options: pair_of(**options),
}


@pytest.mark.parametrize("make", CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_checkpoints_run_each_block_again_and_change_no_gradient(make, monkeypatch) -> None:
    calls, gradients, forward = [], [], Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *args: calls.append(self) or forward(self, *args))
    for times in (1, 2):
        torch.manual_seed(0)
        model = make(checkpoint=times == 2)
        blocks = [each for each in model.modules() if isinstance(each, Block)]
        given = (tokens_of(31, 23), tokens_of(12)) if len(blocks) > 2 else (tokens_of(37),)
        model(*given).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert len(calls) == times * len(blocks)
        calls.clear()
    assert_close(*gradients, rtol=0, atol=0)
    with torch.no_grad():
        model(*given)
    assert len(calls) == len(blocks)


@pytest.mark.parametrize("options", [{"subln": True, "bias": True}, {"deepnorm": True}])
def test_encoder_and_decoder_equal_the_definition(options):
    model = pair_of(**options)
    source, tokens = tokens_of(31, 23), tokens_of(12)
    encoder, decoder = model.encoder.config, model.decoder.config
    ends = dict(model.encoder.named_parameters()), dict(model.decoder.named_parameters())
    deep = residual_scales(encoder, decoder_depth=2)[0], residual_scales(decoder, encoder_depth=3)[0]
    memory = longnet_oracle.longnet(encoder, ends[0], source, deep=deep[0])
    expected = longnet_oracle.longnet(decoder, ends[1], tokens, memory, deep=deep[1])
    assert_close(model(source, tokens), expected, **TOLERANCE)
    parameters = [*ends[0].values(), *ends[1].values()]
    got, want = (torch.autograd.grad(y.square().sum(), parameters) for y in (model(source, tokens), expected))
    assert_close(got, want, rtol=1e-7, atol=1e-8)


def test_padding_of_the_source_is_not_seen():
    model = pair_of()
    source, tokens = tokens_of(31, 23), tokens_of(12)
    padding = torch.arange(31) >= torch.tensor([31, 9])[:, None]
    out = model(source, tokens, source_padding_mask=padding)
    assert_close(out[1:], model(source[1:, :9], tokens[1:]), **TOLERANCE)
    assert_close(out[:1], model(source[:1], tokens[:1]), **TOLERANCE)
    drawn = model.generate(source, tokens, source_padding_mask=padding, max_new_tokens=4, temperature=0)
    assert_close(drawn[1:], model.generate(source[1:, :9], tokens[1:], max_new_tokens=4, temperature=0))


def test_generation_takes_the_likeliest_token_of_the_whole_pass():
    model = pair_of()
    source, tokens = tokens_of(31, 23), tokens_of(3)
    drawn = model.generate(source, tokens, max_new_tokens=6, temperature=0, prefill_chunk=2)
    assert_close(drawn[:, 3:], model(source, drawn[:, :-1])[:, 2:].argmax(-1))


SELECTING: dict[str, Any] = {"vocab_size": 50, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_kv_heads": 2}
BRANCHES: dict[str, Any] = {"segment_lengths": (256,), "dilation_rates": (1,)}


def config(selection: fd.SelectedLayers | None, **options: Any) -> fd.LongNetConfig:
    return fd.LongNetConfig(**SELECTING, **BRANCHES, **options, selection=selection)


def twins(selection: fd.SelectedLayers, **options: Any) -> tuple[fd.LongNet, fd.LongNet]:
    """Two models with the same weights: with the selection, and without."""
    torch.manual_seed(0)
    one, other = (fd.LongNet(config(own, **options)).double() for own in (selection, None))
    other.load_state_dict(one.state_dict())
    return one, other


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 50, (2, 90)), torch.arange(90) >= torch.tensor([[90], [61]])


@pytest.mark.parametrize("causal", [True, False])
def test_all_blocks_are_one_segment(causal: bool) -> None:
    """Where every block is chosen a layer reads what one segment holds, in padded batches as well."""
    options = {"causal": causal, "position": None}
    model, dense = twins(fd.SelectedLayers(block=8, most=12), **options)
    tokens, padding = padded()
    real = ~padding
    out, expected = (each(tokens, key_padding_mask=padding) for each in (model, dense))
    assert_close(out[real], expected[real])
    few, _ = twins(fd.SelectedLayers(block=8, most=1), **options)
    assert (few(tokens, key_padding_mask=padding)[real] - expected[real]).abs().max() > 1e-3


def test_named_layers_choose_and_the_others_do_not() -> None:
    """Layer 1 alone: the model is that whose layer 1 got the attention by hand."""
    model, other = twins(fd.SelectedLayers(block=8, most=2, layers=[1], always="chunked(8) | first_tokens(8)"))
    tokens, _ = padded()
    assert [block.selected is None for block in model.blocks] == [True, False]
    assert not torch.allclose(model(tokens), other(tokens))
    always = masks.chunked(8) | masks.first_tokens(8)
    selector = fd.BlockSelector(block=8, choose=fd.TopK(2), always=always)
    other.blocks[1].selected = fd.SelectedAttention(selector)
    assert_close(model(tokens), other(tokens))
    tokens, padding = padded()
    assert_close(model(tokens, key_padding_mask=padding), other(tokens, key_padding_mask=padding))
    # In whose order blocks would hold other tokens.
    other.config, other.residue_rate = replace(other.config, layout="residue"), 4
    assert_close(model(tokens), other(tokens))


@pytest.mark.parametrize(("gradient", "query_block"), [("none", 4), ("bias", 1)])
def test_caches_and_generate_follow_one_pass(gradient: str, query_block: int) -> None:
    selection = fd.SelectedLayers(block=8, most=2, gradient=gradient, query_block=query_block, scorer="minmax")
    model, _ = twins(selection)
    tokens = padded()[0]
    with torch.no_grad():
        whole, caches = model(tokens), model.new_caches()
        parts = [model(part, caches=caches) for part in tokens.split([40, 1, 1, 33, 15], dim=1)]
    assert_close(torch.cat(parts, 1), whole)
    found = model.generate(tokens, max_new_tokens=3, temperature=0, prefill_chunk=37)
    assert found[:, 90:].equal(model(found[:, :-1])[:, 89:].argmax(-1))
