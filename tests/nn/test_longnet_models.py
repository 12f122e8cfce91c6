"""LongNets around one body: classifiers, encoder and decoder, and models in folders."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.nn._longnet_block import residual_scales
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


@pytest.mark.parametrize(("pooling", "causal"), [("mean", False), ("mean", True), ("first", False), ("last", True)])
def test_a_padded_sequence_gets_the_outputs_it_gets_alone(pooling, causal):
    torch.manual_seed(0)
    config = replace(TINY, causal=causal, layout="residue")
    model = fd.LongNetClassifier(config, 3, pooling=pooling, dtype=torch.float64)
    tokens, lengths = tokens_of(37, batch=3), (37, 20, 1)
    padding = torch.arange(37) >= torch.tensor(lengths)[:, None]
    outputs = model(tokens, key_padding_mask=padding)
    for row, length in enumerate(lengths):
        x = model.backbone(tokens[row, None, :length])[0]
        pooled = {"mean": x.mean(0), "first": x[0], "last": x[-1]}[pooling]
        expected = F.linear(pooled, model.head.weight, model.head.bias)
        assert_close(outputs[row], expected, **TOLERANCE)
        assert_close(model(tokens[row, None, :length])[0], expected, **TOLERANCE)
    floats = torch.where(padding, -torch.inf, 0.0)
    assert_close(model(tokens, key_padding_mask=floats), outputs, rtol=0, atol=0)
    outputs.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_a_classifier_learns():
    """Which of two tokens a sequence holds more often, by cross entropy, and how often, by squares: three outputs."""
    torch.manual_seed(0)
    tokens = torch.randint(2, (24, 12))
    share = tokens.float().mean(1)
    sizes = {"depth": 1, "segment_lengths": (12,), "dilation_rates": (1,), "position": None, "num_heads": 1}
    model = fd.LongNetClassifier(replace(TINY, causal=False, **sizes), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(25):
        out = model(tokens)
        loss = torch.stack([F.cross_entropy(out[:, :2], (share > 0.5).long()), F.mse_loss(out[:, 2], share)])
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        losses.append(loss.detach())
    assert (losses[-1] < 0.4 * losses[0]).all()


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
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


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


def test_checkpointed_encoder_and_decoder_have_the_same_gradients():
    source, tokens = tokens_of(31, 23), tokens_of(12)
    gradients = []
    for checkpoint in (False, True):
        model = pair_of(checkpoint=checkpoint)
        model(source, tokens).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.slow
def test_encoder_and_decoder_compile():
    torch.compiler.reset()
    model = pair_of(depth=1, segment_lengths=(16,), dilation_rates=(2,)).float()
    compiled = torch.compile(model, fullgraph=True, backend="eager")  # blocks' ops are compiled elsewhere
    for lengths in ((31, 12), (40, 9)):
        source, tokens = tokens_of(lengths[0], 23), tokens_of(lengths[1])
        torch._dynamo.mark_dynamic(source, 1)  # one graph for both lengths
        torch._dynamo.mark_dynamic(tokens, 1)
        assert_close(compiled(source, tokens), model(source, tokens), rtol=1e-5, atol=1e-5)


MODELS = {
    "LongNet": lambda: fd.LongNet(replace(TINY, tie_embeddings=True, position="learned", max_positions=40)),
    "LongNetBackbone": lambda: fd.LongNetBackbone(replace(TINY, bias=True, subln=True)),
    "LongNetClassifier": lambda: fd.LongNetClassifier(TINY, 3, pooling="last"),
    "LongNetEncoderDecoder": lambda: fd.LongNetEncoderDecoder(ENCODER, TINY, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_from_its_folder(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.save_pretrained(tmp_path / "new" / "folder")
    again = type(model).from_pretrained(tmp_path / "new" / "folder")
    inputs = (tokens_of(31, 23), tokens_of(12)) if name == "LongNetEncoderDecoder" else (tokens_of(37),)
    assert_close(again(*inputs), model(*inputs), rtol=0, atol=0)
    assert again.made_of() == model.made_of()
    assert not again.training
    assert {each.dtype for each in again.parameters()} == {each.dtype for each in model.parameters()}
    wide = type(model).from_pretrained(tmp_path / "new" / "folder", dtype=torch.float64)
    assert {each.dtype for each in wide.parameters()} == {torch.float64}
    torch.manual_seed(1)  # and it is a model like any other
    again.train()
    again(*inputs).float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


def test_bad_folders_are_named(tmp_path):
    model = fd.LongNet(TINY)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is of a LongNet: call LongNet.from_pretrained; got LongNetClassifier"):
        fd.LongNetClassifier.from_pretrained(tmp_path)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    wrong = {name: each for name, each in weights.items() if name != "norm.weight"}
    wrong |= {"stranger": torch.ones(1), "blocks.0.qkv.weight": torch.ones(2, 3)}
    save_file(wrong, tmp_path / "model.safetensors")
    named = r"norm.weight is missing; stranger is unknown; blocks.0.qkv.weight has shape \(2, 3\) instead of \(72, 24\)"
    with pytest.raises(ValueError, match=named):
        fd.LongNet.from_pretrained(tmp_path)
    for changed, says in (
        ({**config, "arguments": {**config["arguments"], "rate": 3}}, "arguments that LongNet does not know: rate"),
        ({**config, "arguments": {"config": {**config["arguments"]["config"], "speed": 3}}}, "does not know: speed"),
        ({"model": "LongNet"}, "must be as save_pretrained writes it"),
        ([], "must be as save_pretrained writes it"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=says):
            fd.LongNet.from_pretrained(tmp_path)


def test_without_safetensors_it_says_what_to_install(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("flexdilated.nn._pretrained.import_module", missing)
    for call in (fd.LongNet(TINY).save_pretrained, fd.LongNet.from_pretrained):
        with pytest.raises(ImportError, match=r"pip install 'flexdilated\[pretrained\]'"):
            call(tmp_path)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fd.LongNetEncoderDecoder(ENCODER, ENCODER), ValueError, "the decoder must have causal=True"),
        (lambda: fd.LongNetEncoderDecoder(ENCODER, replace(TINY, vocab_size=None)), ValueError, "have a vocabulary"),
        (lambda: fd.LongNetEncoderDecoder(ENCODER, 3), TypeError, "decoder must be a LongNetConfig; got int"),
        (lambda: fd.LongNetClassifier(TINY, 0), ValueError, "num_outputs must be at least 1"),
        (lambda: fd.LongNetClassifier(TINY, 1)(tokens_of(0)), ValueError, r"needs a token .*; got shape \(2, 0\)"),
        (lambda: fd.LongNet(TINY, memory_dim=4)(tokens_of(3)), ValueError, "memory_dim=4 and no memory"),
        (lambda: fd.LongNet(TINY, memory_dim=0), ValueError, "memory_dim must be at least 1"),
        (
            lambda: fd.LongNet(TINY, memory_dim=4)(tokens_of(3), memory=torch.ones(2, 3)),
            ValueError,
            r"memory must have shape \(batch, tokens, 4\); got \(2, 3\)",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.backbone.", "model._orig_mod."])
def test_weights_that_a_wrapper_named(prefix, tmp_path) -> None:
    """The error says how to strip the prefix, which then loads; a prefix of some weights alone is torch's error."""
    model = fd.LongNet(TINY)
    named = {f"{prefix}{name}": each for name, each in model.state_dict().items()}
    says = f"each begins with '{prefix}', .*: load {{name.removeprefix"
    with pytest.raises(ValueError, match=says):
        model.load_state_dict(named)
    model.load_state_dict({name.removeprefix(prefix): each for name, each in named.items()})
    model.save_pretrained(tmp_path)
    save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        fd.LongNet.from_pretrained(tmp_path)
    named["norm.weight"] = named.pop(f"{prefix}norm.weight")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(named)
    assert model.load_state_dict(named, strict=False).unexpected_keys


@pytest.mark.parametrize(("bad", "says"), [(-1, "-1 to 3"), (TINY.vocab_size, f"0 to {TINY.vocab_size}")])
def test_a_token_outside_of_the_vocabulary(bad, says) -> None:
    model, tokens = fd.LongNet(TINY), torch.tensor([[0, 3, bad, 2]])
    with pytest.raises(
        ValueError, match=rf"at least 0 and below vocab_size={TINY.vocab_size} .*; got values from {says}"
    ):
        model(tokens)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens.clamp(0, 3)), model(tokens.clamp(0, 3)))
