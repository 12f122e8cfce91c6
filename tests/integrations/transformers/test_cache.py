"""FlexdilatedCache: the tokens of transformers' own caches, memory that stays bounded, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern

from .models import model_of, tokens

PATTERNS = {"longnet": masks.longnet((4, 32), (1, 4)), "window": masks.local_window(left=7, right=0), "none": None}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "prefill in chunks": {"prefill_chunk_size": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {},
}


def model_with(name: str, pattern: str) -> Any:
    model = model_of(name)
    set_pattern(model, {} if PATTERNS[pattern] is None else PATTERNS[pattern])
    return model


@pytest.mark.parametrize(
    ("name", "pattern", "way"),
    [
        *(("llama", "longnet", way) for way in WAYS),
        ("llama", "window", "beams"),
        *(("gemma3", pattern, "greedy") for pattern in PATTERNS),
        *((name, pattern, "greedy") for name in ("gpt-oss", "llama4") for pattern in ("longnet", "none")),
        ("gemma3", "window", "prompt lookup"),
    ],
)
def test_tokens_of_a_dynamic_cache(name: str, pattern: str, way: str) -> None:
    model = model_with(name, pattern)
    one = way in ("prompt lookup", "assisted")  # transformers runs these on one sequence
    rows, options = tokens()[: 1 if one else 2], {"max_new_tokens": 9, "do_sample": False}
    if way == "assisted":
        options["assistant_model"] = model_of("llama", num_hidden_layers=1)
    want = model.generate(rows, **options, **WAYS[way])
    found = model.generate(rows, past_key_values=FlexdilatedCache(), **options, **WAYS[way])
    assert torch.equal(found, want)


@torch.no_grad()
def test_memory_stays_bounded() -> None:
    """A window keeps its keys, and the tokens that may be taken back, in whole pages."""
    model, cache, most = model_with("llama", "window"), FlexdilatedCache(undo=8), 0
    for begin in range(0, 600, 6):
        model((tokens(1, 6) + begin) % 97, past_key_values=cache, position_ids=torch.arange(6)[None])
        most = max(most, cache.layers[0].keys.shape[2])
    assert cache.get_seq_length() == 600
    assert most <= 2 * (8 + 8 + 128)


@torch.no_grad()
def test_steps_equal_one_pass() -> None:
    model, rows, cache = model_with("llama", "longnet"), tokens(), FlexdilatedCache()
    want = model(rows, use_cache=False).logits
    found = [model(part, past_key_values=cache).logits for part in rows.split([20, 1, 1, 9, 1, 18], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=0, atol=1e-5)
    assert cache.layers[1].values.shape == (2, 2, 50, 16)


@torch.no_grad()
def test_entries_and_tokens_of_a_cache() -> None:
    model, rows, cache = model_with("llama", "longnet"), tokens(), FlexdilatedCache()
    model(rows[:, :30], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    model(rows[:, 40:], past_key_values=cache)
    cache.crop(-10)
    turned = rows.flip(0)
    got = model(turned[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(got, model(turned, use_cache=False).logits[:, 30:], rtol=0, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(
        model(rows, past_key_values=cache).logits, model(rows, use_cache=False).logits, rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_what_it_refuses() -> None:
    model = model_with("llama", "longnet")
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :9] = 0
    with pytest.raises(ValueError, match="takes rows without padding"):
        model(tokens(), attention_mask=mask, past_key_values=FlexdilatedCache())
    cache = FlexdilatedCache()
    model(tokens(), past_key_values=cache)
    set_pattern(model, masks.local_window(left=3, right=0))
    with pytest.raises(ValueError, match="layer's rule changed from longnet"):
        model(tokens(), past_key_values=cache)
    set_pattern(model, masks.local_window(left=3, right=3), compose="replace")
    with pytest.raises(ValueError, match="a cache needs a causal pattern"):
        model(tokens(), past_key_values=FlexdilatedCache())
    with pytest.raises(ValueError, match="undo must be at least 0"):
        model(tokens(), past_key_values=FlexdilatedCache(undo=-1))
    model.set_attn_implementation("sdpa")
    cache = FlexdilatedCache()
    model(tokens(), past_key_values=cache)
    with pytest.raises(ValueError, match="goes with flexdilated's attention, which has not been called"):
        model(tokens(), past_key_values=cache)
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative; got 1"):
        cache.crop(1)


def test_gradients_do_not_go_through_it() -> None:
    model = model_with("llama", "longnet")
    with pytest.raises(ValueError, match="a cache passes no gradient on"):
        model(tokens(), past_key_values=FlexdilatedCache())
