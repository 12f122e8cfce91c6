"""Generated tokens are those of SDPA without a pattern, and those of whole passes with one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import StaticCache

from flexdilated import masks
from flexdilated.integrations.transformers import set_pattern

from .models import batch_of, model_of, tokens

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "beams, static cache": {"num_beams": 2, "cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prefill in chunks": {"prefill_chunk_size": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": "llama"},
}
ONE_ROW = ("prompt lookup", "assisted")  # transformers runs these on one sequence


def generated(model, way: str, **options: Any) -> torch.Tensor:
    """7 tokens after each row of a batch whose second row is padded on the left, or after one row."""
    batch = batch_of("llama", "left")
    if way in ONE_ROW:
        batch = {name: x[:1] for name, x in batch.items()}
    chosen = {**WAYS[way], **options}
    if "assistant_model" in chosen:
        chosen["assistant_model"] = model_of("llama", num_hidden_layers=1)
    return model.generate(**batch, max_new_tokens=7, do_sample=False, **chosen)


@pytest.mark.parametrize(
    ("name", "way"),
    [*(("llama", way) for way in WAYS),
     *(("gemma3", way) for way in ("greedy", "beams, static cache", "prefill in chunks", "assisted")),
     *(("mistral", way) for way in ("static cache", "prefill in chunks"))],
)  # fmt: skip
def test_tokens_of_sdpa(name: str, way: str) -> None:
    model = model_of(name)
    model.set_attn_implementation("sdpa")
    want = generated(model, way)
    set_pattern(model, {})
    assert torch.equal(generated(model, way), want)


def patterned(name: str) -> Any:
    model = model_of(name)
    set_pattern(model, masks.longnet((4, 32), (1, 4)))
    return model


@cache
def whole_passes(name: str) -> torch.Tensor:
    return generated(patterned(name), "no cache")


@pytest.mark.parametrize(
    ("name", "way"),
    [*(("llama", way) for way in WAYS if way not in ("no cache", "beams", "beams, static cache")),
     *(("gemma3", way) for way in ("static cache", "prefill in chunks", "prompt lookup"))],
)  # fmt: skip
def test_tokens_of_whole_passes(name: str, way: str) -> None:
    found, want = generated(patterned(name), way), whole_passes(name)
    assert torch.equal(found, want[: len(found)])


def test_beams_with_a_pattern() -> None:
    model = patterned("llama")
    found = generated(model, "beams")
    assert torch.equal(found, generated(model, "beams", use_cache=False))
    assert torch.equal(found, generated(model, "beams", cache_implementation="static"))


def test_tokens_depend_on_the_pattern() -> None:
    """The others could not fail otherwise."""
    model = model_of("llama")
    set_pattern(model, {})
    want = generated(model, "greedy")
    set_pattern(model, masks.local_window(left=1, right=0))
    assert not torch.equal(generated(model, "greedy"), want)


@torch.no_grad()
def test_a_window_that_moves_with_the_cache() -> None:
    """Sliding caches hand over keys that begin behind position 0."""
    model = model_of("mistral", sliding_window=8)
    set_pattern(model, masks.longnet((4, 16), (1, 2)))
    row = tokens()[:1]
    want = model(row, use_cache=False).logits
    past, found = None, []
    for part in row.split([20, 1, 1, 9, 1, 18], dim=1):
        out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_compiled_step_over_a_static_cache_reads_the_position_once() -> None:
    """One graph for all positions, in which one number comes to the host, however many layers there are."""
    torch.compiler.reset()
    model = model_of("llama", num_hidden_layers=2)
    set_pattern(model, masks.longnet((4, 16), (1, 2)))
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model, fullgraph=True, backend=kept)
    ids, past = tokens(), StaticCache(config=model.config, max_cache_len=50)
    want = model(ids).logits
    model(ids[:, :8], past_key_values=past, use_cache=True)
    for place in range(8, 20):
        found = step(ids[:, place, None], past_key_values=past, use_cache=True).logits[:, 0]
        torch.testing.assert_close(found, want[:, place], rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("item") == 1
    assert targets.count("flexdilated.aten.default") == 2
