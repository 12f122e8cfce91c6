"""Models of other libraries: what they cost with this library's attention."""

from collections.abc import Iterator
from typing import Any

import torch

from flexdilated import masks
from flexdilated.decoding import Reader

from ._checks import assert_near
from ._jobs import Job, interleave, ratio, tokens_text
from ._measures import Row, at_most, measure
from ._rules import LONGNET_4, LongNet


@measure(spec=LONGNET_4.shrunk(64).as_causal(), layers=2, heads=4, head_dim=16, past=(64, 256), repeats=2)
@torch.no_grad()
def llama_step(
    spec: LongNet = LONGNET_4.as_causal(),
    layers: int = 8,
    heads: int = 8,
    head_dim: int = 64,
    past: tuple[int, ...] = (4096, 65536),
    repeats: int = 15,
) -> Iterator[Row]:
    """Does a decoding step of a Llama cost no more with a pattern than with SDPA, and less where it has read much?

    Batch 1, random weights, keys and values drawn for the past. SDPA has the cache that transformers makes by itself.
    """
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern

    torch.manual_seed(0)
    width = heads * head_dim
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=1 << 20)).eval()
    set_pattern(model, spec.pattern())
    token = torch.zeros(1, 1, dtype=torch.long)

    def step(cache: object, implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        return model(token, past_key_values=cache).logits

    for tokens in past:
        drawn = [torch.randn(2, 1, heads, tokens, head_dim) for _ in range(layers)]
        dense, sparse, held = DynamicCache(), DynamicCache(), FlexdilatedCache()
        for index, (k, v) in enumerate(drawn):
            dense.update(k, v, index)
            sparse.update(k, v, index)
            held.layers.append(_filled(held, spec.pattern(), k, v))
        assert_near("a step", step(held, "flexdilated"), step(sparse, "flexdilated"))
        del sparse
        jobs = [
            Job("SDPA", lambda _, cache=dense: step(cache, "sdpa")),
            Job("flexdilated", lambda _, cache=held: step(cache, "flexdilated")),
        ]
        theirs, ours = interleave(jobs, repeats=repeats)
        what = f"{spec.label}, {layers} layers, {heads} heads, a step after {tokens_text(tokens)} tokens"
        yield Row(
            f"{what}: time over SDPA's",
            at_most(1.3 if tokens == min(past) else 1.0, "×"),
            ratio(ours, theirs),
            (theirs, ours),
        )


def _filled(cache: Any, pattern: masks.Pattern | masks.Mixture, k: torch.Tensor, v: torch.Tensor) -> Any:
    """A layer of the cache that has seen these keys and values."""
    layer = cache.layer_class_to_replicate()
    layer.update(k, v)
    layer.readers[pattern] = Reader(pattern, num_heads=k.shape[1])  # as if it had attended
    return layer
