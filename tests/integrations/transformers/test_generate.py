"""Generated tokens are those of SDPA without a pattern, and those of whole passes with one, by any cache."""

from functools import cache
from typing import Any

import pytest
import torch

from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern

from .models import batch_of, model_of, tokens

PATTERNS = {"none": {}, "longnet": masks.longnet((4, 32), (1, 4)), "window": masks.local_window(left=7, right=0)}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 7},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": "llama"},
    "static": {"cache_implementation": "static"},
    "static beams": {"num_beams": 3, "cache_implementation": "static"},
}
ONE_ROW = ("lookup", "assisted")  # transformers runs these on one sequence
CASES: dict[tuple[str, str], str] = {
    ("llama", "none"): "greedy, no cache, chunks, assisted, static beams",
    ("gemma3", "none"): "greedy, static beams, chunks, assisted",
    ("mistral", "none"): "static, chunks",
    ("llama", "longnet"): "greedy, beams, chunks, lookup, assisted, static, static beams",
    ("gemma3", "longnet"): "static, chunks, lookup",
}
EVICTING: dict[tuple[str, str], str] = {
    ("llama", "longnet"): "greedy, beams, chunks, lookup, assisted",
    ("llama", "window"): "beams",
    ("gemma3", "window"): "greedy, lookup",
    **{(name, "longnet"): "greedy" for name in ("gemma3", "gpt-oss", "llama4")},
    **{(name, "none"): "greedy" for name in ("gemma3", "gpt-oss", "llama4")},
}


def rows_of(cases: dict[tuple[str, str], str]) -> list[tuple[str, str, str]]:
    return [(*case, way) for case, ways in cases.items() for way in ways.split(", ")]


@cache
def patterned(name: str, pattern: str) -> Any:
    """With a pattern; as transformers has it for None."""
    model = model_of(name)
    if pattern:
        return set_pattern(model, PATTERNS[pattern])
    model.set_attn_implementation("eager" if name == "gpt-oss" else "sdpa")  # sdpa takes no sinks
    return model


def generated(model: Any, way: str, *, padded: bool, **options: Any) -> torch.Tensor:
    """5 tokens after each row of a batch whose second row may be padded on the left, or after one row."""
    batch = batch_of("llama", "left") if padded else {"input_ids": tokens()}
    if way in ONE_ROW:
        batch = {name: x[:1] for name, x in batch.items()}
    chosen = {**WAYS[way], **options}
    if "assistant_model" in chosen:
        chosen["assistant_model"] = model_of("llama", num_hidden_layers=1)
    return model.generate(**batch, max_new_tokens=5, do_sample=False, eos_token_id=None, **chosen)


@cache
def expected(name: str, pattern: str, num_beams: int, padded: bool) -> torch.Tensor:
    """By SDPA without a pattern, and without a cache with one."""
    own = pattern == "none"
    model = patterned(name, "" if own else pattern)
    return generated(model, "greedy", padded=padded, num_beams=num_beams, use_cache=own)


def assert_expected(name: str, pattern: str, way: str, *, padded: bool, **options: Any) -> None:
    found = generated(patterned(name, pattern), way, padded=padded, **options)
    want = expected(name, pattern, WAYS[way].get("num_beams", 1), padded)
    assert torch.equal(found, want[: len(found)])


@pytest.mark.parametrize(("name", "pattern", "way"), rows_of(CASES))
def test_tokens_by_caches_of_transformers(name: str, pattern: str, way: str) -> None:
    assert_expected(name, pattern, way, padded=True)


@pytest.mark.parametrize(("name", "pattern", "way"), rows_of(EVICTING))
def test_tokens_by_a_cache_that_evicts(name: str, pattern: str, way: str) -> None:
    assert_expected(name, pattern, way, padded=False, past_key_values=FlexdilatedCache())


def test_tokens_depend_on_the_pattern() -> None:
    """The others could not fail otherwise."""
    found = {pattern: expected("llama", pattern, 1, True) for pattern in PATTERNS}
    assert not torch.equal(found["none"], found["longnet"])
    assert not torch.equal(found["none"], found["window"])
