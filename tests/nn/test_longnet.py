"""LongNet: the whole model against its dense definition, in every choice and order; its laws, its training."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.nn import LongNetConfig
from flexdilated.nn._longnet_block import Block
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


@pytest.mark.parametrize(
    ("engine", "layout", "num_tokens"),
    [("aten", "natural", 1), ("aten", "residue", 1), ("aten", "natural", 12), ("aten", "residue", 65),
     ("reference", "natural", 65), ("reference", "residue", 2)],
)  # fmt: skip
def test_engines_and_lengths(engine, layout, num_tokens):
    assert_is_defined(replace(TINY, layout=layout, engine=engine), tokens_of(N=num_tokens))


def test_auto_takes_the_planners_layout(monkeypatch):
    asked = []

    def recommended_layout(pattern, num_tokens, *, num_heads, device):
        asked.append((pattern, num_tokens, num_heads, str(device)))
        return fd.masks.layout(pattern, num_tokens)

    monkeypatch.setattr(fd.masks, "recommended_layout", recommended_layout)
    model = model_of(replace(TINY, layout="auto"))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[3]))
    model(tokens_of())
    # Asked at the longest segment, whatever the number of tokens.
    assert asked == [(TINY.attention_pattern, 64, 4, "cpu")]
    assert seen == [fd.masks.layout(TINY.attention_pattern, N)]


@pytest.mark.parametrize("causal", [True, False])
def test_the_future_changes_nothing_when_causal(causal):
    model, tokens = model_of(replace(TINY, layout="residue", causal=causal)), tokens_of()
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % V
    moved = (model(changed) - model(tokens)).abs().amax((0, 2))
    assert bool((moved[:20] < 1e-6).all()) == causal
    assert (moved[20:] > 1e-3).all()


@pytest.mark.parametrize(("layout", "checkpoint"), [("natural", False), ("residue", True), ("auto", False)])
def test_padded_equals_unpadded(layout, checkpoint):
    """Each sequence of a padded batch gets what it gets alone, whatever tokens the padding holds."""
    model = model_of(replace(TINY, causal=False, layout=layout, checkpoint=checkpoint))
    tokens, lengths = tokens_of(B=3), (N, 20, 1)
    padding = torch.arange(N) >= torch.tensor(lengths)[:, None]
    out = model(tokens, key_padding_mask=padding)
    for row, length in enumerate(lengths):
        assert_close(out[row, :length], model(tokens[row, None, :length])[0], **TOLERANCE)
    weight = model.blocks[0].qkv.weight
    (packed,) = torch.autograd.grad(out[~padding].sum(), weight)
    alone = sum(model(tokens[row, None, :length]).sum() for row, length in enumerate(lengths))
    assert_close(packed, torch.autograd.grad(alone, weight)[0], **TOLERANCE)


def test_padding_is_checked():
    model, tokens = model_of(TINY), tokens_of()
    with pytest.raises(ValueError, match=r"shape \(2, 37\), one entry for each key; got \(2, 36\)"):
        model(tokens, key_padding_mask=torch.zeros(2, N - 1, dtype=torch.bool))


def test_checkpointing_runs_each_block_again(monkeypatch):
    calls = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *args: calls.append(self) or forward(self, *args))
    gradients = []
    for checkpoint, expected_calls in ((False, 2), (True, 4)):
        model = model_of(replace(TINY, layout="residue", checkpoint=checkpoint))
        bits_of(model, tokens_of()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert len(calls) == expected_calls
        calls.clear()
    assert_close(*gradients, rtol=0, atol=0)
    with torch.no_grad():
        model(tokens_of())
    assert len(calls) == 2


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


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(remake):
    model = model_of(replace(TINY, layout="residue"))
    expected = model(tokens_of())
    assert_close(remake(model)(tokens_of()), expected, rtol=0, atol=0)


def test_state_and_config_round_trip(tmp_path):
    model = model_of(replace(TINY, num_kv_heads=2, tie_embeddings=True))
    torch.save({"config": asdict(model.config), "model": model.state_dict()}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    again = model_of(LongNetConfig(**saved["config"]), seed=1)
    assert (again(tokens_of()) - model(tokens_of())).abs().max() > 0.01
    again.load_state_dict(saved["model"])
    assert again.config == model.config
    assert_close(again(tokens_of()), model(tokens_of()), rtol=0, atol=0)


def test_repr_names_pattern_layout_and_engine():
    text = repr(fd.LongNet(replace(TINY, engine="reference")))
    assert all(part in text for part in (" & causal()", "longnet(", "layout='natural'", "engine='reference'"))


@pytest.mark.parametrize(
    ("config", "x", "error", "message"),
    [
        (TINY, torch.zeros(2, 5, dtype=torch.int32), TypeError, "tokens must be int64; got torch.int32"),
        (
            TINY,
            torch.zeros(2, 5, dtype=torch.int64, device="meta"),
            ValueError,
            "on the model's device cpu; got meta",
        ),
        (EMBEDDED, torch.zeros(2, 5, 23, dtype=torch.float64), ValueError, r"shape \(batch, tokens, 24\)"),
        (EMBEDDED, torch.zeros(2, 5, 24), TypeError, "the model's dtype torch.float64; got torch.float32"),
    ],
)
def test_bad_inputs(config, x, error, message):
    with pytest.raises(error, match=message):
        model_of(config)(x)
