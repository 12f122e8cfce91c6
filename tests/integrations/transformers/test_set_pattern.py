"""Patterns given to layers: which get one, what is kept in the config, compiled and checkpointed models, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern
from tests.integrations.passes import assert_dropout_trains, gradients_of

from .models import NUM_HEADS, batch_of, model_of, real_logits, tokens

LONGNET = masks.longnet((4, 16), (1, 2))
NARROW = masks.local_window(left=2, right=0)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(tokens()).logits


def test_layers_by_number_and_by_function() -> None:
    model = model_of("llama")
    assert set_pattern(model, {1: NARROW}) is model
    by_number = logits(model)
    set_pattern(model, lambda layer: NARROW if layer.layer_idx == 1 else None)
    assert torch.equal(logits(model), by_number)
    set_pattern(model, NARROW)
    assert not torch.allclose(logits(model), by_number, atol=1e-4)


def test_no_patterns_give_the_model_back() -> None:
    """With nothing in its config to load."""
    model = model_of("llama")
    before, config = logits(model), model.config.to_dict()
    set_pattern(model, LONGNET)
    assert not torch.allclose(logits(model), before, atol=1e-4)
    set_pattern(model, {})
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config


def test_a_module_around_a_model() -> None:
    """And another name of the implementation, twice."""
    wrapped: Any = nn.Sequential(model_of("llama"))
    for _ in range(2):
        set_pattern(wrapped, LONGNET, name="sparse")
    assert wrapped[0].config._attn_implementation == "sparse"
    alone = model_of("llama")
    set_pattern(alone, LONGNET)
    assert torch.equal(logits(wrapped[0]), logits(alone))


def gradients(model, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    real_logits(model, batch, use_cache=False).pow(2).sum().backward()
    return gradients_of(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_graph_for_all_values() -> None:
    """Padding on either side, and inside: values are not read while a model is traced."""
    model = model_of("llama", num_hidden_layers=1).train()
    set_pattern(model, LONGNET)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = dict(counters["graph_break"])
    for padding in ("left", "right", "inside"):
        batch = batch_of("llama", padding)
        want, grads = real_logits(model, batch, use_cache=False), gradients(model, batch)
        got = real_logits(compiled, batch, use_cache=False)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        model.zero_grad()
        got.pow(2).sum().backward()
        for name, x in model.named_parameters():
            torch.testing.assert_close(x.grad, grads[name], rtol=1e-3, atol=1e-4)
    assert dict(counters["graph_break"]) == before


def test_bad_patterns_change_nothing() -> None:
    model = model_of("llama")
    before, want = model.config._attn_implementation, logits(model)
    for pattern, error, said in [
        ({5: LONGNET}, ValueError, "numbered from 0 to 1; got 5"),
        ({"0": LONGNET}, ValueError, "numbered from 0 to 1; got '0'"),
        ({0: "causal"}, TypeError, "layer 0 must get a pattern or None; got 'causal'"),
        ("causal", TypeError, "pattern must be a pattern, a mapping"),
        (masks.causal() & masks.documents("ids"), ValueError, "no run-time tensors"),
        (masks.per_head([NARROW] * (NUM_HEADS + 1)), ValueError, f"layer 0 has {NUM_HEADS} heads: "),
        (None, ValueError, "config holds no patterns"),
    ]:
        with pytest.raises(error, match=said):
            set_pattern(model, pattern)
    with pytest.raises(ValueError, match="compose must be one of"):
        set_pattern(model, LONGNET, compose="or")
    with pytest.raises(TypeError, match="model is a PreTrainedModel of transformers or contains one; got Linear"):
        set_pattern(nn.Linear(2, 2), LONGNET)
    assert model.config._attn_implementation == before
    assert torch.equal(logits(model), want)


CALLS = [
    ({"output_attentions": True}, ValueError, "forms no attention weights: call without output_attentions=True"),
    ({"attention_mask": torch.ones(2, 1, 50, 50) > 0}, ValueError, r"a ready-made mask of shape \(2, 1, 50, 50\)"),
    ({"attention_mask": torch.full((2, 1, 1, 50), -1.0)}, ValueError, "which adds other numbers than 0 and less than"),
    (
        {"attention_mask": masks.block_mask(masks.causal(), 50, num_heads=1)},
        TypeError,
        r"give masks\.custom\(block_mask\) to set_pattern\(model, pattern\); got BlockMask",
    ),
]


@pytest.mark.parametrize(("given", "error", "said"), CALLS)
def test_calls_that_it_does_not_serve(given: dict[str, Any], error: type[Exception], said: str) -> None:
    model = set_pattern(model_of("llama"), LONGNET)
    with pytest.raises(error, match=said):
        model(tokens(), **given)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("gpt2", {"attn_pdrop": 0.1}),
        ("bert", {"attention_probs_dropout_prob": 0.1}),
        ("vit", {"attention_probs_dropout_prob": 0.1}),
        ("whisper", {"attention_dropout": 0.1}),
    ],
)
def test_attention_dropout_trains(name: str, options: dict[str, float]) -> None:
    model, batch = model_of(name, **options), batch_of(name)
    set_pattern(model, {})
    assert_dropout_trains(model, lambda: next(iter(model(**batch).values())))


def test_dropout_needs_all_keys_and_no_selection() -> None:
    model = model_of("llama", attention_dropout=0.1)
    set_pattern(model, LONGNET)
    cache = FlexdilatedCache(model.config)
    model.train()
    refused = pytest.raises(ValueError, match=r"a FlexdilatedCache takes no dropout: leave the cache.*got dropout=0\.1")
    with torch.no_grad(), refused:
        model(tokens(), past_key_values=cache)
