"""Layers of a transformers model that choose their keys from the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

import flexdilated as fd
from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern

from .models import model_of, tokens


def selection(most: int = 2, gradient: str = "none", **options: Any) -> fd.SelectedAttention:
    options = {"always": masks.chunked(8), **options}
    return fd.SelectedAttention(fd.BlockSelector(block=8, choose=fd.TopK(most), **options), gradient)


TOKENS = tokens(length=80)


def test_all_blocks_are_the_model_as_it_was() -> None:
    """Logits and gradients, with padding on either side; with few blocks they are others."""
    model = model_of("llama")
    for padding in (slice(0, 0), slice(0, 21), slice(60, 80)):
        mask = torch.ones(2, 80, dtype=torch.long)
        mask[1, padding] = 0
        model.set_attn_implementation("sdpa")
        expected = model(TOKENS, attention_mask=mask).logits[mask.bool()]
        set_pattern(model, selection(10))
        logits = model(TOKENS, attention_mask=mask).logits[mask.bool()]
        assert_close(logits, expected, rtol=0, atol=1e-5)
        weights = tuple(model.parameters())
        found, wanted = (torch.autograd.grad(x.square().mean(), weights) for x in (logits, expected))
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-5)
        set_pattern(model, {1: selection(1)})
        assert (model(TOKENS, attention_mask=mask).logits[mask.bool()] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("gradient", ["none", "bias"])
def test_decoding_is_one_pass(gradient: str) -> None:
    """In chunks and steps over a DynamicCache, and by generate."""
    model, cache = model_of("llama"), DynamicCache()
    set_pattern(model, selection(gradient=gradient))
    with torch.no_grad():
        whole = model(TOKENS).logits
        parts = [model(part, past_key_values=cache).logits for part in TOKENS.split([50, 1, 1, 28], dim=1)]
    assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    found = model.generate(TOKENS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    again = model.generate(TOKENS, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
    assert found.equal(again)


@torch.no_grad()
@pytest.mark.parametrize("kept", ["padding", "documents"])
def test_a_cache_of_fixed_size_is_longer_than_its_tokens(kept: str) -> None:
    """Masks and positions that say something of each key, in a prefill and, of one document, a step after it."""
    model = model_of("llama")
    set_pattern(model, selection())
    given = {"attention_mask": torch.ones(2, 51, dtype=torch.long), "position_ids": torch.arange(51).expand(2, -1)}
    ends = [(0, 50), (50, 51)]
    if kept == "padding":
        given["attention_mask"][1, :16] = 0
    else:
        ends.pop()
        given = {"position_ids": torch.cat([torch.arange(24), torch.arange(27)]).expand(2, -1)}

    def parts(past: Any) -> torch.Tensor:
        found = []
        for begin, end in ends:
            mask = {name: x[:, :end] if name == "attention_mask" else x[:, begin:end] for name, x in given.items()}
            found.append(model(TOKENS[:, begin:end], past_key_values=past, **mask).logits)
        return torch.cat(found, 1)

    fixed, grown = parts(StaticCache(config=model.config, max_cache_len=64)), parts(DynamicCache(config=model.config))
    real = given.get("attention_mask", torch.ones(2, 51))[:, : ends[-1][1]].bool()
    assert_close(fixed[real], grown[real], rtol=0, atol=1e-5)


def test_replace_leaves_out_the_rule_of_the_model() -> None:
    model = model_of("llama")
    set_pattern(model, selection(10, within=masks.every()), compose="replace")
    out = model(TOKENS).logits
    set_pattern(model, masks.every(), compose="replace")
    assert_close(out, model(TOKENS).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_it_refuses() -> None:
    model = model_of("llama")
    set_pattern(model, selection(query_block=8, future_in_choice=True))
    cache = DynamicCache()
    model(TOKENS, past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"future_in_choice=True is for prefill only, .* got queries from position 80 on"
    ):
        model(TOKENS[:, :1], past_key_values=cache)
    set_pattern(model, selection(query_block=8, query_summary="first"))
    cache = DynamicCache()
    model(TOKENS[:, :75], past_key_values=cache)
    with pytest.raises(ValueError, match=r"decode with query_block=1; got 8 and queries from position 75 on"):
        model(TOKENS[:, 75:], past_key_values=cache)
    with pytest.raises(ValueError, match="needs all keys: leave the cache to transformers"):
        model(TOKENS, past_key_values=FlexdilatedCache())
